// A linear map with float8 GEMMs (Micikevicius et al. 2022, arXiv:2209.05433). x and W are quantised once, by
// rows, and the backward multiplies the same bytes, transposed.
// Formula     y = xs ws (xq wq^T) + bias, with (xq, xs) and (wq, ws) the rows of x and of W by fp8_quantize
// Gradients   (dyq, dys) = the rows of dy ws, which include ws:  dx = dys (dyq wt^T), wt = wq^T
//             dW = dyc / ws (dyt xt^T), xt = xq^T, (dyt, dyc) = dyq^T with the factors dys xs,
//             which include x's scales. Or dW = dy^T x, unquantised
// Shapes      xq [M, K]; xs [M]; wq [N, K]; ws, bias [N]; y, dy [M, N]; xt [K, fp8_columns(M)]; wt [K, N]; x,
//             dx [M, K]; dweight [N, K]. K and N are multiples of 16; rows at any stride
// Dtypes      bytes float8 e4m3; scales f32; y, dy, dx f32 | bf16 | f16; bias y's or f32; dweight f32 | bf16
//             | f16; sums f32
// Rounding    once after a GEMM, and once more if a bias is added. Sums of y on sm_90 are those of the tensor
//             cores, of some 14 bits; of dx and dW they are promoted to f32 every 128 terms
// Saved       xq, xs, or x, and the weight's wt, ws
// Aliasing    none
// Determinism bitwise; in a deterministic context a row of y and of dx does not depend on the other rows
// Traffic     each byte once per GEMM, plus what fp8_quantize moves of dy, and fp8_transpose of its bytes
// Refused     sizes, dtypes; on CUDA devices below compute capability 8.9: tigon::Error before anything is
//             written
#pragma once

#include "tigon/ops/fp8_linear/fp8_quantize.h"

namespace tigon {

constexpr int64_t kFp8Multiple = 16;  // K and N are multiples

inline void require_fp8_sizes(const Fields& f, int64_t k, int64_t n) {
  f.require(k > 0 && k % kFp8Multiple == 0, "weight must have columns by the multiple of ", kFp8Multiple,
            ", got ", k);
  f.require(n > 0 && n % kFp8Multiple == 0, "weight must have rows by the multiple of ", kFp8Multiple,
            ", got ", n);
}

struct Fp8LinearFwd {
  Matrix xq;
  Vector xs;
  Matrix wq;
  Vector ws;
  Vector bias;  // empty if absent
  Matrix y;
  bool add = false;  // y is added to, in C++ calls

  void fields(Fields& f) {
    f.input("xq", xq, xq.rows, xq.cols, DType::e4m3);
    f.input("xs", xs, xq.rows, DType::f32);
    f.input("wq", wq, wq.rows, xq.cols, DType::e4m3);
    f.input("ws", ws, wq.rows, DType::f32);
    f.option("dtype", y.dtype);
    f.require(is_kernel_float(y.dtype), "dtype must be float32, bfloat16 or float16, got ", name_of(y.dtype));
    f.parameter("bias", bias, wq.rows, y.dtype);
    require_fp8_sizes(f, xq.cols, wq.rows);
    f.result("y", y, xq.rows, wq.rows, y.dtype);
  }
};

struct Fp8LinearBwd {
  Matrix dy;
  Matrix xt;  // either xt and xs, or x
  Vector xs;
  Matrix x;
  Matrix wt;  // may be absent without need_dx
  // May be absent if x is given and need_dx is not.
  Vector ws;
  // The rows of dy ws; made here if absent.
  Matrix dyq;
  Vector dys;
  bool need_dx = true;
  bool need_dweight = true;
  Matrix dx;
  Matrix dweight;
  bool add = false;  // dx is added to, in C++ calls

  void fields(Fields& f) {
    f.rows("dy", dy);
    f.optional("xt", xt, xt.rows, fp8_columns(dy.rows), DType::e4m3);
    f.optional("xs", xs, dy.rows, DType::f32);
    f.optional("x", x, dy.rows, x.cols, dy.dtype);
    f.optional("wt", wt, wt.rows, dy.cols, DType::e4m3);
    f.optional("ws", ws, dy.cols, DType::f32);
    f.optional("dyq", dyq, dy.rows, dy.cols, DType::e4m3);
    f.optional("dys", dys, dy.rows, DType::f32);
    f.require(bool(dyq.data) == bool(dys), "dys must be there where dyq is");
    f.option("need_dx", need_dx);
    f.option("need_dweight", need_dweight);
    f.option("dweight_dtype", dweight.dtype);
    f.require(is_kernel_float(dweight.dtype), "dweight_dtype must be float32, bfloat16 or float16, got ",
              name_of(dweight.dtype));
    f.require(!need_dx || wt.data, "wt must be there with need_dx, got none");
    f.require(ws || !(need_dx || (need_dweight && !x.data)), "ws must be there, got none");
    f.require(!need_dweight || x.data || (xt.data && xs),
              "xt and xs, or x, must be there with need_dweight, got none");
    const int64_t k = x.data ? x.cols : need_dweight ? xt.rows : wt.rows;
    require_fp8_sizes(f, k, dy.cols);
    f.require(!need_dx || wt.rows == k, "wt must have ", k, " rows, got ", wt.rows);
    f.result_if(need_dx, "dx", dx, dy.rows, wt.rows, dy.dtype);
    f.result_if(need_dweight, "dweight", dweight, dy.cols, k, dweight.dtype);
  }
};

TIGON_API void fp8_linear_fwd(Context& ctx, const Fp8LinearFwd& a);
TIGON_API void fp8_linear_bwd(Context& ctx, const Fp8LinearBwd& a);

// Computes c = a_scales b_scales (a b^T), with the scales by row of a and of b, or adds that.
struct Fp8Gemm {
  Matrix a;
  Vector a_scales;
  Matrix b;
  Vector b_scales;
  Vector bias;  // by column of c; empty if absent
  Matrix c;
  bool fast_sums = false;
  bool add = false;
};
namespace cpu {
void fp8_gemm(Context& ctx, const Fp8Gemm& p);
void fp8_ones(Context& ctx, const Vector& v);
}  // namespace cpu
namespace cuda {
void fp8_gemm(Context& ctx, const Fp8Gemm& p);
void fp8_ones(Context& ctx, const Vector& v);
}  // namespace cuda

}  // namespace tigon
