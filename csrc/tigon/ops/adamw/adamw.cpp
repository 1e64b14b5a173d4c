#include "tigon/ops/adamw/adamw.h"

#include <string>

#include "tigon/base/require.h"
#include "tigon/ops/adamw/adamw_codes.h"

namespace tigon {
namespace {

using adamw_detail::kCodedBlock;
constexpr const char* kOp = "adamw";
constexpr int64_t kMostTensors = int64_t(1) << 30;

void require_group(const AdamwGroup& g) {
  TIGON_CHECK(kOp, g.lr_on_device != nullptr || g.lr >= 0.0, "lr must be >= 0, got ", g.lr);
  TIGON_CHECK(kOp, g.beta1 >= 0.0 && g.beta1 < 1.0, "betas[0] must be in [0, 1), got ", g.beta1);
  TIGON_CHECK(kOp, g.beta2 >= 0.0 && g.beta2 < 1.0, "betas[1] must be in [0, 1), got ", g.beta2);
  TIGON_CHECK(kOp, g.eps >= 0.0, "eps must be >= 0, got ", g.eps);
  TIGON_CHECK(kOp, g.weight_decay >= 0.0, "weight_decay must be >= 0, got ", g.weight_decay);
}

void require_scalar(const char* name, const Vector& v) {
  if (v) require_vector(kOp, name, v, 1, DType::f32);
}

// Checks a moment and, if it is codes, the absmax of its blocks.
void require_moment(const char* name, const Vector& v, const Vector& absmax, const Vector& param) {
  if (v.dtype == DType::u8) {
    require_vector(kOp, name, v, param.size, DType::u8);
    return require_vector(kOp, (name + std::string(", its absmax,")).c_str(), absmax,
                          (param.size + kCodedBlock - 1) / kCodedBlock, DType::f32);
  }
  TIGON_CHECK(kOp, !absmax, name, " must be uint8 where it has an absmax, got ", name_of(v.dtype));
  bool fits = v.dtype == param.dtype || v.dtype == DType::f32 || v.dtype == DType::bf16;
  TIGON_CHECK(kOp, v.size == param.size, name, " must be [", param.size, "], got [", v.size, "]");
  TIGON_CHECK(kOp, fits, name, " must be float32, bfloat16 or ", name_of(param.dtype), ", got ",
              name_of(v.dtype));
}

// Checks the extra tensor of a rounding: it must be present if the rounding needs it, and absent otherwise.
void require_extra(const char* name, const Vector& v, const Vector& param, bool needed, DType dtype) {
  if (!needed) {
    TIGON_CHECK(kOp, !v, name, " must be absent, got [", v.size, "]: this rounding of ", name_of(param.dtype),
                " has none");
    return;
  }
  require_vector(kOp, name, v, param.size, dtype);
}

void require_tensor(const AdamwTensor& t, const Adamw& a) {
  const Vector& p = t.param;
  require_float(kOp, "param", p.dtype);
  TIGON_CHECK(kOp, p.size >= 0 && t.first >= 0, "size and first must be >= 0, got ", p.size, " and ",
              t.first);
  TIGON_CHECK(kOp, t.group >= 0 && t.group < int64_t(a.groups.size()), "group must be in [0, ",
              a.groups.size(), "), got ", t.group);
  TIGON_CHECK(kOp, t.grad.size == p.size, "grad must be [", p.size, "], got [", t.grad.size, "]");
  TIGON_CHECK(kOp, t.grad.dtype == p.dtype || t.grad.dtype == DType::f32, "grad must be ", name_of(p.dtype),
              " or float32, got ", name_of(t.grad.dtype));
  require_moment("exp_avg", t.exp_avg, t.avg_absmax, p);
  require_moment("exp_avg_sq", t.exp_avg_sq, t.root_absmax, p);
  const bool coded = t.exp_avg.dtype == DType::u8;
  TIGON_CHECK(kOp, coded == (t.exp_avg_sq.dtype == DType::u8),
              "exp_avg and exp_avg_sq must both be uint8 or neither, got ", name_of(t.exp_avg.dtype), " and ",
              name_of(t.exp_avg_sq.dtype));
  TIGON_CHECK(kOp, !coded || !t.max_exp_avg_sq, "amsgrad must be false where moments are uint8 codes");
  if (t.max_exp_avg_sq) require_vector(kOp, "max_exp_avg_sq", t.max_exp_avg_sq, p.size, t.exp_avg_sq.dtype);
  bool split = a.rounding == AdamwRounding::split, master = a.rounding == AdamwRounding::master;
  TIGON_CHECK(kOp, !split || p.dtype != DType::f16,
              "rounding must not be split where a param is float16, whose range is less than float32's: "
              "master holds it");
  require_extra("low", t.low, p, split && p.dtype == DType::bf16, DType::i16);
  require_extra("master", t.master, p, master && is_half(p.dtype), DType::f32);
  require_scalar("step", t.step);
  TIGON_CHECK(kOp, t.step || (t.steps >= 0 && t.steps < INT32_MAX), "steps must be in [0, 2^31 - 2], got ",
              t.steps);
}

}  // namespace

void adamw(Context& ctx, const Adamw& a) {
  TIGON_CHECK(kOp, int(a.rounding) >= 0 && int(a.rounding) < kAdamwRoundings, "rounding must be one of 0 to ",
              kAdamwRoundings - 1, ", got ", int(a.rounding));
  TIGON_CHECK(kOp,
              a.moment_rounding == AdamwRounding::nearest || a.moment_rounding == AdamwRounding::stochastic,
              "moment_rounding must be 0 or 1, nearest or stochastic, got ", int(a.moment_rounding));
  TIGON_CHECK(kOp, int64_t(a.tensors.size()) < kMostTensors, "tensors must be fewer than 2^30, got ",
              a.tensors.size());
  for (const AdamwGroup& g : a.groups) require_group(g);
  for (const AdamwTensor& t : a.tensors) require_tensor(t, a);
  require_scalar("clip", a.clip);
  require_scalar("grad_scale", a.grad_scale);
  require_scalar("found_inf", a.found_inf);
  if (a.tensors.empty()) return;
  TIGON_RUN(kOp, ctx, adamw, a);
}

}  // namespace tigon
