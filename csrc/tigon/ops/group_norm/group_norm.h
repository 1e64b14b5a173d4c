// Computes GroupNorm (Wu & He 2018, "Group Normalization", eq. 1 and 6).
// Formula     over the channels and places of a group of one sample: h = (x - mean) * rstd,
//             rstd = (var + eps)^-1/2;
//             y = h * weight[channel] + bias[channel]  (weight or bias absent: 1 or 0)
// Gradients   g = dy * weight[channel];  dx = rstd * (g - mean(g) - h * mean(g * h)), means over the group;
//             dweight[channel] = sum over samples and places of dy * h;  dbias[channel] = that of dy
// Shapes      x, y, dy, dx [samples, channels * places], any row stride; weight, bias, dweight, dbias
//             [channels]; mean, rstd [samples * groups]
// Dtypes      x, y f32 | bf16 | f16; weight and bias of one dtype, x's or f32; mean, rstd f32; accumulation
//             f32
// Rounding    once, on store (torch.nn.functional.group_norm); the variance is summed about the mean
// Saved       x, weight, mean, rstd (8 bytes a group)
// Aliasing    y may not overlap x; dx may be dy (same shape and strides) but no other input
// Determinism bitwise: fixed trees inside a group, fixed order over samples
// Traffic     forward 1 read + 1 write; backward 2 reads + 1 write; what no register holds of a group is read
//             again, from the caches if it is still there
// Refused     groups that do not divide channels, channels that do not divide a row, eps < 0, sizes or dtypes
//             that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

inline void require_groups(const Fields& f, const Matrix& x, int64_t channels, int64_t groups) {
  f.require(groups >= 1 && channels >= 1 && channels % groups == 0, "groups must divide ", channels,
            " channels, got ", groups);
  f.require(x.cols >= 1 && channels >= 1 && x.cols % channels == 0, "x must have rows of a multiple of ",
            channels, " elements, got ", x.cols);
}

struct GroupNormFwd {
  Matrix x;
  Vector weight, bias;  // empty if absent
  Matrix y;
  Vector mean, rstd;  // empty if no backward follows
  int64_t channels = 1, groups = 1;
  float eps = 1e-5f;

  void fields(Fields& f) {
    f.rows("x", x, 0);
    f.parameter("weight", weight, channels, x.dtype);
    f.parameter("bias", bias, channels, x.dtype, &weight);
    f.option("channels", channels);
    f.option("groups", groups);
    require_groups(f, x, channels, groups);
    f.eps(eps);
    f.result("y", y, x);
    f.statistics("statistics", {{"mean", mean}, {"rstd", rstd}}, x.rows * groups);
  }
};

struct GroupNormBwd {
  Matrix dy;
  Matrix x;
  Vector weight;
  // Gives dbias its dtype. If empty, dbias has weight's dtype, and without a weight x's or f32.
  Vector bias;
  Vector mean, rstd;
  Matrix dx;              // empty if not wanted
  Vector dweight, dbias;  // empty if not wanted
  int64_t channels = 1, groups = 1;

  DType bias_dtype() const {
    return bias ? bias.dtype : weight ? weight.dtype : dbias.dtype == x.dtype ? x.dtype : DType::f32;
  }
  void fields(Fields& f) {
    f.input("dy", dy, x);
    f.rows("x", x, 0);
    f.parameter("weight", weight, channels, x.dtype);
    f.parameter("bias", bias, channels, x.dtype, &weight);
    f.saved("statistics", {{"mean", mean}, {"rstd", rstd}}, x.rows * groups);
    f.option("channels", channels);
    f.option("groups", groups);
    require_groups(f, x, channels, groups);
    f.gradient("dx", dx, x);
    f.gradient("dweight", dweight, "weight", weight);
    f.gradient("dbias", dbias, channels, bias_dtype(), &bias);
  }
};

TIGON_API_OP(group_norm, GroupNorm)

}  // namespace tigon
