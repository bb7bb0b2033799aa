#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "binding/operands.h"
#include "binding/rank.h"

// The operators; library.cpp has their schemas.
namespace mega_moe::binding {

void quantize_weights(const Tensor& weight, MaybeTensor codes, MaybeTensor codes_t, const Tensor& scales,
                      bool power_of_two);

std::vector<int64_t> symmetric_layout(Words shape);
std::vector<int64_t> workspace_layout(Words shape);
std::string symmetric_parts();
std::string workspace_parts();

void route(const Tensor& topk_idx, MaybeTensor topk_weights, const Tensor& summary, Words rank,
           int64_t refused_tokens);

void moe_forward(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& w_gate_up,
                 const Tensor& w_down, MaybeTensor gate_up_sf, MaybeTensor down_sf, const Tensor& y,
                 MaybeTensor saved_gate_up, const Tensor& summary, Words rank, std::string activation,
                 std::optional<double> clamp, std::optional<double> alpha, MaybeTensor trace,
                 int64_t delay_seed);

void moe_backward(const Tensor& dy, const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights,
                  const Tensor& w_gate_up, MaybeTensor w_down, MaybeTensor w_gate_up_t, MaybeTensor w_down_t,
                  MaybeTensor gate_up_sf, MaybeTensor down_sf, MaybeTensor saved_gate_up, MaybeTensor dx,
                  MaybeTensor dtopk, MaybeTensor dw_gate_up, MaybeTensor dw_down, const Tensor& summary,
                  Words rank, std::string activation, std::optional<double> clamp,
                  std::optional<double> alpha, bool accumulate, MaybeTensor trace, int64_t delay_seed);

void clock_probe(const Tensor& out);

std::string build_info();

}  // namespace mega_moe::binding
