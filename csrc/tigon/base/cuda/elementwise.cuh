// A pointwise op computes results = f(inputs) element by element, over rows x cols of one storage type. The
// op gives a functor with the number of its inputs and results:
//   struct Square {
//     static constexpr int kIn = 1, kOut = 1;
//     __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
//       out[0] = in[0] * in[0];
//     }
//   };
// and calls pointwise(op, ctx, Pointwise<Square>{.in = {a.x}, .out = {a.y}}). Results without data are not
// written. An input that no wanted result needs should name another input's matrix: the cache serves its
// second read. A matrix may hold several values of a point side by side (gate and up interleaved by columns).
// Such a functor says how many of its values each matrix holds by `static constexpr int in_width(int matrix)`
// and `out_width`; they are deinterleaved in registers. A functor with long arithmetic defines is_long() as
// true and gets more vectors per thread. Functors that share single(), a functor of the same inputs and
// results, share the kernels of single elements, which are rare.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/divider.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {

namespace pointwise_detail {

// Counts the values of a point in a matrix: 1 unless the functor says otherwise.
template <class F>
constexpr int in_width(int matrix) {
  if constexpr (requires { F::in_width(0); })
    return F::in_width(matrix);
  else
    return 1;
}
template <class F>
constexpr int out_width(int matrix) {
  if constexpr (requires { F::out_width(0); })
    return F::out_width(matrix);
  else
    return 1;
}
template <class F>
constexpr bool arithmetic_is_long() {
  if constexpr (requires { F::is_long(); })
    return F::is_long();
  else
    return false;
}
constexpr int count(int values, int (*width)(int)) {
  int matrices = 0;
  for (int v = 0; v < values; v += width(matrices++)) {
  }
  return matrices;
}
template <class F>
// Counts the matrices.
inline constexpr int kIns = count(F::kIn, &in_width<F>);
template <class F>
inline constexpr int kOuts = count(F::kOut, &out_width<F>);

}  // namespace pointwise_detail

template <class F>
struct Pointwise {
  F f = {};
  Matrix in[pointwise_detail::kIns<F>];
  Matrix out[pointwise_detail::kOuts<F>];
};

namespace pointwise_detail {

inline constexpr int kThreads = 256;
// Each thread has this many vectors of every input in flight. With 16-byte vectors one is enough: many short
// CTAs keep as many bytes in flight as a few long ones, and end together. Single elements, rows with gaps
// (whose index arithmetic is longer) and functors with is_long() take more.
template <class F, bool Flat, bool Vectorized>
constexpr int vecs_per_thread_of() {
  if (Vectorized && !arithmetic_is_long<F>() && (Flat || F::kIn > 2)) return 1;
  return F::kIn > 2 ? 2 : 4;
}
// Says how many CTAs per SM the registers allow.
template <int VecsPerThread>
constexpr int kMinBlocks = VecsPerThread == 1 ? 6 : 4;

template <class F, class T>
struct PointwiseParams {
  F f;
  const T* in[kIns<F>];
  int64_t in_stride[kIns<F>];
  T* out[kOuts<F>];
  int64_t out_stride[kOuts<F>];
  // Counts the vectors of all rows.
  int64_t vecs;
  // Counts the elements after the last vector (flat only).
  int tail;
  // Divides by the vectors of a row (rows only).
  Divider per_row;
};

// Processes vectors of N points. Flat means that there are no gaps between rows. A thread has VecsPerThread
// vectors of every input in flight; a matrix with `width` values per point has `width` adjacent vectors for
// each.
template <bool Flat, int N, int VecsPerThread, class F, class T>
__global__ void __launch_bounds__(kThreads, kMinBlocks<VecsPerThread>)
    pointwise_kernel(const __grid_constant__ PointwiseParams<F, T> p) {
  constexpr int kTile = kThreads * VecsPerThread;
  for (int64_t tile = blockIdx.x; tile * kTile < p.vecs; tile += gridDim.x) {
    int64_t first = tile * kTile, row[VecsPerThread] = {};
    uint32_t column[VecsPerThread] = {};
    int64_t first_row = 0;
    if constexpr (!Flat)
      first_row =
          p.vecs <= INT32_MAX ? p.per_row.divide(uint32_t(first)) : uint64_t(first) / p.per_row.divisor;
    uint32_t first_column = uint32_t(first - first_row * p.per_row.divisor);
    Vec<T, N> x[VecsPerThread][F::kIn];
#pragma unroll
    for (int h = 0; h < VecsPerThread; ++h) {
      uint32_t at = h * kThreads + threadIdx.x;
      if constexpr (!Flat) {
        uint32_t q = p.per_row.divide(first_column + at);
        row[h] = first_row + q;
        column[h] = first_column + at - q * p.per_row.divisor;
      }
      if (first + at < p.vecs) {
#pragma unroll
        for (int i = 0, v = 0; i < kIns<F>; v += in_width<F>(i++)) {
          int64_t vec = Flat ? first + at : column[h];
          const T* from = p.in[i] + (Flat ? 0 : row[h] * p.in_stride[i]) + vec * (N * in_width<F>(i));
#pragma unroll
          for (int k = 0; k < in_width<F>(i); ++k) x[h][v + k] = load_stream<T, N>(from + k * N);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < VecsPerThread; ++h) {
      uint32_t at = h * kThreads + threadIdx.x;
      if (first + at >= p.vecs) break;
      Vec<T, N> y[F::kOut];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float in[F::kIn], out[F::kOut];
#pragma unroll
        for (int i = 0, v = 0; i < kIns<F>; v += in_width<F>(i++))
#pragma unroll
          for (int k = 0, w = in_width<F>(i); k < w; ++k)
            in[v + k] = x[h][v + (n * w + k) / N][(n * w + k) % N];
        p.f(in, out);
#pragma unroll
        for (int o = 0, v = 0; o < kOuts<F>; v += out_width<F>(o++))
#pragma unroll
          for (int k = 0, w = out_width<F>(o); k < w; ++k)
            y[v + (n * w + k) / N].set((n * w + k) % N, out[v + k]);
      }
#pragma unroll
      for (int o = 0, v = 0; o < kOuts<F>; v += out_width<F>(o++)) {
        if (p.out[o] == nullptr) continue;
        int64_t vec = Flat ? first + at : column[h];
        T* to = p.out[o] + (Flat ? 0 : row[h] * p.out_stride[o]) + vec * (N * out_width<F>(o));
#pragma unroll
        for (int k = 0; k < out_width<F>(o); ++k) store<T, N>(to + k * N, y[v + k]);
      }
    }
  }
  if constexpr (Flat && N > 1) {
    if (blockIdx.x == 0 && int(threadIdx.x) < p.tail) {
      int64_t at = p.vecs * N + threadIdx.x;
      float in[F::kIn], out[F::kOut];
#pragma unroll
      for (int i = 0, v = 0; i < kIns<F>; v += in_width<F>(i++))
#pragma unroll
        for (int k = 0, w = in_width<F>(i); k < w; ++k) in[v + k] = widen(p.in[i][at * w + k]);
      p.f(in, out);
#pragma unroll
      for (int o = 0, v = 0; o < kOuts<F>; v += out_width<F>(o++))
#pragma unroll
        for (int k = 0, w = out_width<F>(o); k < w; ++k)
          if (p.out[o] != nullptr) p.out[o][at * w + k] = narrow<T>(out[v + k]);
    }
  }
}

template <class F>
bool every(const Pointwise<F>& call, bool (*holds)(const Matrix&)) {
  for (const Matrix& m : call.in)
    if (!holds(m)) return false;
  for (const Matrix& m : call.out)
    if (m.data != nullptr && !holds(m)) return false;
  return true;
}

template <class F>
bool is_flat(const Pointwise<F>& call) {
  return every(call, [](const Matrix& m) { return m.stride == m.cols || m.rows == 1; });
}
template <class F>
bool starts_aligned(const Pointwise<F>& call) {
  return every(call, [](const Matrix& m) { return reinterpret_cast<uintptr_t>(m.data) % 16 == 0; });
}
template <class F>
bool rows_vectorizable(const Pointwise<F>& call) {
  return every(call,
               [](const Matrix& m) { return is_vectorizable(m.data, m.stride, m.cols, size_of(m.dtype)); });
}

template <bool Flat, bool Vectorized, class F>
void run(const char* op, Context& ctx, const Pointwise<F>& call) {
  const Matrix& shape = call.in[0];
  int64_t cols = shape.cols / in_width<F>(0);
  dispatch_float(op, "input", shape.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr int N = Vectorized ? 16 / sizeof(T) : 1,
                  kVecsPerThread = vecs_per_thread_of<F, Flat, Vectorized>();
    int64_t all = shape.rows * cols;
    PointwiseParams<F, T> p{.f = call.f,
                            .in = {},
                            .in_stride = {},
                            .out = {},
                            .out_stride = {},
                            .vecs = all / N,
                            .tail = Flat ? int(all % N) : 0,
                            .per_row = Divider(Flat ? 1 : cols / N)};
    for (int i = 0; i < kIns<F>; ++i)
      p.in[i] = call.in[i].template row<T>(0), p.in_stride[i] = call.in[i].stride;
    for (int o = 0; o < kOuts<F>; ++o)
      p.out[o] = call.out[o].template row<T>(0), p.out_stride[o] = call.out[o].stride;
    int64_t tiles = std::max<int64_t>(1, ceil_div(p.vecs, kThreads * kVecsPerThread));
    launch(op, ctx, pointwise_kernel<Flat, N, kVecsPerThread, F, T>,
           {.blocks = std::min<int64_t>(tiles, INT32_MAX), .threads = kThreads}, p);
  });
}

template <bool Flat, class F>
void run_single(const char* op, Context& ctx, const Pointwise<F>& call) {
  if constexpr (requires { call.f.single(); }) {
    Pointwise<decltype(call.f.single())> single{.f = call.f.single()};
    std::copy_n(call.in, kIns<F>, single.in), std::copy_n(call.out, kOuts<F>, single.out);
    run<Flat, false>(op, ctx, single);
  } else {
    run<Flat, false>(op, ctx, call);
  }
}

template <class F>
struct Variant {
  const char* name;
  bool (*supports)(const Pointwise<F>&);
  void (*run)(const char* op, Context&, const Pointwise<F>&);
};

// The first variant that supports the call runs.
template <class F>
inline constexpr Variant<F> kVariants[] = {
    {"flat, 16-byte packs", [](const Pointwise<F>& c) { return is_flat(c) && starts_aligned(c); },
     &run<true, true, F>},
    {"rows, 16-byte packs", [](const Pointwise<F>& c) { return rows_vectorizable(c); }, &run<false, true, F>},
    {"flat, single elements", [](const Pointwise<F>& c) { return is_flat(c); }, &run_single<true, F>},
    {"rows, single elements", [](const Pointwise<F>&) { return true; }, &run_single<false, F>},
};

}  // namespace pointwise_detail

// The caller has checked sizes and dtypes. Empty matrices are allowed.
template <class F>
void pointwise(const char* op, Context& ctx, const Pointwise<F>& call) {
  using namespace pointwise_detail;
  const Matrix& shape = call.in[0];
  if (shape.rows == 0 || shape.cols == 0) return;
  constexpr int64_t kLongRow = int64_t(1) << 30;
  // Longer rows than Divider can index are launched one by one.
  if (shape.cols >= kLongRow && !is_flat(call)) {
    for (int64_t r = 0; r < shape.rows; ++r) {
      Pointwise<F> row = call;
      auto keep_row = [r](Matrix& m) {
        if (m.data != nullptr) m.data = static_cast<char*>(m.data) + r * m.stride * int64_t(size_of(m.dtype));
        m.rows = 1;
      };
      for (Matrix& m : row.in) keep_row(m);
      for (Matrix& m : row.out) keep_row(m);
      pointwise(op, ctx, row);
    }
    return;
  }
  for (const Variant<F>& v : kVariants<F>)
    if (v.supports(call)) return v.run(op, ctx, call);
}

}  // namespace tigon::cuda
