// Computes manifold-constrained hyper-connections (Xie et al. 2025, "mHC", arXiv:2512.24880, eq. 7 to 9),
// with n streams of C columns.
// Formula     r = 1 / sqrt(mean(x^2) + norm_eps) over the n * C columns of a token,  m = (x weight^T) * r,
//             l = scale_g * m + base (g: pre, post or res),  pre = sigmoid(l) + pre_eps,
//             post = post_scale * sigmoid(l) + post_eps,
//             res = Sinkhorn(l): softmax of the rows + sinkhorn_eps, columns divided by (their sum +
//             sinkhorn_eps), then rows and columns in turn, `iterations` - 1 times;
//             y = sum_i pre_i x_i.
//             Mix: y_o = sum_i mix_oi x_i + post_o f  (mix absent: y_o = x_o + post_o f; f and
//             post absent: 0)
// Gradients   of x, weight, base and scale from those of y, pre, post and res; of the mix:
//             dx_i = sum_o mix_oi dy_o, df = sum_o post_o dy_o, dmix_oi = sum over columns of dy_o x_i,
//             dpost_o = sum over columns of dy_o f
// Shapes      x, dx [tokens, n * C], any row stride; weight [M, n * C], M = n (pre only), 2n (pre, post) or
//             2n + n^2 (all); base [M]; scale [1, 2 or 3]; y [tokens, C]; pre, post [tokens, n]; res
//             [tokens, n * n], row by row.
//             Mix: f [tokens, C]; y [tokens, outs * C]; mix [tokens, outs * n] (o, i), transposed: (i, o);
//             post [tokens, outs]
// Dtypes      x, y, f f32 | bf16 | f16, the same; everything else f32
// Rounding    y, dx, df once, on store; GEMMs with the weight are in fp32. On CUDA, with x of 16 bits, 4
//             streams, all parts and aligned rows, on tensor cores of exact bf16 parts: the result of fp32
//             GEMMs, dx to 2^-16 before rounding
// Saved       x, weight, base, scale, and per token the M columns of x weight^T, and r; the Sinkhorn
//             iteration is repeated
// Aliasing    none
// Determinism bitwise: fixed order over columns and tokens
// Traffic     x, in chunks of 32 MiB as fp32: forward 2 reads + the fp32 chunk; backward 3 reads + 1 write +
//             2 fp32 chunks.
//             On tensor cores no chunks: forward 2 reads; backward 2 reads + 1 write, 2 reads of dy; the
//             parts of the weight, 160 bytes a column, and of its gradient's factors, 272 bytes a token;
//             partial sums forward at most max(tokens, 67584) * (M + 1) floats, backward max(n * C, 101376) *
//             M
//             Mix: forward 1 read of x and f + 1 write; backward 1 read of dy, x, f + 1 write of dx, df
// Refused     n or outs not in 1..8, columns that n does not divide, another M, iterations < 1, eps < 0,
//             sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

constexpr int kMaxStreams = 8;

struct HyperConnection {
  int64_t streams = 4;
  float norm_eps = 1e-6f;
  float pre_eps = 0.0f;
  float post_scale = 2.0f, post_eps = 0.0f;
  int64_t iterations = 20;
  float sinkhorn_eps = 1e-6f;

  void fields(Fields& f) {
    f.option("streams", streams);
    f.option("norm_eps", norm_eps);
    f.option("pre_eps", pre_eps);
    f.option("post_scale", post_scale);
    f.option("post_eps", post_eps);
    f.option("iterations", iterations);
    f.option("sinkhorn_eps", sinkhorn_eps);
    f.require(norm_eps >= 0.0f, "norm_eps must be >= 0, got ", norm_eps);
    f.require(sinkhorn_eps >= 0.0f, "sinkhorn_eps must be >= 0, got ", sinkhorn_eps);
    f.require(iterations >= 1, "iterations must be >= 1, got ", iterations);
  }
};

inline void require_streams(const Fields& f, const char* name, int64_t streams) {
  f.require(streams >= 1 && streams <= kMaxStreams, name, " must be in [1, ", kMaxStreams, "], got ",
            streams);
}
inline void require_columns(const Fields& f, const Matrix& x, int64_t streams) {
  require_streams(f, "streams", streams);
  f.require(streams >= 1 && x.cols >= streams && x.cols % streams == 0, "x must have columns in ", streams,
            " streams, got ", x.cols);
}

// Names what both directions take, and returns how many parts the weight has: pre, post, res.
template <class Call>
int hyper_connection_inputs(Fields& f, Call& a) {
  f.rows("x", a.x, 0);
  f.input("weight", a.weight, a.weight.rows, a.x.cols, DType::f32);
  const int64_t n = a.options.streams, m = a.weight.rows, all = 2 * n + n * n;
  require_columns(f, a.x, n);
  f.require(m == n || m == 2 * n || m == all, "weight must have ", n, ", ", 2 * n, " or ", all, " rows, got ",
            m);
  const int parts = m == all ? 3 : m == 2 * n ? 2 : 1;
  f.input("base", a.base, m, DType::f32);
  f.input("scale", a.scale, parts, DType::f32);
  return parts;
}

struct HyperConnectionFwd {
  Matrix x;
  Matrix weight;
  Vector base, scale;
  Matrix y;  // without data: not wanted
  // post and res have no data if the weight has no rows for them.
  Matrix pre, post, res;
  Matrix matmul;  // [tokens, M], saved
  Vector rstd;    // [tokens], saved
  HyperConnection options;

  void fields(Fields& f) {
    const int parts = hyper_connection_inputs(f, *this);
    options.fields(f);
    const int64_t n = options.streams;
    auto part = [&](const char* name, Matrix& m, bool there, int64_t cols) {
      f.result(name, m, x, there ? x.rows : 0, there ? cols : 0, DType::f32);
    };
    f.result("y", y, x, x.rows, n > 0 ? x.cols / n : 0, x.dtype, Role::gradient);
    part("pre", pre, true, n);
    part("post", post, parts > 1, n);
    part("res", res, parts > 2, n * n);
    f.result("matmul", matmul, x.rows, weight.rows, DType::f32);
    f.result("rstd", rstd, x.rows, DType::f32);
  }
};

struct HyperConnectionBwd {
  Matrix dy, dpre, dpost, dres;  // without data: 0
  Matrix x;
  Matrix weight;
  Vector base, scale;
  Matrix matmul;
  Vector rstd;
  Matrix dx, dweight;    // without data: not wanted
  Vector dbase, dscale;  // empty if not wanted
  HyperConnection options;

  void fields(Fields& f) {
    const int64_t n = options.streams;
    f.optional("dy", dy, x.rows, n > 0 ? x.cols / n : 0, x.dtype);
    f.optional("dpre", dpre, x.rows, n, DType::f32);
    f.optional("dpost", dpost, x.rows, n, DType::f32);
    f.optional("dres", dres, x.rows, n * n, DType::f32);
    const int parts = hyper_connection_inputs(f, *this);
    f.input("matmul", matmul, x.rows, weight.rows, DType::f32);
    f.input("rstd", rstd, x.rows, DType::f32);
    options.fields(f);
    f.gradient("dx", dx, x);
    f.gradient("dweight", dweight, weight);
    f.gradient("dbase", dbase, weight.rows, DType::f32);
    f.gradient("dscale", dscale, parts, DType::f32);
  }
};

// Lists what the forward and the backward of a mix take.
template <class Mix>
void mix_operands(Fields& fields, Mix& a) {
  fields.rows("x", a.x, 0);
  require_columns(fields, a.x, a.streams);
  require_streams(fields, "outs", a.outs);
  fields.require(a.mix.data != nullptr || a.outs == a.streams, "outs must be ", a.streams,
                 " without a mix, got ", a.outs);
  fields.require((a.f.data == nullptr) == (a.post.data == nullptr), "f and post must be given together");
  fields.optional("f", a.f, a.x.rows, a.columns(), a.x.dtype);
  fields.optional("mix", a.mix, a.x.rows, a.outs * a.streams, DType::f32);
  fields.optional("post", a.post, a.x.rows, a.outs, DType::f32);
  fields.option("streams", a.streams);
  fields.option("outs", a.outs);
  fields.option("transposed", a.transposed);
}

struct HyperConnectionMixFwd {
  Matrix x;
  Matrix f, mix, post;  // without data: absent
  Matrix y;
  int64_t streams = 4, outs = 4;
  bool transposed = false;

  // Returns the columns of a stream.
  int64_t columns() const { return streams > 0 ? x.cols / streams : 0; }
  void fields(Fields& fields) {
    mix_operands(fields, *this);
    fields.result("y", y, x, x.rows, outs * columns());
  }
};

struct HyperConnectionMixBwd {
  Matrix dy;
  Matrix x;
  Matrix f, mix, post;         // without data: absent
  Matrix dx, df, dmix, dpost;  // without data: not wanted
  int64_t streams = 4, outs = 4;
  bool transposed = false;
  // These are added to dx: x_scale * x, with x_scale [tokens], and an addend [tokens, n * C] in f32. Nothing
  // is added if they are empty.
  Vector x_scale = {};
  Matrix addend = {};

  // Returns the columns of a stream.
  int64_t columns() const { return streams > 0 ? x.cols / streams : 0; }
  void fields(Fields& fields) {
    fields.input("dy", dy, x.rows, outs * columns(), x.dtype);
    mix_operands(fields, *this);
    fields.gradient("dx", dx, x);
    fields.gradient("df", df, f);
    fields.gradient("dmix", dmix, mix);
    fields.gradient("dpost", dpost, post);
    fields.require(!x_scale || (x_scale.size == x.rows && x_scale.dtype == DType::f32), "x_scale must be [",
                   x.rows, "] in float32, got [", x_scale.size, "] in ", name_of(x_scale.dtype));
    fields.require(addend.data == nullptr || (addend.rows == x.rows && addend.cols == x.cols),
                   "addend must be [", x.rows, ", ", x.cols, "], got [", addend.rows, ", ", addend.cols, "]");
  }
};

TIGON_API_OP(hyper_connection, HyperConnection)
TIGON_API_OP(hyper_connection_mix, HyperConnectionMix)

// These are the parts of both operators that a backend has.
struct HyperConnectionWiden {
  Matrix x;
  // A dense copy in f32; null if not wanted.
  float* wide;
  float* rstd;  // null if not wanted
  float eps;
};
struct HyperConnectionGradients {
  const HyperConnectionBwd* call;
  // [tokens, n]: the gradient of pre through y; null for 0.
  const float* dots;
  float* dmatmul;  // [tokens, M]
  float* pre;      // [tokens, n]
  float* x_scale;  // [tokens]
};
namespace cpu {
void widen(Context& ctx, const HyperConnectionWiden& a);
void coefficients(Context& ctx, const HyperConnectionFwd& a);
void coefficient_gradients(Context& ctx, const HyperConnectionGradients& a);
void set_zero(Context& ctx, const Matrix& dense);
}  // namespace cpu
namespace cuda {
// Computes the GEMMs with the weight, by kernels for the usual shape: matmul and rstd, and those of dx and
// dweight that are wanted. Returns false, with nothing written, if the kernels do not take the shape.
bool weight_gemm(Context& ctx, const HyperConnectionFwd& a);
bool weight_gemm_gradients(Context& ctx, const HyperConnectionGradients& g);
void widen(Context& ctx, const HyperConnectionWiden& a);
void coefficients(Context& ctx, const HyperConnectionFwd& a);
void coefficient_gradients(Context& ctx, const HyperConnectionGradients& a);
void set_zero(Context& ctx, const Matrix& dense);
}  // namespace cuda

}  // namespace tigon
