// Computes LoRA (Hu et al. 2021, arXiv:2106.09685, eq. 3): frozen linear maps of one x, each with any number
// of low-rank adapters.
// Formula     y = x W^T + bias + sum over the adapters of this W of t B^T,  t = s d(x) A^T
//             d: dropout, element (row, column) of the i-th adapter kept if a word of Philox is not below p
//             * 2^32, then times 1 / (1 - p); d(x) = x for p = 0. The mask follows from seed, i,
//             row and column only. With a W of float8 x W^T and dy W are those of fp8_linear.h
// Gradients   dt = s dy B;  dx = sum over W of dy W + sum over adapters of d'(dt A);  dA = dt^T d(x);
//             dB = dy^T t
// Shapes      x, dx [M, K]; W [N, K]; bias [N]; y, dy [M, N]; A [r, K]; B [N, r]; rows at any stride.
//             t [M, R], R the sum of lora_columns(r): each adapter's columns begin at a multiple of 8 and end
//             in zeros; dA [R, K] in the same places
// Dtypes      x f32 | bf16 | f16; W, bias, y, t, dy, dx the same; all A and B one of the three; dA, dB theirs
//             if that is x's, else f32
// Rounding    A and B to x's dtype; t and dt once; y and dx once after each GEMM that adds to them, the
//             base's last (bf16 on the CPU: first); large GEMMs on sm_90a, of y without bias and dx without
//             dropout, once after all. With an adapter of zeros, results are bitwise equal to the base's
// Saved       x, t, seed, and the parameters
// Aliasing    none
// Determinism bitwise: GEMMs in a fixed order, no float atomics
// Traffic     in addition to the base GEMMs: x for t and for dA, y and dx written, dy for dt and for dB; with
//             dropout d(x) twice each way
// Refused     sizes or dtypes that do not fit, an adapter without a linear, dropout outside [0, 1):
//             tigon::Error before anything is written
#pragma once

#include <span>

#include "tigon/base/fields.h"

namespace tigon {

struct MatrixGemm;  // see base/matrix_gemm.h

// Returns the columns of t that an adapter of rank r has.
constexpr int64_t lora_columns(int64_t r) { return (r + 7) / 8 * 8; }

struct LoraBase {
  Matrix weight;
  Vector bias;    // empty if absent
  Vector scales;  // of the rows of a weight of float8 (fp8_quantize.h)
  // Only the backward with dx uses it: the bytes of a weight of float8, [K, N]; made for the call if empty.
  Matrix transposed;
  // Likewise the rows of dy scales in float8 (fp8_linear.h).
  Matrix dyq;
  Vector dys;
  // In the forward, the result, or empty if it is not wanted. In the backward, dy, or empty if there is none.
  Matrix y;
};

struct LoraAdapter {
  // The index of the linear that it belongs to.
  int64_t base = 0;
  Matrix a;
  Matrix b;
  float scale = 1.0f;
  double dropout = 0.0;
  // Only the backward uses it; empty if not wanted.
  Matrix db;
};

struct LoraLinearFwd {
  Matrix x;
  // x in float8 and the scales of its rows, for weights of float8.
  Matrix xq;
  Vector xs;
  std::span<const LoraBase> bases;
  std::span<const LoraAdapter> adapters;
  // The seed is one i64 on the context's device; only dropout needs it.
  Vector seed;
  Matrix t;
  bool has_t = false;  // t is already computed
};

struct LoraLinearBwd {
  Matrix x;
  std::span<const LoraBase> bases;
  std::span<const LoraAdapter> adapters;
  Vector seed;
  Matrix t;
  Matrix dx;  // empty if not wanted
  Matrix da;  // empty if not wanted
};

TIGON_API void lora_linear_fwd(Context& ctx, const LoraLinearFwd& a);
TIGON_API void lora_linear_bwd(Context& ctx, const LoraLinearBwd& a);

// Computes DoRA (Liu et al. 2024, arXiv:2402.09353, eq. 5): the rows of W + s B A get the lengths m; their
// own lengths are treated as constants.
// Formula     factors = m / |W + s B A| by row, |W + s B A|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B
// Rounding    A to W's dtype, and W A^T to it on the CPU only
// Aliasing    y may be W
struct DoraFactors {
  Matrix weight;     // f32 | bf16 | f16
  Matrix a, b;       // of one dtype
  Vector magnitude;  // m
  float scale = 1.0f;
  Matrix y;         // factors W, in W's dtype; empty if not wanted
  Vector factors;   // f32
  Vector inverses;  // 1 / m, f32; a zero of m counts as 2^-60

  void fields(Fields& f) {
    auto is_float = [&](const char* name, DType t) {
      f.require(is_kernel_float(t), name, " must be float32, bfloat16 or float16, got ", name_of(t));
    };
    f.rows("weight", weight, 0);
    is_float("a", a.dtype);
    f.input("a", a, a.rows, weight.cols, a.dtype);
    f.input("b", b, weight.rows, a.rows, a.dtype);
    is_float("magnitude", magnitude.dtype);
    f.input("magnitude", magnitude, weight.rows, magnitude.dtype);
    f.option("scale", scale);
    f.updated("y", y, weight, Role::optional);
    f.result("factors", factors, weight.rows, DType::f32);
    f.result("inverses", inverses, weight.rows, DType::f32);
  }
};
// Computes y = factors x by row. y may be x.
struct ScaleRows {
  Matrix x;
  Vector factors;
  Matrix y;

  void fields(Fields& f) {
    f.rows("x", x, 0);
    f.input("factors", factors, x.rows, DType::f32);
    f.updated("y", y, x, Role::input);
  }
};

TIGON_API void dora_factors(Context& ctx, const DoraFactors& a);
TIGON_API_ENTRY(scale_rows, ScaleRows)

// Holds the results of the GEMMs.
struct DoraGemms {
  Matrix cross;  // W A^T, f32
  Matrix gram;   // A A^T, f32
};
// Copies `from` to `to` in its dtype, with zeros beyond it.
struct LoraCopy {
  Matrix from;
  Matrix to;
};
// Computes to = mask * from / (1 - p), or adds that.
struct LoraDropout {
  Matrix from;
  Matrix to;
  double p = 0.0;
  uint32_t stream = 0;
  Vector seed;
  bool add = false;
};

namespace cpu {
void lora_copy(Context& ctx, std::span<const LoraCopy> list);
void dora_factors(Context& ctx, const DoraFactors& a, const DoraGemms& gemms);
void lora_dropout(Context& ctx, const LoraDropout& a);
// Sets each row of y to bias.
void lora_bias(Context& ctx, const Vector& bias, const Matrix& y);
}  // namespace cpu
namespace cuda {
void lora_copy(Context& ctx, std::span<const LoraCopy> list);
void dora_factors(Context& ctx, const DoraFactors& a, const DoraGemms& gemms);
void lora_dropout(Context& ctx, const LoraDropout& a);
void lora_bias(Context& ctx, const Vector& bias, const Matrix& y);
// Computes the sum of matmuls of one c and one trans_b as one GEMM. Returns false if there is no kernel for
// it, or if it is slower.
bool lora_gemms(Context& ctx, std::span<const MatrixGemm> gemms);
}  // namespace cuda

}  // namespace tigon
