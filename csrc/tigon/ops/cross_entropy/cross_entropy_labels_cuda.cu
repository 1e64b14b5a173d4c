// Several labels a row: a thread for each row where they are compared, for each label otherwise. Threads of the same label
// write the same value.
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/cross_entropy/cross_entropy_labels.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/cross_entropy/cross_entropy_labels.inc"

constexpr const char* kOp = "cross_entropy";
constexpr int kThreads = 128;

__device__ int64_t thread_of_grid() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }

__global__ __launch_bounds__(kThreads) void targets_kernel(const __grid_constant__ LabelPointers p) {
  const int64_t row = thread_of_grid();
  if (row < p.rows) label_target(p, row);
}

template <class T>
__global__ __launch_bounds__(kThreads) void scores_kernel(const __grid_constant__ LabelPointers p,
                                                          const T* logits, int64_t n) {
  const int64_t i = thread_of_grid();
  if (i < n) label_scores(p, logits, i, [](T x) { return widen(x); });
}

template <class T>
__global__ __launch_bounds__(kThreads) void gradient_kernel(const __grid_constant__ LabelPointers p,
                                                            T* dlogits, int64_t n) {
  const int64_t i = thread_of_grid() / p.count, k = thread_of_grid() % p.count;
  if (i < n && label_has_gradient(p, i, k))
    dlogits[i * p.dlogits_stride + labels_of(p, i)[k]] = narrow<T>(float(label_gradient(p, i, k)));
}

__global__ __launch_bounds__(kThreads) void results_kernel(const __grid_constant__ LabelPointers p) {
  const int64_t row = thread_of_grid() / p.count, k = thread_of_grid() % p.count;
  if (row < p.rows) label_result(p, row, k);
}

int64_t blocks_of(int64_t threads) { return ceil_div(threads, int64_t(kThreads)); }

}  // namespace

void cross_entropy_label_targets(Context& ctx, const CrossEntropyLabels& a) {
  launch(kOp, ctx, targets_kernel, {.blocks = blocks_of(a.target.size), .threads = kThreads},
         label_pointers(a));
}

void cross_entropy_label_scores(Context& ctx, const CrossEntropyLabels& a) {
  dispatch_float(kOp, "logits", a.logits.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    launch(kOp, ctx, scores_kernel<T>, {.blocks = blocks_of(a.chosen.size), .threads = kThreads},
           label_pointers(a), static_cast<const T*>(a.logits.row<T>(0)), a.chosen.size);
  });
}

void cross_entropy_label_gradient(Context& ctx, const CrossEntropyLabels& a) {
  dispatch_float(kOp, "dlogits", a.dlogits.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    launch(kOp, ctx, gradient_kernel<T>, {.blocks = blocks_of(a.chosen.size * a.count), .threads = kThreads},
           label_pointers(a), a.dlogits.row<T>(0), a.chosen.size);
  });
}

void cross_entropy_label_results(Context& ctx, const CrossEntropyLabels& a) {
  launch(kOp, ctx, results_kernel, {.blocks = blocks_of(a.labels.size), .threads = kThreads},
         label_pointers(a));
}

}  // namespace tigon::cuda
