#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mega_moe::binding {

using torch::stable::Tensor;

std::vector<int64_t> staging_layout(int64_t max_tokens, int64_t top_k, int64_t hidden, bool quantize);

void stage(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, int64_t buffer,
           int64_t buffer_bytes, int64_t max_tokens, int64_t num_experts, bool quantize, bool power_of_two);

void quantize_weights(const Tensor& weight, const Tensor& codes, const Tensor& codes_transposed,
                      const Tensor& scales, bool power_of_two);

std::vector<int64_t> symmetric_layout(int64_t max_tokens, int64_t top_k, int64_t num_experts, int64_t hidden,
                                      int64_t intermediate, int64_t num_ranks, int64_t pool_rows,
                                      bool quantize, bool home, bool canaries, int64_t backward);
std::vector<int64_t> workspace_layout(int64_t max_tokens, int64_t top_k, int64_t num_experts, int64_t hidden,
                                      int64_t intermediate, int64_t num_ranks, int64_t pool_rows,
                                      bool quantize, bool home, bool canaries, int64_t backward);
std::string symmetric_parts();
std::string workspace_parts();

void route(const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& summary,
           std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
           int64_t num_experts, int64_t hidden, int64_t intermediate, int64_t pool_rows, bool quantize,
           bool home, bool canaries, int64_t backward, int64_t rank, int64_t num_sms, int64_t arrival_ns,
           int64_t progress_ns, int64_t refused_tokens, bool weighted);

void moe_forward(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& w_gate_up,
                 const Tensor& w_down, const Tensor& y, const Tensor& saved_gate_up, const Tensor& summary,
                 std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
                 int64_t num_experts, int64_t pool_rows, bool canaries, int64_t backward, int64_t rank,
                 int64_t num_sms, int64_t arrival_ns, int64_t progress_ns, double clamp, int64_t delay_seed,
                 int64_t trace, int64_t trace_bytes);

void moe_forward_fp8(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights,
                     const Tensor& w_gate_up, const Tensor& gate_up_sf, const Tensor& w_down,
                     const Tensor& down_sf, const Tensor& y, const Tensor& summary,
                     std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
                     int64_t num_experts, int64_t pool_rows, bool canaries, int64_t backward, int64_t rank,
                     int64_t num_sms, int64_t arrival_ns, int64_t progress_ns, double clamp,
                     bool power_of_two, int64_t delay_seed, int64_t trace, int64_t trace_bytes);

void moe_backward(const Tensor& x, const Tensor& dy, const Tensor& topk_idx, const Tensor& topk_weights,
                  const Tensor& w_gate_up, const Tensor& w_down, const Tensor& saved_gate_up,
                  const Tensor& dx, const Tensor& dtopk, const Tensor& dw_gate_up, const Tensor& dw_down,
                  const Tensor& summary, std::vector<int64_t> buffers, int64_t workspace, int64_t record,
                  int64_t max_tokens, int64_t num_experts, int64_t pool_rows, bool canaries, int64_t rank,
                  int64_t num_sms, int64_t arrival_ns, int64_t progress_ns, double clamp, bool accumulate,
                  int64_t delay_seed, int64_t trace, int64_t trace_bytes);

void moe_backward_fp8(const Tensor& x, const Tensor& dy, const Tensor& topk_idx, const Tensor& topk_weights,
                      const Tensor& w_gate_up, const Tensor& w_gate_up_t, const Tensor& gate_up_sf,
                      const Tensor& w_down_t, const Tensor& down_sf, const Tensor& dx, const Tensor& dtopk,
                      const Tensor& dw_gate_up, const Tensor& dw_down, const Tensor& summary,
                      std::vector<int64_t> buffers, int64_t workspace, int64_t record, int64_t max_tokens,
                      int64_t num_experts, int64_t pool_rows, bool canaries, bool quantize,
                      bool quantize_gradients, int64_t rank, int64_t num_sms, int64_t arrival_ns,
                      int64_t progress_ns, double clamp, bool power_of_two, bool accumulate,
                      int64_t delay_seed, int64_t trace, int64_t trace_bytes);

void clock_probe(const Tensor& out);

std::string build_info();

}  // namespace mega_moe::binding
