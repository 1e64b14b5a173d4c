// The CUDA backend of sparsemax gives its formula to the row kernel. It moves 2b bytes per element forward
// and 3b backward (b = element size). Rows that no cluster of CTAs holds are read again, from L2, in every
// step of tau. An element takes about 18 instructions forward if at most 64 entries are less than 1 below the
// maximum, and otherwise up to 6 more per step of tau, which leaves out vectors below it. It takes 9
// backward.
#include "tigon/base/cuda/row_kernel.cuh"
#include "tigon/ops/sparsemax/sparsemax.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/sparsemax/sparsemax_math.inc"

constexpr const char* kOp = "sparsemax";

// Reduces to the largest entry. Over a warp or more it is NaN if there is one.
struct alignas(16) Largest {
  float x, unused[3];
  __device__ static Largest identity() { return {-INFINITY, {}}; }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    x = extreme_of_lanes<Max, Width>(x);
  }
};
// Holds the sum, the size and the least of a set of entries; none is above 0.
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

// Holds the entries z = x - max above -1, in any order. tau is not below -1, so those of the support are
// among them.
struct Candidates {
  static constexpr int kMost = 64;
  int count;
  float z[kMost];
};
// Computes tau of at most 64 candidates, in every warp of the row. Sums are of integers, so the order changes
// no bit.
__device__ __forceinline__ float tau_of(const Candidates& c) {
  // 64 candidates, each above -1, fit an int; half a unit is the error of an fp32 number near -1.
  constexpr float kUnit = 1.0f / (1 << 25);
  const int lane = int(threadIdx.x) % 32, count = c.count;
  const float z[2] = {lane < count ? c.z[lane] : -INFINITY, lane + 32 < count ? c.z[lane + 32] : -INFINITY};
  float tau = -1.0f;
  for (int size = Candidates::kMost + 1;;) {
    int own = 0, above = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own += z[i] > tau ? __float2int_rn(z[i] * (1.0f / kUnit)) : 0;
      above += __popc(__ballot_sync(0xffffffffu, z[i] > tau));
    }
    if (above >= size) return tau;
    size = above;
    tau = (float(__reduce_add_sync(0xffffffffu, own)) * kUnit - 1.0f) / float(size);
  }
}

template <class T>
struct SparseForward {
  using Element = T;
  using Payload = Entries;
  using Scratch = Candidates;
  static constexpr int kIn = 1;
  static constexpr bool kFill[kIn] = {true};
  static constexpr int N = AlignedRow<T>::N;
  RowsOf<T, kIn> rows;

  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    constexpr bool kGathers = !Row::kIsCluster && (Row::kThreads == 0 || Row::kThreads == 32);
    constexpr float kLeast = std::is_same_v<T, __half> ? kLeastF16 : 0.0f;
    if (kGathers && row.reducer.thread == 0) row.scratch.count = 0;
    const float top = row.all_reduce(Largest{row.max_of_vecs(), {}}).x;
    float tau = -1.0f;
    if constexpr (kGathers) {
      if (!(fabsf(top) < INFINITY))
        tau = CUDART_NAN_F;
      else if (gather(row, top))
        tau = tau_of(row.scratch);
      else
        shrink(row, top, tau);
    } else {
      shrink(row, top, tau);
    }
    row.write_if(has_support(top, tau),
                 [&](const float (&x)[1][N], int j, int) { return sparsemax_y(x[0][j] - top, tau, kLeast); });
  }

 private:
  // True if a vector with this maximum has an entry above tau, or NaN.
  __device__ static auto has_support(float top, const float& tau) {
    return [top, &tau](float most) { return !(most - top <= tau); };
  }
  // Returns false if there are more candidates than fit.
  template <class Row>
  __device__ __forceinline__ static bool gather(Row& row, float top) {
    Candidates& c = row.scratch;
    __syncwarp();
    const float bound = -1.0f;
    row.for_each_vec_if(has_support(top, bound), [&](const float (&x)[1][N], int) {
      int above = 0;
#pragma unroll
      for (int j = 0; j < N; ++j) above += x[0][j] - top > bound;
      int slot = atomicAdd(&c.count, above);
      if (slot + above > Candidates::kMost) return;
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (x[0][j] - top > bound) c.z[slot++] = x[0][j] - top;
    });
    row.sync();
    return c.count <= Candidates::kMost;
  }
  // Makes Michelot's steps, from all entries above -1 to the support.
  template <class Row>
  __device__ __forceinline__ static void shrink(Row& row, float top, float& tau) {
    float size = INFINITY;
    bool shrinks = true;
    // Rows of one warp step together: a row whose support is found finds the same one again.
    do {
      Entries own = Entries::identity();
      row.for_each_vec_if(has_support(top, tau), [&](const float (&x)[1][N], int) {
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
      // The set is the support if it is above the tau that follows from it, or stays the same.
      shrinks = shrinks && all.size < size && !(all.least > tau);
      size = all.size;
    } while (__any_sync(0xffffffffu, shrinks));
  }
};

template <class T>
struct SparseBackward {
  using Element = T;
  using Payload = SumArray<2>;
  using Scratch = NoScratch;
  static constexpr int kIn = 2;
  static constexpr bool kFill[kIn] = {false, false};
  // The rows are y and dy.
  RowsOf<T, kIn> rows;

  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    constexpr int N = AlignedRow<T>::N;
    SumArray<2> own = {};
    row.for_each_vec([&](const float (&x)[2][N], int) {
      float sum = 0.0f, size = 0.0f;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float y = x[0][j];
        // A row of NaN has a gradient of NaN.
        sum += where_above(y, 0.0f, fma(y, 0.0f, x[1][j]));
        size += where_above(y, 0.0f, 1.0f);
      }
      own.s[0] += sum, own.s[1] += size;
    });
    const SumArray<2> all = row.all_reduce(own);
    const float mean = all.s[0] / all.s[1];
    row.write([&](const float (&x)[2][N], int j, int) { return sparsemax_dx(x[1][j], x[0][j], mean); });
  }
};

}  // namespace

void sparsemax_fwd(Context& ctx, const DistributionFwd& a) { distribution_fwd<SparseForward>(kOp, ctx, a); }
void sparsemax_bwd(Context& ctx, const DistributionBwd& a) { distribution_bwd<SparseBackward>(kOp, ctx, a); }

}  // namespace tigon::cuda
