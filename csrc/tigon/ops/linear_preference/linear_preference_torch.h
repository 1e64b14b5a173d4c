// What the adaptors of linear_preference and linear_policy share: operators of scalar losses of answers.
#pragma once

#include "tigon/torch/linear_head.h"

namespace tigon::torch_shim {

// What either operator gives: the loss, the reduction's factor and the gradients, then four results of answers or rows.
using TokenLossResults =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline void define_token_loss(Library& m, const std::string& op, const std::string& inputs,
                              const std::string& results) {
  define_forward(m, op,
                 "(" + head_schema() + ", int answers, " + inputs + ") -> (Tensor loss, Tensor scale, " +
                     kFiveGradients + results + ")");
}
inline int64_t tokens_of(const LinearHead& head, int64_t answers) {
  return answers > 0 ? head.hidden.rows / answers : 0;
}

}  // namespace tigon::torch_shim
