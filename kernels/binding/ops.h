#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mega_moe::binding {

using torch::stable::Tensor;

std::vector<int64_t> staging_layout(int64_t max_tokens, int64_t top_k, int64_t hidden, bool quantise);

void stage(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, int64_t buffer,
           int64_t buffer_bytes, int64_t max_tokens, int64_t num_experts, bool quantise);

void clock_probe(const Tensor& out);

std::string build_info();

}  // namespace mega_moe::binding
