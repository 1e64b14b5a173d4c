// The CUDA backend of softmax gives its formula and its tables to the row kernel. It moves 2b bytes per
// element forward and 3b backward (b = element size). Rows that no cluster of CTAs holds are read again, from
// L2, in every pass. An element takes about 9 instructions forward, with one ex2 (two in rows past 1024
// vectors), and 9 backward; the memory-bound budget is 27 and 41 (bf16).
#include "tigon/base/cuda/row_kernel.cuh"
#include "tigon/ops/softmax/softmax.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/softmax/softmax_math.inc"

constexpr const char* kOp = "softmax";

constexpr RowConfig lanes(int threads_per_row, int vecs_per_thread) {
  return several_rows({.threads_per_row = threads_per_row, .vecs_per_thread = vecs_per_thread});
}
constexpr RowConfig cta(int vecs_per_thread, int max_threads, int min_blocks_per_sm = 1) {
  return {
      .vecs_per_thread = vecs_per_thread, .max_threads = max_threads, .min_blocks_per_sm = min_blocks_per_sm};
}

template <class T>
struct SoftmaxForward {
  using Element = T;
  using Payload = OnlineSoftmax<T>;
  using Scratch = NoScratch;
  static constexpr int kIn = 1;
  static constexpr bool kFill[kIn] = {true};
  RowsOf<T, kIn> rows;

  // Rows that are not vectorized are rare and have few configurations.
  static constexpr RowConfigs configs(RowAlignment alignment) {
    if (alignment == RowAlignment::any)
      return RowConfigs(lanes(8, 2), lanes(32, 4), cta(4, 512, 3), cta(8, 1024));
    return RowConfigs(lanes(8, 2), lanes(16, 2), lanes(32, 2), lanes(32, 4), cta(2, 512, 2), cta(8, 1024));
  }
  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    constexpr int N = AlignedRow<T>::N;
    // In fp32 the threads agree on the maximum before they sum: rescaling partial sums costs an ulp.
    constexpr bool kMaxFirst = sizeof(T) == 4 || Row::kIsLooped;
    // The exponentials of longer rows do not fit in registers, and are computed twice.
    constexpr bool kReuseExp = Row::kMaxVecs <= 1024;
    float e[Row::kVecs][N];
    OnlineSoftmax<T> own{row.max_of_vecs(), 0.0f};
    if (kMaxFirst) own.m = row.all_reduce(own).m;
    row.for_each_vec([&](const float (&x)[1][N], int i) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        e[i][j] = exp_minus_max<T>(x[0][j], finite_max(own.m));
        sum += e[i][j];
      }
      own.s += sum;
    });
    const OnlineSoftmax<T> all = row.all_reduce(own);
    const float scale = (kReuseExp && !kMaxFirst ? exp_minus_max<T>(own.m, all.m) : 1.0f) / all.s;
    row.write([&](const float (&x)[1][N], int j, int i) {
      return (kReuseExp ? e[i][j] : exp_minus_max<T>(x[0][j], all.m)) * scale;
    });
  }
};

template <class T>
struct SoftmaxBackward {
  using Element = T;
  using Payload = SumArray<1>;
  using Scratch = NoScratch;
  static constexpr int kIn = 2;
  static constexpr bool kFill[kIn] = {false, false};
  // The rows are y and dy.
  RowsOf<T, kIn> rows;

  static constexpr RowConfigs configs(RowAlignment alignment) {
    if (alignment == RowAlignment::any) return RowConfigs(lanes(8, 2), lanes(32, 4), cta(4, 1024));
    return RowConfigs(lanes(8, 2), lanes(16, 2), lanes(32, 2), lanes(32, 4), cta(2, 512), cta(4, 1024));
  }
  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    constexpr int N = AlignedRow<T>::N;
    SumArray<1> own = {};
    row.for_each_vec([&](const float (&x)[2][N], int) {
      // Vectors have dependency chains of their own, for instruction-level parallelism.
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < N; ++j) sum = fma(x[0][j], x[1][j], sum);
      own.s[0] += sum;
    });
    const float dot = row.all_reduce(own).s[0];
    row.write([&](const float (&x)[2][N], int j, int) { return softmax_dx(x[1][j], x[0][j], dot); });
  }
};

}  // namespace

void softmax_fwd(Context& ctx, const DistributionFwd& a) { distribution_fwd<SoftmaxForward>(kOp, ctx, a); }
void softmax_bwd(Context& ctx, const DistributionBwd& a) { distribution_bwd<SoftmaxBackward>(kOp, ctx, a); }

}  // namespace tigon::cuda
