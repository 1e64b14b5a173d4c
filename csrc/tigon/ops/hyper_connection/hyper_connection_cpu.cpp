#include <algorithm>

#include "tigon/base/column_sum.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/op.h"
#include "tigon/ops/hyper_connection/hyper_connection.h"

namespace tigon::cpu {
namespace {

// Holds what the coefficients of some tokens are made of. Matrices are f32; without data they are zero, or
// not wanted.
struct CoefficientTokens {
  int64_t first, count;
  int parts;
  HyperConnection options;
  Matrix rstd, matmul;
  const float *base, *scale;
  Matrix pre, post, res;
  Matrix dots = {}, pre_gradient = {}, post_gradient = {}, res_gradient = {};
  Matrix dmatmul = {}, x_scale = {};
  float* divisors = nullptr;  // [steps * n, 16]
};
// Describes one token; mix is [outs, streams].
struct MixRow {
  const void *x, *f;  // f may be null
  const float *mix, *post;
  void* y;
  const void* dy = nullptr;
  void *dx = nullptr, *df = nullptr;
  float *dmix = nullptr, *dpost = nullptr;
  float x_scale = 0.0f;
  const float* addend = nullptr;
  int64_t cols;
  int streams, outs;
  // mix is the identity: streams that it leaves out add nothing, even if they are NaN.
  bool is_identity = false;
};
struct MixKernels {
  float (*widen)(const void*, float*, int64_t);
  void (*forward)(const MixRow&);
  void (*backward)(const MixRow&);
};
struct HyperConnectionTable {
  ByDtype<MixKernels> rows;
  void (*coefficients)(const CoefficientTokens&);
  void (*gradients)(const CoefficientTokens&, int64_t last, float columns, float* sums);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/hyper_connection/hyper_connection_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

// The lanes of a vector hold this many tokens.
constexpr int64_t kTokens = 16;
// The number of tasks of sums over tokens is fixed by the shape, so results do not depend on threads.
constexpr int64_t kMaxPartials = 64;

const HyperConnectionTable& table() { return TIGON_SELECT(hyper_connection_table); }

Matrix column(float* data, int64_t rows, int64_t cols) {
  return {.data = data, .dtype = DType::f32, .rows = rows, .cols = cols, .stride = cols};
}
int parts_of(const Vector& scale) { return int(scale.size); }

// Reads the [outs, streams] coefficients of a token. An absent mix is the identity.
struct Coefficients {
  float mix[kMaxStreams * kMaxStreams];
  int streams, outs;
  bool transposed;
  Coefficients(int64_t n, int64_t o, bool t) : streams(int(n)), outs(int(o)), transposed(t) {}
  int place(int i) const { return transposed ? i % streams * outs + i / streams : i; }
  void take(const Matrix& m, int64_t row) {
    for (int i = 0; i < outs * streams; ++i)
      mix[i] = m.data ? m.row<float>(row)[place(i)] : float(i / streams == i % streams);
  }
  void put(const Matrix& m, int64_t row) const {
    for (int i = 0; i < outs * streams; ++i) m.row<float>(row)[place(i)] = mix[i];
  }
};

}  // namespace

void widen(Context& ctx, const HyperConnectionWiden& a) {
  const MixKernels& k = table().rows[a.x.dtype];
  parallel(ctx, a.x.rows, [&](int64_t r) {
    const float square = k.widen(element_at(a.x, r, 0), a.wide ? a.wide + r * a.x.cols : nullptr, a.x.cols);
    if (a.rstd) a.rstd[r] = 1.0f / std::sqrt(square / float(a.x.cols) + a.eps);
  });
}

void coefficients(Context& ctx, const HyperConnectionFwd& a) {
  const int64_t tokens = a.x.rows;
  parallel(ctx, (tokens + kTokens - 1) / kTokens, [&](int64_t task) {
    const int64_t first = task * kTokens;
    table().coefficients({.first = first,
                          .count = std::min(kTokens, tokens - first),
                          .parts = parts_of(a.scale),
                          .options = a.options,
                          .rstd = column(a.rstd.as<float>(), tokens, 1),
                          .matmul = a.matmul,
                          .base = a.base.as<float>(),
                          .scale = a.scale.as<float>(),
                          .pre = a.pre,
                          .post = a.post,
                          .res = a.res});
  });
}

void coefficient_gradients(Context& ctx, const HyperConnectionGradients& g) {
  const HyperConnectionBwd& a = *g.call;
  const int64_t tokens = a.x.rows, n = a.options.streams, m = a.weight.rows;
  const int parts = parts_of(a.scale);
  int64_t chunk = std::max(kTokens, (tokens + kMaxPartials - 1) / kMaxPartials);
  chunk = (chunk + kTokens - 1) / kTokens * kTokens;
  const int64_t chunks = (tokens + chunk - 1) / chunk, sums_cols = m + parts;
  float* sums = ctx.scratch_of<float>(chunks * sums_cols);
  const int64_t kept = parts > 2 ? (2 * a.options.iterations - 1) * n * kTokens : 0;
  float* divisors = ctx.scratch_of<float>(chunks * kept);
  parallel(ctx, chunks, [&](int64_t c) {
    const int64_t first = c * chunk, last = std::min(tokens, first + chunk);
    table().gradients({.first = first,
                       .count = 0,
                       .parts = parts,
                       .options = a.options,
                       .rstd = column(a.rstd.as<float>(), tokens, 1),
                       .matmul = a.matmul,
                       .base = a.base.as<float>(),
                       .scale = a.scale.as<float>(),
                       .pre = column(g.pre, tokens, n),
                       .post = {},
                       .res = {},
                       .dots = column(const_cast<float*>(g.dots), tokens, n),
                       .pre_gradient = a.dpre,
                       .post_gradient = a.dpost,
                       .res_gradient = a.dres,
                       .dmatmul = column(g.dmatmul, tokens, m),
                       .x_scale = column(g.x_scale, tokens, 1),
                       .divisors = divisors + c * kept},
                      last, float(a.x.cols), sums + c * sums_cols);
  });
  float* total = ctx.scratch_of<float>(sums_cols);
  sum_partials(ctx, sums, chunks, sums_cols, {.data = total, .dtype = DType::f32, .size = sums_cols});
  if (a.dbase) std::copy_n(total, m, a.dbase.as<float>());
  if (a.dscale) std::copy_n(total + m, parts, a.dscale.as<float>());
}

void set_zero(Context& ctx, const Matrix& m) {
  parallel(ctx, m.rows, [&](int64_t r) { std::fill_n(m.row<float>(r), m.cols, 0.0f); });
}

void hyper_connection_mix_fwd(Context& ctx, const HyperConnectionMixFwd& a) {
  const MixKernels& k = table().rows[a.x.dtype];
  parallel(ctx, a.x.rows, [&](int64_t r) {
    Coefficients c(a.streams, a.outs, a.transposed);
    c.take(a.mix, r);
    k.forward({.x = element_at(a.x, r, 0),
               .f = element_at(a.f, r, 0),
               .mix = c.mix,
               .post = a.post.data ? a.post.row<float>(r) : nullptr,
               .y = element_at(a.y, r, 0),
               .cols = a.x.cols / a.streams,
               .streams = c.streams,
               .outs = c.outs,
               .is_identity = a.mix.data == nullptr});
  });
}

void hyper_connection_mix_bwd(Context& ctx, const HyperConnectionMixBwd& a) {
  const MixKernels& k = table().rows[a.x.dtype];
  parallel(ctx, a.x.rows, [&](int64_t r) {
    Coefficients c(a.streams, a.outs, a.transposed), d = c;
    if (a.dx.data != nullptr) c.take(a.mix, r);
    k.backward({.x = element_at(a.x, r, 0),
                .f = element_at(a.f, r, 0),
                .mix = c.mix,
                .post = a.post.data ? a.post.row<float>(r) : nullptr,
                .y = nullptr,
                .dy = element_at(a.dy, r, 0),
                .dx = element_at(a.dx, r, 0),
                .df = element_at(a.df, r, 0),
                .dmix = a.dmix.data ? d.mix : nullptr,
                .dpost = a.dpost.data ? a.dpost.row<float>(r) : nullptr,
                .x_scale = a.x_scale ? a.x_scale.as<float>()[r] : 0.0f,
                .addend = a.addend.data ? a.addend.row<float>(r) : nullptr,
                .cols = a.x.cols / a.streams,
                .streams = c.streams,
                .outs = c.outs,
                .is_identity = a.mix.data == nullptr});
    if (a.dmix.data) d.put(a.dmix, r);
  });
}

}  // namespace tigon::cpu

namespace tigon {

TIGON_OP(hyper_connection, HyperConnection)
TIGON_OP(hyper_connection_mix, HyperConnectionMix)

}  // namespace tigon
