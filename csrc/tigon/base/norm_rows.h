// Runs the norm family on the CPU: rows are normalized by their own statistics, and backward. This file
// splits the work into tasks; the kernels of one row are in tigon/base/simd/norm_rows.inc, and the formula is
// with the op.
#pragma once

#include <algorithm>

#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/norm_scalars.h"

namespace tigon::cpu {

// The most rows read in addition to dy, parameters, results of rows, or sums by column.
constexpr int kNormMost = 3;

// y = result((value - mean) * rstd). A row may consist of `sections` that are normalized one by one;
// parameters cover all sections.
struct NormForward {
  // Points to the op's scalars.
  const void* formula;
  // The first is what is normalized, unless the formula says otherwise.
  Matrix in[kNormMost];
  // Hold weight and bias; empty if there is none.
  Vector param[kNormMost];
  // If wanted (not empty), receives merge(in), rounded, which then takes in[0]'s place.
  Matrix kept;
  Matrix y;
  // Hold one number per row and section. mean is used if the formula subtracts it. Empty if not wanted.
  Vector rstd, mean;
  float eps = 0.0f;
  int64_t sections = 1;
};

struct NormBackward {
  const void* formula;
  Matrix dy;
  Matrix in[kNormMost];
  Vector weight;
  Vector rstd, mean;
  // These receive the gradients of rows; empty if not wanted.
  Matrix out[kNormMost];
  // These receive dweight and dbias; empty if not wanted.
  Vector sums[kNormMost];
  int64_t sections = 1;
};

// Describes one section of one row to the kernels. Parameters are fp32.
struct NormForwardRow {
  const void* in[kNormMost];
  const float* param[kNormMost];
  void *kept, *y;
  // Otherwise y has x's type.
  bool y_is_f32;
  float *rstd, *mean;
  int64_t cols;
  float eps;
};
struct NormBackwardRow {
  const void *dy, *in[kNormMost];
  // Otherwise dy has x's type.
  bool dy_is_f32;
  const float* weight;
  void* out[kNormMost];
  float *sums[kNormMost], rstd, mean;
  int64_t cols;
};

struct NormKernels {
  void (*forward)(const NormForwardRow&, const void* formula);
  void (*backward)(const NormBackwardRow&, const void* formula);
};
// Holds kernels by the dtype of x.
using NormTable = ByDtype<NormKernels>;

void norm_forward(Context& ctx, const NormForward& a, const NormKernels& kernels);
void norm_backward(Context& ctx, const NormBackward& a, const NormKernels& kernels);

}  // namespace tigon::cpu
