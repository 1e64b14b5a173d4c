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

// Whether one chunk takes all rows of a call that forms dweight. Arguments have hidden and weight.
template <class Arguments>
bool one_chunk(const Arguments& a, int64_t chunk_rows, int64_t valid_rows, Device device) {
  int64_t rows = valid_rows >= 0 ? valid_rows : a.hidden.rows;
  int64_t chunk = chunk_rows > 0 ? chunk_rows
                                 : linear_head_chunk_rows({.device = device,
                                                           .dtype = a.hidden.dtype,
                                                           .rows = rows,
                                                           .hidden = a.hidden.cols,
                                                           .vocab = a.weight.rows,
                                                           .dweight = true});
  return rows <= chunk;
}

// Allocates the gradients that are needed and puts their views in `a`; `whole`: one chunk takes all rows.
template <class Arguments>
HeadGradients make_gradients(const char* op, Arguments& a, const Tensor& hidden, int64_t needs, bool whole) {
  int64_t v = a.weight.rows, h = a.weight.cols, r = a.lora_a.rows;
  auto result = [&](Need need, std::initializer_list<int64_t> sizes, DType dtype = DType::f32) {
    return needs & need ? make(hidden, sizes, dtype) : nothing(hidden, DType::f32);
  };
  bool rounded = needs & may_round && whole;
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
template <class Arguments>
HeadGradients make_gradients(const char* op, Arguments& a, const Tensor& hidden, int64_t needs) {
  return make_gradients(op, a, hidden, needs,
                        one_chunk(a, a.chunk_rows, a.valid_rows, device_of(op, hidden)));
}

// How the losses of the rows become one, and what they are divided by, as arguments of a schema.
struct LossReduction {
  OptionalTensor denominator;
  std::optional<double> host_denominator;

  static constexpr const char* kSchema = "Tensor? denominator, float? host_denominator, ";
  static LossReduction take(Stack& s) { return {s.take<OptionalTensor>(), s.take<std::optional<double>>()}; }
};

// The losses of the rows, and of a scalar loss the total and its scale (empty tensors otherwise).
struct LossTensors {
  Tensor losses, total, scale;
  bool scalar;
  const Tensor& loss() const { return scalar ? total : losses; }
};

// Allocates them and puts their views, and how they are reduced, in `a`.
template <class Arguments>
LossTensors make_losses(const char* op, Arguments& a, const Tensor& hidden, const LossReduction& by,
                        int64_t reduction) {
  if (by.denominator) {
    check_same_device(op, "denominator", *by.denominator, hidden);
    a.denominator = scalar_of(op, "denominator", *by.denominator);
  }
  a.has_host_denominator = by.host_denominator.has_value();
  a.host_denominator = by.host_denominator.value_or(0.0);
  a.reduction = Reduction(reduction);
  bool scalar = a.reduction != Reduction::none;
  auto number = [&] { return scalar ? make(hidden, {}, DType::f32) : nothing(hidden, DType::f32); };
  LossTensors t = {.losses = make(hidden, {a.hidden.rows}, DType::f32),
                   .total = number(),
                   .scale = number(),
                   .scalar = scalar};
  a.loss = vector_of(op, "loss", t.losses);
  if (scalar) a.total = scalar_of(op, "total", t.total), a.scale = scalar_of(op, "scale", t.scale);
  return t;
}

// A row of one f32 matrix for each result of rows that `outputs` asks for, in the order of its bits.
struct RowNumbers {
  Tensor numbers;
  char* next;
  int64_t rows, outputs;

  RowNumbers(const char* op, const Tensor& hidden, int64_t rows, int64_t outputs, int64_t bits)
      : numbers(nothing(hidden, DType::f32)), rows(rows), outputs(outputs) {
    int64_t wanted = 0;
    for (int64_t bit = 1; bit <= bits; bit *= 2) wanted += (outputs & bits & bit) != 0;
    if (wanted) numbers = make(hidden, {wanted, rows}, DType::f32);
    next = static_cast<char*>(data_of(op, "outputs", numbers));
  }
  Vector take(int64_t bit) {
    if (!(outputs & bit)) return {};
    Vector v{.data = next, .dtype = DType::f32, .size = rows};
    next += rows * int64_t(sizeof(float));
    return v;
  }
};

}  // namespace tigon::torch_shim
