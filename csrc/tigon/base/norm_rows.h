// The norm family on the CPU: rows normalised by their own statistics, and the way back. Tasks here, the kernels of one row in
// tigon/base/simd/norm_rows.inc, the formula with the op.
#pragma once

#include <algorithm>

#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/norm_scalars.h"

namespace tigon::cpu {

constexpr int kNormMost = 3;  // rows read beside dy, parameters, results of rows, sums by column

// y = result((value - mean) * rstd). A row may consist of `sections` that are normalised one by one, parameters run over all.
struct NormForward {
  const void* formula;      // the op's scalars
  Matrix in[kNormMost];     // the first is what is normalised unless the formula says otherwise
  Vector param[kNormMost];  // weight, bias; empty: none
  Matrix kept;              // empty: not wanted. merge(in), rounded: takes in[0]'s place
  Matrix y;
  Vector rstd, mean;  // by row and section; mean where the formula is centred. Empty: not wanted
  float eps = 0.0f;
  int64_t sections = 1;
};

struct NormBackward {
  const void* formula;
  Matrix dy;
  Matrix in[kNormMost];
  Vector weight;
  Vector rstd, mean;
  Matrix out[kNormMost];   // empty: not wanted
  Vector sums[kNormMost];  // dweight, dbias; empty: not wanted
  int64_t sections = 1;
};

// One section of one row, as the kernels see it. Parameters are fp32.
struct NormForwardRow {
  const void* in[kNormMost];
  const float* param[kNormMost];
  void *kept, *y;
  bool y_is_f32;  // else x's type
  float *rstd, *mean;
  int64_t cols;
  float eps;
};
struct NormBackwardRow {
  const void *dy, *in[kNormMost];
  bool dy_is_f32;  // as y_is_f32
  const float* weight;
  void* out[kNormMost];
  float *sums[kNormMost], rstd, mean;
  int64_t cols;
};

struct NormKernels {
  void (*forward)(const NormForwardRow&, const void* formula);
  void (*backward)(const NormBackwardRow&, const void* formula);
};
using NormTable = ByDtype<NormKernels>;  // of x

void norm_forward(Context& ctx, const NormForward& a, const NormKernels& kernels);
void norm_backward(Context& ctx, const NormBackward& a, const NormKernels& kernels);

}  // namespace tigon::cpu
