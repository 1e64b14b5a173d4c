// Implements drafter_loss in CUDA.
// Bytes per row (b = element size): teacher b V_t read, 4 V_t of the map out of L2, b V written; draft rows b
// V read and written each, and b V read of the teacher's, by neighbours that find it in L2.
#include "tigon/base/cuda/row_kernel.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/drafter_loss/drafter_loss.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/drafter_loss/drafter_loss_math.inc"

constexpr const char* kOp = "drafter_loss";
constexpr int kTeacherThreads = 512;

// Holds the statistics of the classes of the softmax, and the argmax.
template <class T>
struct alignas(16) Peak {
  OnlineSoftmax<T> sum;
  float top;
  int at;
  __device__ static Peak identity() { return {OnlineSoftmax<T>::identity(), -INFINITY, INT_MAX}; }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    sum.template all_reduce_lanes<Width>();
    const float best = extreme_of_lanes<Max, Width>(top);
    int first = top == best ? at : INT_MAX;
#pragma unroll
    for (int step = 1; step < Width; step <<= 1) first = min(first, __shfl_xor_sync(~0u, first, step));
    top = best, at = first;
  }
  // Adds elements from column c on.
  template <bool kArgmax = true, int N>
  __device__ __forceinline__ void add(const float (&x)[N], int c) {
    float most = x[0], part = 0.0f;
#pragma unroll
    for (int j = 1; j < N; ++j) most = fmaxf(most, x[j]);
    if (most > sum.m) {
      if (sum.s != 0.0f) sum.s *= exp_minus_max<T>(sum.m, most);
      sum.m = most;
    }
    const float from = finite_max(sum.m);
#pragma unroll
    for (int j = 0; j < N; ++j) part += exp_minus_max<T>(x[j], from);
    sum.s += part;
    if (!kArgmax || (most <= top && at != INT_MAX)) return;
    top = most;
#pragma unroll
    for (int j = N - 1; j >= 0; --j) at = x[j] == most ? c + j : at;
  }
};

// Returns elements [c, c + N) of an aligned row of `cols` columns, in global or shared memory. Beyond its end
// they are -inf.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> vec_of(const T* row, int c, int cols) {
  Vec<T, N> v = load_stream<T, N>(row + c);
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (c + N > cols && c + j >= cols) v.v[j] = narrow<T>(-INFINITY);
  return v;
}
template <class T, int N>
__device__ __forceinline__ void unpack(const Vec<T, N>& v, float (&x)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = v[j];
}

// Handles a row per CTA. With kStaged the draft's columns are put together in shared memory.
template <class T, bool kStaged>
__global__ __launch_bounds__(kTeacherThreads,
                             2) void teacher_kernel(const __grid_constant__ DrafterTeacher a) {
  constexpr int N = 16 / sizeof(T), kStep = kTeacherThreads * N;
  extern __shared__ uint4 staged[];
  __shared__ ReduceStorage<Peak<T>> storage;
  const int64_t r = blockIdx.x;
  const int begin = int(threadIdx.x) * N, cols = int(a.logits.cols);
  const int* map = a.draft_id.as<const int>();
  const bool map_is_aligned = reinterpret_cast<uintptr_t>(map) % 16 == 0;
  const T* logits = a.logits.row<const T>(r);
  const int classes = map != nullptr ? int(a.columns.cols) : cols;
  T* columns = kStaged ? reinterpret_cast<T*>(staged) : a.columns.row<T>(r);
  Peak<T> all = Peak<T>::identity(), inside = all;
  float x[N];
  if (map != nullptr) {
    Vec<T, N> none;
#pragma unroll
    for (int j = 0; j < N; ++j) none.v[j] = narrow<T>(-INFINITY);
    for (int c = begin; c < classes; c += kStep) store(columns + c, none);
    __syncthreads();
#pragma unroll 2
    for (int c = begin; c < cols; c += kStep) {
      const Vec<T, N> v = vec_of<T, N>(logits, c, cols);
      const bool full = c + N <= cols;
      Vec<int, N> ids;
      if (full && map_is_aligned)
        ids = load<int, N>(map + c);
      else
#pragma unroll
        for (int j = 0; j < N; ++j) ids.v[j] = full || c + j < cols ? __ldg(map + c + j) : -1;
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (ids.v[j] >= 0) columns[ids.v[j]] = v.v[j];
      unpack(v, x);
      all.add(x, c);
    }
    __syncthreads();
  }
  for (int c = begin; c < classes; c += kStep) {
    const Vec<T, N> v = vec_of<T, N>(map != nullptr ? columns : logits, c, classes);
    if (kStaged) store(a.columns.row<T>(r) + c, v);
    unpack(v, x);
    inside.add(x, c);
  }
  all = all_reduce_row<0, false>(all, storage, 0);
  inside = all_reduce_row<0, false>(inside, storage, 1);
  if (threadIdx.x != 0) return;
  const float log_sum = ::logf(inside.sum.s);
  a.max.as<float>()[r] = inside.sum.m;
  a.log_sum.as<float>()[r] = log_sum;
  a.label.as<int64_t>()[r] = a.mask_outside && map != nullptr ? map[min(all.at, cols - 1)]
                             : inside.at < classes            ? inside.at
                                                              : -1;
  if (a.share.data != nullptr)
    a.share.as<float>()[r] = exp((inside.sum.m - all.sum.m) + (log_sum - ::logf(all.sum.s)));
}

// Computes a probability and its log2, from a logit, its row's maximum and the log of its row's sum.
template <class T>
struct Softmax {
  float m, low, part;
  __device__ Softmax(float max, float log_sum)
      : m(finite_max(max)), low(log_sum * kLog2e), part(sizeof(T) == 4 ? exp(-log_sum) : 1.0f) {}
  __device__ __forceinline__ float log2(float x) const { return fma(x - m, kLog2e, -low); }
  __device__ __forceinline__ float operator()(float x) const {
    return sizeof(T) == 4 ? exp_minus_max<float>(x, m) * part : exp2_approx(log2(x));
  }
};

template <class T>
struct DraftRow {
  using Element = T;
  using Payload = Peak<T>;
  using Scratch = NoScratch;
  static constexpr int kIn = 2;
  static constexpr bool kFill[kIn] = {true, true};
  static constexpr int N = AlignedRow<T>::N;
  RowsOf<T, kIn> rows;
  DrafterRows a;
  unsigned steps;

  // Returns the row of an input that row r reads.
  template <int K>
  __device__ __forceinline__ int64_t source(int64_t r) const {
    return K == 0 ? r : int64_t(unsigned(r) / steps);
  }

  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    const int64_t r = row.live ? row.index : 0, of = source<1>(r);
    const int at = int(a.label.as<const int64_t>()[of]);
    const bool counts = a.target.as<const int64_t>()[r] != a.ignore_index && !(a.mask_outside && at < 0);
    const float label_logit = at < 0 ? -INFINITY : widen(rows.in[0][r * rows.in_stride[0] + at]);
    Peak<T> own = Peak<T>::identity();
    row.for_each_vec([&](const float (&x)[2][N], int) { own.template add<false>(x[0], 0); });
    const OnlineSoftmax<T> all = row.all_reduce(own).sum;
    const float log_sum_s = ::logf(all.s), log_sum_t = a.log_sum.as<const float>()[of];
    const Softmax<T> draft(all.m, log_sum_s), teacher(a.max.as<const float>()[of], log_sum_t);
    const float own_logs = a.kind == DrafterKind::ce ? 0.0f : 1.0f;
    const float share = a.share.data != nullptr ? a.share.as<const float>()[of] : 1.0f;
    const float part = a.overlap_outside ? share : 1.0f, b = a.soft_outside ? share : 1.0f;
    SumArray<3> sums = {};
    row.for_each_vec([&](const float (&x)[2][N], int) {
      // With one chain of additions through all vectors, the compiler would compute them all first.
      float vec_terms[3] = {};
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float s = x[0][j], t = x[1][j];
        drafter_terms(draft(s), teacher(t), part, draft.log2(s), teacher.log2(t), own_logs, vec_terms);
      }
#pragma unroll
      for (int k = 0; k < 3; ++k) sums.s[k] += vec_terms[k];
    });
    sums = row.all_reduce(sums);
    sums.s[1] += 0.0f * log_sum_t;  // NaN if the teacher's row is
    const float lambda = exp(-a.eta * sums.s[1]);
    if (row.leads()) {
      const float hard_loss = (all.m - label_logit) + log_sum_s;
      a.loss.as<float>()[r] =
          counts ? drafter_row_loss(a.kind, sums.s, b, ::logf(b), lambda, hard_loss) : 0.0f;
      a.overlap.as<float>()[r] = counts ? sums.s[1] : 0.0f;
      a.counted.as<float>()[r] = counts ? 1.0f : 0.0f;
    }
    const float gain = a.scale.data != nullptr ? a.scale.as<const float>()[a.scale.size == 1 ? 0 : r] : 1.0f;
    const DrafterGains g = drafter_gains(a.kind, sums.s, b, lambda, gain);
    if (!counts) {
      row.write([](const float (&)[2][N], int, int) { return 0.0f; });
    } else if (a.kind == DrafterKind::hard) {
      row.write([&](const float (&x)[2][N], int j, int, int c) {
        return fma(draft(x[0][j]), g.slope_above, c == at ? -g.slope_label : 0.0f);
      });
    } else {
      row.write([&](const float (&x)[2][N], int j, int) {
        return drafter_gradient(draft(x[0][j]), teacher(x[1][j]), part, g.slope_above, g.slope_below,
                                g.slope_p);
      });
    }
  }
};

}  // namespace

void drafter_teacher(Context& ctx, const DrafterTeacher& a) {
  dispatch_float(kOp, "teacher", a.logits.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    const size_t shared = size_t(a.columns.stride) * sizeof(T);
    static OccupancyCache occupancy;
    const bool staged = a.draft_id && shared + 2048 <= size_t(device_facts().shared_per_block) &&
                        occupancy.max_active(kOp, teacher_kernel<T, true>, 1, kTeacherThreads, shared) > 0;
    launch(kOp, ctx, staged ? teacher_kernel<T, true> : teacher_kernel<T, false>,
           {.blocks = a.logits.rows, .threads = kTeacherThreads, .shared = staged ? shared : 0}, a);
  });
}

void drafter_rows(Context& ctx, const DrafterRows& a) {
  dispatch_float(kOp, "draft", a.draft.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    RowsOf<T, 2> rows = rows_of<T, 2>({a.draft, a.teacher}, a.gradient ? a.draft : Matrix{});
    run_row_op(kOp, ctx, DraftRow<T>{rows, a, unsigned(a.draft.rows / a.teacher.rows)});
  });
}

}  // namespace tigon::cuda
