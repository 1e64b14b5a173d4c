// CUDA backend of drafter_loss.
//
// Bytes per row (b = element size): teacher b V_t read, 4 V_t / 2 of the map out of L2, b V written; draft rows b V read and written
// each, and b V read of the teacher's, by neighbours that find it in L2.
#include "tigon/base/cuda/row_kernel.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/drafter_loss/drafter_loss.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/drafter_loss/drafter_loss_math.inc"

constexpr const char* kOp = "drafter_loss";
constexpr int kTeacherThreads = 512, kTeacherRows = 2;

// Statistics of the classes of the softmax, and the argmax.
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
  // The elements of a vector that `of` keeps.
  template <int N>
  __device__ __forceinline__ void add(const float (&x)[N], float most) {
    if (most > sum.m) {
      if (sum.s != 0.0f) sum.s *= exp_minus_max<T>(sum.m, most);
      sum.m = most;
    }
    const float from = finite_max(sum.m);
    float part = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) part += exp_minus_max<T>(x[j], from);
    sum.s += part;
  }
};

template <class T>
__device__ __forceinline__ T* begin_of(const Vector& v) {
  return static_cast<T*>(v.data);
}
template <class T>
__device__ __forceinline__ T* row_of(const Matrix& m, int64_t r) {
  return static_cast<T*>(m.data) + r * m.stride;
}

// kTeacherRows rows a CTA, which share what is read of the map.
template <class T>
__global__ __launch_bounds__(kTeacherThreads,
                             2) void teacher_kernel(const __grid_constant__ DrafterTeacher a) {
  constexpr int N = 16 / sizeof(T);
  __shared__ ReduceStorage<Peak<T>> storage;
  const int64_t begin = int64_t(blockIdx.x) * kTeacherRows;
  const int rows = int(min(int64_t(kTeacherRows), a.logits.rows - begin)), cols = int(a.logits.cols);
  const int* map = begin_of<const int>(a.draft_id);
  const bool wants_share = a.share.data != nullptr;
  if (a.first && map != nullptr) {
    for (int k = 0; k < rows; ++k)
      for (int c = int(threadIdx.x); c < a.columns.cols; c += kTeacherThreads)
        row_of<T>(a.columns, begin + k)[c] = narrow<T>(-INFINITY);
    __syncthreads();
  }
  Peak<T> peak[kTeacherRows], all[kTeacherRows];
#pragma unroll
  for (int k = 0; k < kTeacherRows; ++k) peak[k] = all[k] = Peak<T>::identity();
#pragma unroll 2
  for (int c = int(threadIdx.x) * N; c < cols; c += kTeacherThreads * N) {
    int id[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      id[j] = c + j;
      if (map != nullptr) id[j] = c + j < cols ? __ldg(map + c + j) : -1;
    }
#pragma unroll
    for (int k = 0; k < kTeacherRows; ++k) {
      if (k >= rows) break;
      const Vec<T, N> raw = load_stream<T, N>(row_of<const T>(a.logits, begin + k) + c);
      float x[N], most = -INFINITY, most_of_all = -INFINITY;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const bool inside = id[j] >= 0, here = c + j < cols;
        x[j] = here ? raw[j] : -INFINITY;
        most_of_all = fmaxf(most_of_all, x[j]);
        if (here && (inside || a.mask_outside) && (x[j] > peak[k].top || peak[k].at == INT_MAX))
          peak[k].top = x[j], peak[k].at = c + j;
        if (inside && here && map != nullptr) row_of<T>(a.columns, begin + k)[id[j]] = raw.v[j];
        if (inside) most = fmaxf(most, x[j]);
      }
      if (wants_share) all[k].add(x, most_of_all);
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = id[j] >= 0 ? x[j] : -INFINITY;
      peak[k].add(x, most);
    }
  }
#pragma unroll
  for (int k = 0; k < kTeacherRows; ++k) {
    const Peak<T> of = all_reduce_row<0, false>(peak[k], storage, 2 * k);
    const OnlineSoftmax<T> whole = all_reduce_row<0, false>(all[k], storage, 2 * k + 1).sum;
    if (k >= rows || threadIdx.x != 0) continue;
    const float log_sum = ::logf(of.sum.s);
    begin_of<float>(a.max)[begin + k] = of.sum.m;
    begin_of<float>(a.log_sum)[begin + k] = log_sum;
    if (wants_share)
      begin_of<float>(a.share)[begin + k] = exp((of.sum.m - whole.m) + (log_sum - ::logf(whole.s)));
    begin_of<int64_t>(a.label)[begin + k] = of.at == INT_MAX ? -1 : map != nullptr ? map[of.at] : of.at;
  }
}

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

  // The row of an input that row r reads.
  template <int K>
  __device__ __forceinline__ int64_t source(int64_t r) const {
    return K == 0 ? r : int64_t(unsigned(r) / steps);
  }

  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    const int64_t r = row.live ? row.index : 0, of = source<1>(r);
    const int at = int(begin_of<const int64_t>(a.label)[of]);
    const bool counts = begin_of<const int64_t>(a.target)[r] != a.ignore_index && !(a.mask_outside && at < 0);
    const float label_logit = at < 0 ? -INFINITY : widen(rows.in[0][r * rows.in_stride[0] + at]);
    Peak<T> own = Peak<T>::identity();
    row.for_each_vec([&](const float (&x)[2][N]) {
      float most = x[0][0];
#pragma unroll
      for (int j = 1; j < N; ++j) most = fmaxf(most, x[0][j]);
      own.add(x[0], most);
    });
    const OnlineSoftmax<T> all = row.all_reduce(own).sum;
    const float m_s = finite_max(all.m), m_t = finite_max(begin_of<const float>(a.max)[of]);
    const float log_sum_s = ::logf(all.s), log_sum_t = begin_of<const float>(a.log_sum)[of];
    const float part_s = 1.0f / all.s, part_t = exp(-log_sum_t);
    const float apart = (log_sum_t - log_sum_s) * kLog2e, low = log_sum_t * kLog2e;
    const float cross = a.kind == DrafterKind::ce ? 1.0f : 0.0f;
    const float share = a.share.data != nullptr ? begin_of<const float>(a.share)[of] : 1.0f;
    const float part = a.overlap_outside ? share : 1.0f, b = a.soft_outside ? share : 1.0f;
    SumArray<3> sums = {};
    row.for_each_vec([&](const float (&x)[2][N]) {
      // One chain of additions through all vectors makes the compiler compute them all first.
      float of_vec[3] = {};
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float u = x[0][j] - m_s, v = x[1][j] - m_t;
        const float q = exp_minus_max<T>(u, 0.0f) * part_s, p = exp_minus_max<T>(v, 0.0f) * part_t;
        drafter_terms(q, p, part, fma(u - v, kLog2e, apart), fma(v, kLog2e, -low), cross, of_vec);
      }
#pragma unroll
      for (int k = 0; k < 3; ++k) sums.s[k] += of_vec[k];
    });
    sums = row.all_reduce(sums);
    const float lambda = exp(-a.eta * sums.s[1]);
    if (row.leads()) {
      const float hard_loss = (m_s - label_logit) + log_sum_s;
      begin_of<float>(a.loss)[r] =
          counts ? drafter_row_loss(a.kind, sums.s, b, ::logf(b), lambda, hard_loss) : 0.0f;
      begin_of<float>(a.overlap)[r] = counts ? sums.s[1] : 0.0f;
      begin_of<float>(a.counted)[r] = counts ? 1.0f : 0.0f;
    }
    const float gain =
        a.scale.data != nullptr ? begin_of<const float>(a.scale)[a.scale.size == 1 ? 0 : r] : 1.0f;
    const DrafterGains g = drafter_gains(a.kind, sums.s, b, lambda, gain);
    row.write([&](const float (&x)[2][N], int j, int c) {
      const float q = exp_minus_max<T>(x[0][j] - m_s, 0.0f) * part_s;
      const float p = exp_minus_max<T>(x[1][j] - m_t, 0.0f) * part_t;
      const float slope = drafter_gradient(q, p, part, g.of_q, g.of_taken, g.of_p);
      return counts ? slope - (c == at ? g.of_label : 0.0f) : 0.0f;
    });
  }
};

}  // namespace

void drafter_teacher(Context& ctx, const DrafterTeacher& a) {
  dispatch_float(kOp, "teacher", a.logits.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    launch(kOp, ctx, teacher_kernel<T>,
           {.blocks = ceil_div(a.logits.rows, kTeacherRows), .threads = kTeacherThreads}, a);
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
