// The backward half of the attention table (ops_attention_backward.cpp), for the table in ops_attention.cpp.
#pragma once

#include "kernels/cpu/ops_attention.h"

namespace spipe::cpu::SPIPE_ISA {

std::int64_t attention_backward_scratch(std::int64_t head_dim);
void attention_delta(const AttentionBackwardArgs& args, std::int64_t batch, std::int64_t head, float* delta);
void attention_backward(const AttentionBackwardArgs& args, const AttentionBackwardItem& item);

}  // namespace spipe::cpu::SPIPE_ISA
