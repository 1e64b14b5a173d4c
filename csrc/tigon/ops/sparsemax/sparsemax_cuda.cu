// CUDA backend of sparsemax: the formula, for the kernel of rows.
//
// Bytes per element (b = element size): forward 2b, backward 3b; rows that no cluster of CTAs holds are read again, out of L2, in
// every step of tau.
// Instructions per element: about 6 forward, and up to 6 more a step of tau, which leaves out vectors below it; 9 backward.
#include "tigon/base/cuda/row_kernel.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/sparsemax/sparsemax.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/sparsemax/sparsemax_math.inc"

constexpr const char* kOp = "sparsemax";

// The largest entry; of a warp or more, NaN if there is one.
struct alignas(16) Largest {
  float x, unused[3];
  __device__ static Largest identity() { return {-INFINITY, {}}; }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    x = extreme_of_lanes<Max, Width>(x);
  }
};
// The sum, the size and the least of a set of entries; none is above 0.
struct alignas(16) Entries {
  float sum, size, least, unused;
  __device__ static Entries identity() { return {}; }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    sum = reduce_lanes<Sum, Width>(sum);
    size = Width < 32 ? reduce_lanes<Sum, Width>(size) : float(__reduce_add_sync(~0u, int(size)));
    least = extreme_of_lanes<Min, Width>(least);
  }
};

template <class T>
struct Forward {
  using Element = T;
  using Payload = Entries;
  static constexpr int kIn = 1;
  static constexpr bool kFill[kIn] = {true};
  RowsOf<T, kIn> rows;

  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    constexpr int N = AlignedRow<T>::N;
    constexpr float kLeast = std::is_same_v<T, __half> ? kLeastF16 : 0.0f;
    const float top = row.all_reduce(Largest{row.max_of_vecs(), {}}).x;
    float tau = -1.0f, size = INFINITY;
    bool shrinks = true;
    // Whether a vector has an entry above tau, or NaN.
    auto has_support = [&](float most) { return !(most - top <= tau); };
    // Rows of one warp step together: a row whose support is found finds the same again.
    do {
      Entries own = Entries::identity();
      row.for_each_vec_if(has_support, [&](const float (&x)[1][N]) {
        float sum = 0.0f, size = 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float z = x[0][j] - top, entry = where_above(z, tau, z);
          sum += entry;
          size += where_above(z, tau, 1.0f);
          own.least = fminf(own.least, entry);
        }
        own.sum += sum, own.size += size;
      });
      const Entries all = row.all_reduce(own);
      if (shrinks) tau = (all.sum - 1.0f) / all.size;
      // The set is the support where it is above the tau that follows from it, or stays the same.
      shrinks = shrinks && all.size < size && !(all.least > tau);
      size = all.size;
    } while (__any_sync(0xffffffffu, shrinks));
    row.write_if(has_support,
                 [&](const float (&x)[1][N], int j) { return sparsemax_y(x[0][j] - top, tau, kLeast); });
  }
};

template <class T>
struct Backward {
  using Element = T;
  using Payload = SumArray<2>;
  static constexpr int kIn = 2;
  static constexpr bool kFill[kIn] = {false, false};
  // y and dy
  RowsOf<T, kIn> rows;

  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    constexpr int N = AlignedRow<T>::N;
    SumArray<2> own = {};
    row.for_each_vec([&](const float (&x)[2][N]) {
      float sum = 0.0f, size = 0.0f;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float y = x[0][j];
        sum += where_above(y, 0.0f, fma(y, 0.0f, x[1][j]));  // a row of NaN has a gradient of NaN
        size += where_above(y, 0.0f, 1.0f);
      }
      own.s[0] += sum, own.s[1] += size;
    });
    const SumArray<2> all = row.all_reduce(own);
    const float mean = all.s[0] / all.s[1];
    row.write([&](const float (&x)[2][N], int j) { return sparsemax_dx(x[1][j], x[0][j], mean); });
  }
};

}  // namespace

void sparsemax_fwd(Context& ctx, const SparsemaxFwd& a) {
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    run_row_op(kOp, ctx, Forward<T>{rows_of<T, 1>({a.x}, a.y)});
  });
}

void sparsemax_bwd(Context& ctx, const SparsemaxBwd& a) {
  dispatch_float(kOp, "y", a.y.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    run_row_op(kOp, ctx, Backward<T>{rows_of<T, 2>({a.y, a.dy}, a.dx)});
  });
}

}  // namespace tigon::cuda
