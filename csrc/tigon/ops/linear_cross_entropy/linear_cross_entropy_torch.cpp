// Defines the last step of scalar losses, whose results may be its arguments.
#include "tigon/ops/loss_head/loss_head.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::linear_cross_entropy_torch {
namespace {

constexpr const char* kOp = "linear_cross_entropy";
using FiveGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Computes the gradients of a scalar loss times the upstream one, in the parameters' dtypes. With in_place a
// gradient that has its parameter's dtype already shares its memory with the result; otherwise it stays as it
// is.
template <bool in_place>
FiveGradients finish_all(Tensor dloss, Tensor scale, Tensor dhidden, Tensor dweight, Tensor dbias,
                         Tensor dlora_a, Tensor dlora_b, ScalarType weight_dtype, ScalarType bias_dtype) {
  DType hidden_dtype = dtype_of(kOp, "dhidden", dhidden);
  auto ctx = make_context(dhidden);
  Vector factor = scalar_of(kOp, "upstream gradient", dloss);
  Vector late = loss_head_scales_early(hidden_dtype) ? Vector{} : scalar_of(kOp, "scale", scale);
  auto finish = [&](Tensor& kept, DType dtype) {
    bool stays = in_place && (kept.numel() == 0 || (!late && dtype_of(kOp, "gradient", kept) == dtype));
    Tensor out = stays ? kept : make_like(kept, dtype);
    if (kept.numel() > 0)
      loss_head_finish(*ctx, {.in = rows_of(kOp, "gradient", kept),
                              .dloss = factor,
                              .scale = late,
                              .out = rows_of(kOp, "gradient", out)});
    return out;
  };
  return {finish(dhidden, hidden_dtype), finish(dweight, dtype_of(kOp, "weight", weight_dtype)),
          finish(dbias, dtype_of(kOp, "bias", bias_dtype)), finish(dlora_a, hidden_dtype),
          finish(dlora_b, hidden_dtype)};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string five = "Tensor dhidden, Tensor dweight, Tensor dbias, Tensor dlora_a, Tensor dlora_b";
  const std::string dtypes = "ScalarType weight_dtype, ScalarType bias_dtype) -> ";
  define(m,
         "linear_cross_entropy_bwd(Tensor dloss, Tensor scale, " + five + ", " + dtypes + "(" + five + ")");
  define(m,
         "linear_cross_entropy_bwd_(Tensor dloss, Tensor scale, Tensor(a!) dhidden, Tensor(b!) dweight,"
         " Tensor(c!) dbias, Tensor(d!) dlora_a, Tensor(e!) dlora_b, " +
             dtypes + "(Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!), Tensor(e!))");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("linear_cross_entropy_bwd", TORCH_BOX(&finish_all<false>));
  m.impl("linear_cross_entropy_bwd_", TORCH_BOX(&finish_all<true>));
}

}  // namespace tigon::torch_shim::linear_cross_entropy_torch
