#!/usr/bin/env python3
"""A training step of GPT-2 124M in PyTorch on the CPU, fp32, without dropout: a peer of bench_train_step.

Ends with a line of JSON: name, step_seconds (median), version. Works with PyTorch 1.13 and later: what a version has is used
(scaled_dot_product_attention, fused AdamW); --compile adds torch.compile.
"""
import argparse
import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

HIDDEN, LAYERS, HEADS, VOCABULARY, POSITIONS = 768, 12, 12, 50257, 1024


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, HIDDEN // HEADS).transpose(1, 2) for y in self.qkv(x).split(HIDDEN, dim=2))
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(2, 3) / math.sqrt(HIDDEN // HEADS)
            mask = torch.ones(t, t, dtype=torch.bool).triu(1)
            y = scores.masked_fill(mask, float("-inf")).softmax(dim=3) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, HIDDEN))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def optimizer_of(model):
    settings = dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for extra in (dict(fused=True), dict(foreach=True), {}):
        try:
            optimizer = torch.optim.AdamW(model.parameters(), **settings, **extra)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            return optimizer
        except (RuntimeError, TypeError):
            continue
    raise SystemExit("no AdamW works")


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 4), ("length", 64), ("threads", 2), ("steps", 5)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm; 0: no clipping")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    model = Gpt2()
    optimizer = optimizer_of(model)
    step_model = torch.compile(model) if args.compile else model
    seconds = []
    for _ in range(2 + args.steps):
        tokens = torch.randint(VOCABULARY, (args.batch, args.length))
        targets = torch.randint(VOCABULARY, (args.batch, args.length))
        begin = time.perf_counter()
        loss = step_model(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if args.clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - begin)
    name = "PyTorch " + torch.__version__.split("+")[0] + (" compiled" if args.compile else "")
    print(json.dumps({"name": name, "step_seconds": statistics.median(seconds[2:]), "version": torch.__version__}))


if __name__ == "__main__":
    main()
