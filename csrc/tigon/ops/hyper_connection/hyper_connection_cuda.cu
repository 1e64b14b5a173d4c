// The CUDA backend of hyper-connections. The GEMMs with the weight are in hyper_connection_gemm_cuda.cu,
// or are Context::gemm's. It has these kernels:
// widen          has a CTA per token: it converts x to fp32 (unless it is) and computes the root mean square.
// coefficients   has a thread per token: with 4 streams its values stay in registers through all Sinkhorn
//                steps. The backward repeats them and keeps the divisors, [step * n, token], in shared
//                memory, or in scratch if they are many.
// mix            has a thread per vector of columns: it reads that vector of every stream and writes that
//                of every result.
// mix_bwd        has a CTA per token, which loops over columns: dy_o x_i are summed in registers, then over
//                the CTA.
// Mixes come in two forms: up to 4 streams in 16-byte vectors, and up to 8 by single elements, which takes
// any alignment.
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/ops/hyper_connection/hyper_connection_cuda.cuh"

namespace tigon::cuda {
namespace {

#include "tigon/ops/hyper_connection/hyper_connection_math.inc"

using namespace hyper_connection;

constexpr int kTokenThreads = 64, kFew = 4;
// Every kernel may have this much shared memory.
constexpr int64_t kMostShared = 48 << 10;

// ---------------------------------------------------------------- widen

template <class X, int N>
__global__ __launch_bounds__(kThreads) void widen_kernel(const X* x, int64_t stride, int64_t cols,
                                                         float* wide, float* rstd, float eps) {
  __shared__ __align__(16) float slots[32];
  const int64_t row = blockIdx.x;
  float square = 0.0f;
  for (int64_t c = int64_t(threadIdx.x) * N; c < cols; c += kThreads * N) {
    const Vec<X, N> in = load_stream<X, N>(x + row * stride + c);
    Vec<float, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      out.v[j] = in[j];
      square = fma(in[j], in[j], square);
    }
    if (wide != nullptr) store(wide + row * cols + c, out);
  }
  if (rstd == nullptr) return;
  square = reduce_row<Sum, kThreads>(square, slots);
  if (threadIdx.x == 0) rstd[row] = 1.0f / sqrtf(square / float(cols) + eps);
}

// ---------------------------------------------------------------- coefficients

struct Rows {
  float* data;
  int64_t stride;
  __device__ __forceinline__ float take(int64_t row, int j) const {
    return data == nullptr ? 0.0f : data[row * stride + j];
  }
  __device__ __forceinline__ void put(int64_t row, int j, float v) const { data[row * stride + j] = v; }
};
Rows rows_of(const Matrix& m) { return {static_cast<float*>(m.data), m.stride}; }

struct Tokens {
  HyperConnection options;
  int64_t tokens;
  int parts, rows;
  float columns;
  const float *r, *b, *s;
  Rows matmuls;
  Rows pres, posts, ress;
  // The next ones belong to the backward.
  Rows dots, dpres, dposts, dress, dmatmuls;
  float *x_scales, *divisors, *sums;  // divisors are null if in shared memory
};

// Accesses one token as hyper_connection_math.inc needs it.
struct Token {
  const Tokens& t;
  int64_t row;
  float* divisors;
  int64_t divisor_step;
  TIGON_FN float rstd() const { return t.r[row]; }
  TIGON_FN float matmul(int j) const { return t.matmuls.take(row, j); }
  TIGON_FN float base(int j) const { return __ldg(t.b + j); }
  TIGON_FN float scale(int g) const { return __ldg(t.s + g); }
  TIGON_FN void pre(int i, float v) const { t.pres.put(row, i, v); }
  TIGON_FN void post(int i, float v) const { t.posts.put(row, i, v); }
  TIGON_FN void res(int i, float v) const { t.ress.put(row, i, v); }
  TIGON_FN float dpre(int i) const { return t.dots.take(row, i) + t.dpres.take(row, i); }
  TIGON_FN float dpost(int i) const { return t.dposts.take(row, i); }
  TIGON_FN float dres(int i) const { return t.dress.take(row, i); }
  TIGON_FN void dmatmul(int j, float v) const { t.dmatmuls.put(row, j, v); }
  TIGON_FN void dbase(int j, float v) const { t.sums[row * (t.rows + t.parts) + j] = v; }
  TIGON_FN void dscale(int g, float v) const { t.sums[row * (t.rows + t.parts) + t.rows + g] = v; }
  TIGON_FN void x_scale(float v) const { t.x_scales[row] = v; }
  TIGON_FN void keep(int64_t i, float v) const { divisors[i * divisor_step] = v; }
  TIGON_FN float kept(int64_t i) const { return divisors[i * divisor_step]; }
};

template <int N, bool Backward>
__global__ __launch_bounds__(kTokenThreads) void coefficients_kernel(const __grid_constant__ Tokens t) {
  extern __shared__ float divisors[];
  const int64_t row = int64_t(blockIdx.x) * kTokenThreads + threadIdx.x;
  if (row >= t.tokens) return;
  const bool scratch = t.divisors != nullptr;
  Token token{t, row, scratch ? t.divisors + row : divisors + threadIdx.x,
              scratch ? t.tokens : kTokenThreads};
  if constexpr (Backward)
    hc_backward<N, float>(t.parts, t.options, t.columns, token);
  else
    hc_forward<N, float>(t.parts, t.options, token);
}

template <bool Backward>
void launch_coefficients(Context& ctx, const Tokens& t, size_t shared = 0) {
  launch(kOp, ctx,
         t.options.streams == kFew ? coefficients_kernel<kFew, Backward> : coefficients_kernel<0, Backward>,
         {.blocks = ceil_div(t.tokens, kTokenThreads), .threads = kTokenThreads, .shared = shared}, t);
}

// ---------------------------------------------------------------- mixes

// mix(o, i) is at o * by_out + i * by_in of a token's row. Null stands for the identity.
struct MixAt {
  const float* data;
  int64_t stride;
  int by_out, by_in;
  // NaN or infinity in a stream that the identity leaves out changes nothing.
  __device__ __forceinline__ bool leaves_out(int o, int i) const { return data == nullptr && o != i; }
  __device__ __forceinline__ float operator()(int64_t row, int o, int i) const {
    return data == nullptr ? float(o == i) : __ldg(data + row * stride + o * by_out + i * by_in);
  }
};
template <class Args>
MixAt mix_at(const Args& a, const Matrix& m) {
  const int n = int(a.streams), outs = int(a.outs);
  return {static_cast<const float*>(m.data), m.stride, a.transposed ? 1 : n, a.transposed ? outs : 1};
}

template <class X>
struct Mix {
  const X *x, *f, *dy;
  X *y, *dx, *df;
  int64_t x_stride, f_stride, dy_stride, y_stride, dx_stride, df_stride;
  MixAt mix, dmix;  // the data of dmix is written
  const float* post;
  float* dpost;
  int64_t post_stride, dpost_stride;
  const float *x_scale, *addend;
  int64_t addend_stride;
  int64_t tokens, columns;
  int streams, outs;
};

template <class X, int Most, int N>
__global__ __launch_bounds__(kThreads) void mix_kernel(const __grid_constant__ Mix<X> p) {
  const int64_t vecs = p.columns / N, at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.tokens * vecs) return;
  const int64_t row = at <= INT32_MAX ? int64_t(uint32_t(at) / uint32_t(vecs)) : at / vecs;
  const int64_t c = (at - row * vecs) * N;
  Vec<X, N> x[Most], f;
#pragma unroll
  for (int i = 0; i < Most; ++i)
    if (i < p.streams) x[i] = load_stream<X, N>(p.x + row * p.x_stride + i * p.columns + c);
  if (p.f != nullptr) f = load_stream<X, N>(p.f + row * p.f_stride + c);
#pragma unroll
  for (int o = 0; o < Most; ++o) {
    if (o >= p.outs) break;
    float sum[N];
    const float post = p.f == nullptr ? 0.0f : __ldg(p.post + row * p.post_stride + o);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = p.f == nullptr ? 0.0f : post * f[j];
#pragma unroll
    for (int i = 0; i < Most; ++i) {
      if (i >= p.streams) break;
      if (p.mix.leaves_out(o, i)) continue;
      const float mix = p.mix(row, o, i);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = fma(mix, x[i][j], sum[j]);
    }
    Vec<X, N> out;
    out.set(sum);
    store(p.y + row * p.y_stride + o * p.columns + c, out);
  }
}

template <class X, int Most, int MostOuts, int N>
__global__ __launch_bounds__(kThreads) void mix_backward_kernel(const __grid_constant__ Mix<X> p) {
  constexpr int kSums = MostOuts * (Most + 1);
  __shared__ __align__(16) float slots[32 * kSums];
  __shared__ float mix[MostOuts][Most], post[MostOuts];
  const int64_t row = blockIdx.x;
  const int tid = int(threadIdx.x);
  // Absent coefficients count as 0.
  if (tid < MostOuts * Most) {
    const int o = tid / Most, i = tid % Most;
    mix[o][i] = p.dx != nullptr && o < p.outs && i < p.streams ? p.mix(row, o, i) : 0.0f;
  }
  if (tid < MostOuts) post[tid] = p.f != nullptr && tid < p.outs ? p.post[row * p.post_stride + tid] : 0.0f;
  __syncthreads();
  const float x_scale = p.x_scale != nullptr ? p.x_scale[row] : 0.0f;
  float sums[kSums] = {};  // [o][i], then those of post
  for (int64_t c = int64_t(tid) * N; c < p.columns; c += kThreads * N) {
    Vec<X, N> dy[MostOuts];
#pragma unroll
    for (int o = 0; o < MostOuts; ++o)
      if (o < p.outs) dy[o] = load_stream<X, N>(p.dy + row * p.dy_stride + o * p.columns + c);
#pragma unroll
    for (int i = 0; i < Most; ++i) {
      if (i >= p.streams) break;
      const Vec<X, N> x = load_stream<X, N>(p.x + row * p.x_stride + i * p.columns + c);
      float d[N] = {};
      if (p.addend != nullptr) {
        const Vec<float, N> more =
            load_stream<float, N>(p.addend + row * p.addend_stride + i * p.columns + c);
#pragma unroll
        for (int j = 0; j < N; ++j) d[j] = fma(x_scale, x[j], more[j]);
      }
#pragma unroll
      for (int o = 0; o < MostOuts; ++o) {
        if (o >= p.outs) break;
#pragma unroll
        for (int j = 0; j < N; ++j) sums[o * Most + i] = fma(dy[o][j], x[j], sums[o * Most + i]);
        if (p.mix.leaves_out(o, i)) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) d[j] = fma(mix[o][i], dy[o][j], d[j]);
      }
      if (p.dx == nullptr) continue;
      Vec<X, N> out;
      out.set(d);
      store(p.dx + row * p.dx_stride + i * p.columns + c, out);
    }
    if (p.f == nullptr) continue;
    const Vec<X, N> f = load_stream<X, N>(p.f + row * p.f_stride + c);
    float d[N] = {};
#pragma unroll
    for (int o = 0; o < MostOuts; ++o) {
      if (o >= p.outs) break;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sums[MostOuts * Most + o] = fma(dy[o][j], f[j], sums[MostOuts * Most + o]);
        d[j] = fma(post[o], dy[o][j], d[j]);
      }
    }
    if (p.df == nullptr) continue;
    Vec<X, N> out;
    out.set(d);
    store(p.df + row * p.df_stride + c, out);
  }
  if (p.dmix.data == nullptr && p.dpost == nullptr) return;
  reduce_row<Sum, kThreads>(sums, slots);
  if (tid != 0) return;
  float* const dmix = const_cast<float*>(p.dmix.data);
#pragma unroll
  for (int o = 0; o < MostOuts; ++o) {
    if (o >= p.outs) break;
    if (p.dpost != nullptr) p.dpost[row * p.dpost_stride + o] = sums[MostOuts * Most + o];
    if (dmix == nullptr) continue;
#pragma unroll
    for (int i = 0; i < Most; ++i)
      if (i < p.streams)
        dmix[row * p.dmix.stride + o * p.dmix.by_out + i * p.dmix.by_in] = sums[o * Most + i];
  }
}

// Holds what both directions read, and the sizes.
template <class X, class Args>
Mix<X> mix_of(const Args& a) {
  Mix<X> p = {};
  p.x = a.x.template row<X>(0), p.x_stride = a.x.stride;
  p.f = a.f.template row<X>(0), p.f_stride = a.f.stride;
  p.mix = mix_at(a, a.mix);
  p.post = a.post.template row<float>(0), p.post_stride = a.post.stride;
  p.tokens = a.x.rows, p.columns = a.columns();
  p.streams = int(a.streams), p.outs = int(a.outs);
  return p;
}

// Calls fn<X, Most, N>(), the form of a mix that suits these matrices.
template <class Args, class Fn>
void by_form(const Args& a, std::initializer_list<const Matrix*> others, const Fn& fn) {
  const int64_t columns = a.columns();
  by_type(a.x, [&]<class X>() {
    constexpr int kVec = 16 / int(sizeof(X));
    bool wide = a.streams <= kFew && a.outs <= kFew && vectors<kVec>(a.x, columns);
    for (const Matrix* m : others) wide = wide && vectors<kVec>(*m, columns);
    wide ? fn.template operator()<X, kFew, kVec>() : fn.template operator()<X, kMaxStreams, 1>();
  });
}

}  // namespace

void widen(Context& ctx, const HyperConnectionWiden& a) {
  by_type(a.x, [&]<class X>() {
    constexpr int kVec = 16 / int(sizeof(X));
    const bool wide = is_vectorizable(a.x.data, a.x.stride, a.x.cols, sizeof(X));
    launch(kOp, ctx, wide ? widen_kernel<X, kVec> : widen_kernel<X, 1>,
           {.blocks = a.x.rows, .threads = kThreads}, a.x.row<X>(0), a.x.stride, a.x.cols, a.wide, a.rstd,
           a.eps);
  });
}

void coefficients(Context& ctx, const HyperConnectionFwd& a) {
  launch_coefficients<false>(ctx, {.options = a.options,
                                   .tokens = a.x.rows,
                                   .parts = int(a.scale.size),
                                   .rows = int(a.weight.rows),
                                   .columns = float(a.x.cols),
                                   .r = a.rstd.as<float>(),
                                   .b = a.base.as<float>(),
                                   .s = a.scale.as<float>(),
                                   .matmuls = rows_of(a.matmul),
                                   .pres = rows_of(a.pre),
                                   .posts = rows_of(a.post),
                                   .ress = rows_of(a.res)});
}

void coefficient_gradients(Context& ctx, const HyperConnectionGradients& g) {
  const HyperConnectionBwd& a = *g.call;
  const int64_t tokens = a.x.rows, n = a.options.streams, m = a.weight.rows, parts = a.scale.size;
  float* sums = ctx.scratch_of<float>(tokens * (m + parts));
  const int64_t kept = parts > 2 ? (2 * a.options.iterations - 1) * n : 0;
  const bool fits = kept <= kMostShared / (kTokenThreads * int64_t(sizeof(float)));
  float* divisors = fits ? nullptr : ctx.scratch_of<float>(kept * tokens);
  const size_t shared = fits ? size_t(kept) * kTokenThreads * sizeof(float) : 0;
  launch_coefficients<true>(ctx,
                            {.options = a.options,
                             .tokens = tokens,
                             .parts = int(parts),
                             .rows = int(m),
                             .columns = float(a.x.cols),
                             .r = a.rstd.as<float>(),
                             .b = a.base.as<float>(),
                             .s = a.scale.as<float>(),
                             .matmuls = rows_of(a.matmul),
                             .pres = {g.pre, n},
                             .dots = {const_cast<float*>(g.dots), n},
                             .dpres = rows_of(a.dpre),
                             .dposts = rows_of(a.dpost),
                             .dress = rows_of(a.dres),
                             .dmatmuls = {g.dmatmul, m},
                             .x_scales = g.x_scale,
                             .divisors = divisors,
                             .sums = sums},
                            shared);
  // The sizes are given even for the columns of a gradient that is not wanted.
  sum_partials(kOp, ctx, sums, tokens,
               {{.data = a.dbase.data, .dtype = DType::f32, .size = m},
                {.data = a.dscale.data, .dtype = DType::f32, .size = parts}});
}

void set_zero(Context& ctx, const Matrix& m) {
  TIGON_CUDA_CHECK(
      kOp, cudaMemset2DAsync(m.data, size_t(m.stride) * sizeof(float), 0, size_t(m.cols) * sizeof(float),
                             size_t(m.rows), static_cast<cudaStream_t>(ctx.stream())));
}

void hyper_connection_mix_fwd(Context& ctx, const HyperConnectionMixFwd& a) {
  by_form(a, {&a.f, &a.y}, [&]<class X, int Most, int N>() {
    Mix<X> p = mix_of<X>(a);
    p.y = a.y.row<X>(0), p.y_stride = a.y.stride;
    launch(kOp, ctx, mix_kernel<X, Most, N>,
           {.blocks = ceil_div(p.tokens * (p.columns / N), kThreads), .threads = kThreads}, p);
  });
}

void hyper_connection_mix_bwd(Context& ctx, const HyperConnectionMixBwd& a) {
  by_form(a, {&a.dy, &a.f, &a.dx, &a.df, &a.addend}, [&]<class X, int Most, int N>() {
    Mix<X> p = mix_of<X>(a);
    p.dy = a.dy.row<X>(0), p.dy_stride = a.dy.stride;
    p.dx = a.dx.row<X>(0), p.dx_stride = a.dx.stride;
    p.df = a.df.row<X>(0), p.df_stride = a.df.stride;
    p.dmix = mix_at(a, a.dmix);
    p.dpost = a.dpost.row<float>(0), p.dpost_stride = a.dpost.stride;
    p.x_scale = a.x_scale.as<float>();
    p.addend = a.addend.row<float>(0), p.addend_stride = a.addend.stride;
    launch(kOp, ctx, a.outs == 1 ? mix_backward_kernel<X, Most, 1, N> : mix_backward_kernel<X, Most, Most, N>,
           {.blocks = p.tokens, .threads = kThreads}, p);
  });
}

}  // namespace tigon::cuda
