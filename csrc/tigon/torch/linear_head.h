// What the adaptors of ops on a linear head share: which gradients a call forms, and their tensors.
#pragma once

#include "tigon/ops/linear_head/linear_head.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {

// Bits of `needs`, as in python/tigon/ops/loss_head/operands.py.
// may_round: weight's gradient may come in hidden's dtype where the call does not sum it.
enum Need : int64_t {
  need_hidden = 1,
  need_weight = 2,
  need_bias = 4,
  need_lora_a = 8,
  need_lora_b = 16,
  may_round = 32,
  need_unit = 64,       // of per-row losses: their forward may leave dhidden for an upstream gradient of 1
  into_main_grad = 128  // weight's gradient is added to what its owner keeps
};

struct HeadGradients {
  Tensor hidden, weight, bias, lora_a, lora_b;
};

// Whether one chunk takes all rows of a call that forms dweight.
template <class Arguments>
bool one_chunk(const Arguments& a, Device device) {
  int64_t rows = a.valid_rows >= 0 ? a.valid_rows : a.hidden.rows;
  int64_t chunk = a.chunk_rows > 0 ? a.chunk_rows
                                   : linear_head_chunk_rows({.device = device,
                                                             .dtype = a.hidden.dtype,
                                                             .rows = rows,
                                                             .hidden = a.hidden.cols,
                                                             .vocab = a.weight.rows,
                                                             .dweight = true});
  return rows <= chunk;
}

// Allocates the gradients that are needed and puts their views in `a`; `whole`: one chunk takes all rows in any case.
template <class Arguments>
HeadGradients make_gradients(const char* op, Arguments& a, const Tensor& hidden, int64_t needs,
                             bool whole = false) {
  int64_t v = a.weight.rows, h = a.weight.cols, r = a.lora_a.rows;
  auto result = [&](Need need, std::initializer_list<int64_t> sizes, DType dtype = DType::f32) {
    return needs & need ? make(hidden, sizes, dtype) : nothing(hidden, DType::f32);
  };
  bool rounded = needs & need_weight && needs & may_round && (whole || one_chunk(a, device_of(op, hidden)));
  HeadGradients g{
      .hidden = needs & need_hidden ? make_like(hidden, a.hidden.dtype) : nothing(hidden, a.hidden.dtype),
      .weight = result(need_weight, {v, h}, linear_head_dweight(a.hidden.dtype, rounded)),
      .bias = result(need_bias, {v}),
      .lora_a = result(need_lora_a, {r, h}),
      .lora_b = result(need_lora_b, {v, r})};
  if (needs & need_hidden) a.dhidden = rows_of(op, "dhidden", g.hidden);
  if (needs & need_weight) a.dweight = rows_of(op, "dweight", g.weight);
  if (needs & need_bias) a.dbias = vector_of(op, "dbias", g.bias);
  if (needs & need_lora_a) a.dlora_a = rows_of(op, "gradient of lora A", g.lora_a);
  if (needs & need_lora_b) a.dlora_b = rows_of(op, "gradient of lora B", g.lora_b);
  return g;
}

}  // namespace tigon::torch_shim
