// What the adaptors of ops on a linear head share: their first arguments, which gradients a call forms, and their tensors.
#pragma once

#include "tigon/ops/linear_head/linear_head_fields.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {

using Need = LinearHeadFields::Need;
using enum LinearHeadFields::Need;

// The first arguments of every operator on a head. Tensors are replaced by copies where a view does not fit, so they must
// outlive the call of the core.
struct Operands {
  Tensor hidden, weight, target;
  OptionalTensor bias, class_weight, token_weight, lora_a, lora_b;
  static constexpr const char* kNames[] = {"hidden",       "weight",       "target", "bias",
                                           "class_weight", "token_weight", "lora_a", "lora_b"};
};
struct Formula {
  int64_t ignore_index = -100;
  double label_smoothing = 0.0, softcap = 0.0, logit_scale = 1.0, temperature = 1.0, z_loss = 0.0,
         lora_scale = 1.0;
  bool wide_logits = false;
  static constexpr const char* kNames[] = {"ignore_index", "label_smoothing", "softcap",    "logit_scale",
                                           "temperature",  "z_loss",          "lora_scale", "wide_logits"};
  LogitFormula logits() const {
    return {.softcap = float(softcap), .logit_scale = float(logit_scale), .temperature = float(temperature)};
  }
};
struct Memory {
  int64_t chunk_rows = 0, valid_rows = -1, needs = 0;
  int64_t keep_rows = 0;  // as in LinearHeadSizes
  static constexpr const char* kNames[] = {"chunk_rows", "valid_rows", "needs", "keep_rows"};
  int64_t worked(int64_t rows) const { return valid_rows >= 0 ? valid_rows : rows; }
};
template <class... More>
std::string head_schema() {
  return schema<Operands, Formula, Memory, More...>();
}

inline void check_operands(const char* op, const Operands& t) {
  check_same_device(op, "weight", t.weight, t.hidden);
  check_same_device(op, "target", t.target, t.hidden);
  for (auto [name, x] : {std::pair{"bias", &t.bias},
                         {"class_weight", &t.class_weight},
                         {"token_weight", &t.token_weight},
                         {"lora A", &t.lora_a},
                         {"lora B", &t.lora_b}})
    if (*x) check_same_device(op, name, **x, t.hidden);
}
// Operands as views of the core; of the labels those of one a row.
inline LinearHead head_of(const char* op, Operands& t, const Formula& f) {
  check_operands(op, t);
  return {.op = op,
          .hidden = rows_of(op, "hidden", t.hidden),
          .weight = rows_of(op, "weight", t.weight),
          .bias = vector_of(op, "bias", t.bias),
          .lora_a = rows_of(op, "lora A", t.lora_a),
          .lora_b = rows_of(op, "lora B", t.lora_b),
          .lora_scale = float(f.lora_scale),
          .wide_logits = f.wide_logits};
}
inline LinearHeadLabels labels_of(const char* op, Operands& t, const Formula& f, const Memory& m) {
  return {.target = vector_of(op, "target", t.target),
          .ignore_index = f.ignore_index,
          .valid_rows = m.valid_rows,
          .chunk_rows = m.chunk_rows};
}

struct HeadGradients {
  Tensor hidden, weight, bias, lora_a, lora_b;
};
using FiveGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
constexpr const char* kFiveGradients =
    "Tensor dhidden, Tensor dweight, Tensor dbias, Tensor dlora_a, Tensor dlora_b";

// Whether one chunk takes all rows of a call that forms dweight.
inline bool one_chunk(const LinearHead& a, const Memory& m, Device device) {
  if (m.chunk_rows > 0) return m.worked(a.hidden.rows) <= m.chunk_rows;
  return m.worked(a.hidden.rows) <= linear_head_whole_rows({.cuda = device == Device::cuda,
                                                            .dtype = int64_t(a.hidden.dtype),
                                                            .hidden = a.hidden.cols,
                                                            .vocab = a.weight.rows,
                                                            .train_weight = 1});
}
// Allocates the gradients that are needed and puts their views in `a`; `whole`: one chunk takes all rows.
inline HeadGradients make_gradients(LinearHead& a, const Tensor& hidden, int64_t needs, bool whole) {
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
  if (needs & need_hidden) a.dhidden = rows_of(a.op, "dhidden", g.hidden);
  if (needs & need_weight) a.dweight = rows_of(a.op, "dweight", g.weight);
  if (needs & need_bias) a.dbias = vector_of(a.op, "dbias", g.bias);
  if (needs & need_lora_a) a.dlora_a = rows_of(a.op, "gradient of lora A", g.lora_a);
  if (needs & need_lora_b) a.dlora_b = rows_of(a.op, "gradient of lora B", g.lora_b);
  return g;
}
inline HeadGradients make_gradients(LinearHead& a, const Tensor& hidden, const Memory& m) {
  return make_gradients(a, hidden, m.needs, one_chunk(a, m, device_of(a.op, hidden)));
}

// How the losses of the rows become one, and what they are divided by, as arguments of a schema.
struct Reduced {
  OptionalTensor denominator;
  std::optional<double> host_denominator;
  int64_t reduction;
  static constexpr const char* kNames[] = {"denominator", "host_denominator", "reduction"};
};

// The losses of the rows, and of a scalar loss the total and its scale (empty tensors otherwise).
struct LossTensors {
  Tensor losses, total, scale;
  bool scalar;
  LossReduction reduction;
  const Tensor& loss() const { return scalar ? total : losses; }

  LossTensors(const char* op, const Tensor& hidden, int64_t rows, const Reduced& by)
      : losses(make(hidden, {rows}, DType::f32)),
        total(number(hidden, by)),
        scale(number(hidden, by)),
        scalar(Reduction(by.reduction) != Reduction::none),
        reduction{.kind = Reduction(by.reduction), .host_denominator = by.host_denominator} {
    if (scalar)
      reduction.total = scalar_of(op, "total", total), reduction.scale = scalar_of(op, "scale", scale);
    if (!by.denominator) return;
    check_same_device(op, "denominator", *by.denominator, hidden);
    reduction.denominator = scalar_of(op, "denominator", *by.denominator);
  }

 private:
  static Tensor number(const Tensor& hidden, const Reduced& by) {
    return make_if(Reduction(by.reduction) != Reduction::none, hidden, {}, DType::f32);
  }
};

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
