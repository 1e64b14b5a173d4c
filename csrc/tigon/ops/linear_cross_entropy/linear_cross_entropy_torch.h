// What the adaptors of linear_cross_entropy, linear_log_prob and linear_loss share: the arguments of their schemas.
#pragma once

#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {

constexpr const char* kLossHead = "linear_cross_entropy";

// Tensors are replaced by copies where a view does not fit, so they must outlive the call of the core.
struct Operands {
  Tensor hidden, weight, target;
  OptionalTensor bias, class_weight, token_weight, lora_a, lora_b;

  static constexpr const char* kSchema =
      "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? token_weight,"
      " Tensor? lora_a, Tensor? lora_b, ";
  static Operands take(Stack& s) {
    return {s.take<Tensor>(),         s.take<Tensor>(),         s.take<Tensor>(),
            s.take<OptionalTensor>(), s.take<OptionalTensor>(), s.take<OptionalTensor>(),
            s.take<OptionalTensor>(), s.take<OptionalTensor>()};
  }
};

// The numbers of the formula.
struct Formula {
  int64_t ignore_index = -100;
  double label_smoothing = 0.0, softcap = 0.0, logit_scale = 1.0, temperature = 1.0, z_loss = 0.0,
         lora_scale = 1.0;
  bool wide_logits = false;

  static constexpr const char* kSchema =
      "int ignore_index, float label_smoothing, float softcap, float logit_scale, float temperature,"
      " float z_loss, float lora_scale, bool wide_logits, ";
  static Formula take(Stack& s) {
    return {s.take<int64_t>(), s.take<double>(), s.take<double>(), s.take<double>(),
            s.take<double>(),  s.take<double>(), s.take<double>(), s.take<bool>()};
  }
};

// The operands and numbers of linear_log_prob and linear_loss.
struct Head {
  Operands operands;
  Formula formula;

  static constexpr const char* kSchema =
      "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, int ignore_index, float softcap,"
      " float logit_scale, float temperature, bool wide_logits, ";
  static Head take(Stack& s) {
    return {.operands = {.hidden = s.take<Tensor>(),
                         .weight = s.take<Tensor>(),
                         .target = s.take<Tensor>(),
                         .bias = s.take<OptionalTensor>()},
            .formula = {.ignore_index = s.take<int64_t>(),
                        .softcap = s.take<double>(),
                        .logit_scale = s.take<double>(),
                        .temperature = s.take<double>(),
                        .wide_logits = s.take<bool>()}};
  }
};

struct Rows {
  int64_t chunk_rows = 0, valid_rows = -1;

  static constexpr const char* kSchema = "int chunk_rows, int valid_rows, ";
  static Rows take(Stack& s) { return {s.take<int64_t>(), s.take<int64_t>()}; }
};

// The elements of a contiguous tensor.
Vector flat(const char* op, const char* name, const Tensor& t);
Matrix rows_of_optional(const char* name, OptionalTensor& t);
// Operands on one device, as views of the core.
LinearCrossEntropy arguments(Operands& t, const Formula& f, const Rows& rows = {});

// What the forward of per-row losses leaves for their backward; an empty tensor for what it does not. `keep_rows`: most rows
// whose logits' gradients stay, in whole chunks; -1: all where one chunk takes all rows, else none. With gradients of hidden alone none are
// needed; hidden's for an upstream of 1 is left, where `needs` allows it, if they are or no other gradient is wanted.
struct Between {
  Tensor unit, kept;
};
Between make_between(LinearCrossEntropy& a, const Tensor& hidden, int64_t needs, int64_t keep_rows);

}  // namespace tigon::torch_shim
