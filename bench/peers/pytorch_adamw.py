#!/usr/bin/env python3
"""AdamW over fp32 parameters in PyTorch on the CPU, the default implementation and the fused one: a peer of bench_adamw.

28 bytes a parameter, as there. Ends with a line of JSON: milliseconds of each (best of the repeats) and the version.
"""
import argparse
import json
import time

import torch


def best_of(parameters, repeats, **extra):
    try:
        optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **extra)
        optimizer.step()
    except (RuntimeError, TypeError):
        return None
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parameter = torch.randn(args.elements).mul_(0.02).requires_grad_()
    parameter.grad = torch.randn(args.elements).mul_(1e-3)
    print(json.dumps({
        "name": "PyTorch " + torch.__version__.split("+")[0],
        "threads": args.threads,
        "default_ms": best_of([parameter], args.repeats),
        "fused_ms": best_of([parameter], args.repeats, fused=True),
    }))


if __name__ == "__main__":
    main()
