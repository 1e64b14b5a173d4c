// The forward of the norm family normalizes a row by its own statistics. The kernels are in norm_forward.cuh.
// The op gives a formula F (norm_math.inc). The variance is computed from differences to the mean in a second
// pass over registers, not as a difference of two large sums. A row may consist of `groups` groups of `cols`
// columns that are normalized separately; parameters cover all columns. Every row is read once and written
// once; kernels that loop over longer rows read them again, from L2.
#pragma once

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/e4m3.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/norm_plan.h"
#include "tigon/base/cuda/row_reduce.cuh"
#include "tigon/base/norm_scalars.h"

namespace tigon::cuda {

template <>
inline constexpr bool kIsHalf<__half> = true;

template <class F, class W, class Y>
struct NormForward {
  using X = typename F::Element;
  F f;
  const X* in[F::kIn];
  int64_t in_stride[F::kIn];
  // If null, all columns have default_value[k].
  const W* param[F::kParams];
  float default_value[F::kParams];
  X* residual_out;
  Y* y;
  int64_t residual_out_stride, y_stride;
  // Hold one number per row and group; mean only if F::kSubtractMean. Null if not wanted.
  float *rstd, *mean;
  // Receive the rows of y in float8 too, where kWritesBytes; without q they are not wanted.
  ByteRows bytes = {};
  int64_t rows, cols;
  int groups = 1;
  float eps;
  // The number of groups of adjacent rows that share their parameters, if kRowParams. norm_forward sets it.
  int row_groups = 1;
  // The number of columns that share a parameter, if F::PerChannel.
  int64_t cols_per_param = 1;
  // norm_forward sets this to 1 / cols.
  float inv_cols = 0.0f;
  // hide_from_compiler() takes this.
  uint32_t opaque_zero = 0;
};

namespace norm_detail {

// Tells of a formula whether rows of bf16 can be written in float8 too, by the kernel that has a CTA per row.
template <class F, class W, class Y>
constexpr bool kWritesBytes =
    requires { typename F::WritesBytes; } && std::is_same_v<typename F::Element, __nv_bfloat16> &&
    std::is_same_v<W, __nv_bfloat16> && std::is_same_v<Y, __nv_bfloat16>;

// The looped kernels use these. Two CTAs per SM keep all CTAs of a few long rows resident.
constexpr int kLoopThreads = 512, kLoopBlocks = 2;

// Holds the group and the first row of a CTA.
struct BlockCoord {
  int group;
  int64_t first;
  __device__ BlockCoord(int groups, int rows, unsigned block = blockIdx.x) {
    group = groups == 1 ? 0 : int(block % unsigned(groups));
    first = int64_t(groups == 1 ? block : block / unsigned(groups)) * rows;
  }
};

template <class W, int N>
__device__ __forceinline__ Vec<W, N> fill_vec(float x) {
  float all[N];
#pragma unroll
  for (int j = 0; j < N; ++j) all[j] = x;
  Vec<W, N> w;
  w.set(all);
  return w;
}

// Keeps vectors of each thread in shared memory. Each thread reads only those it wrote itself, so no barrier
// is needed. Adjacent threads access adjacent words.
template <class T, int N>
struct ThreadSlots {
  static constexpr int kWords = int(sizeof(T)) * N / 16;
  // Holds this thread's first word, and the number of threads.
  uint4* first;
  int pitch;

  __device__ __forceinline__ ThreadSlots(void* shared, int threads)
      : first(static_cast<uint4*>(shared) + threadIdx.x), pitch(threads) {}
  __device__ __forceinline__ uint4* word(int slot, int j) const {
    return first + (slot * kWords + j) * pitch;
  }
  __device__ __forceinline__ void set(int slot, const Vec<T, N>& vec) const {
#pragma unroll
    for (int j = 0; j < kWords; ++j) *word(slot, j) = reinterpret_cast<const uint4*>(&vec)[j];
  }
  __device__ __forceinline__ Vec<T, N> get(int slot) const {
    Vec<T, N> vec;
#pragma unroll
    for (int j = 0; j < kWords; ++j) reinterpret_cast<uint4*>(&vec)[j] = *word(slot, j);
    return vec;
  }
  // Returns the first word after `slots` slots of all threads.
  __device__ __forceinline__ uint4* end(int slots) const { return word(slots, 0) - threadIdx.x; }
};

// Returns element j of several vectors.
template <class T, int N, int K>
__device__ __forceinline__ void element(const Vec<T, N> (&vecs)[K], int j, float (&x)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) x[k] = vecs[k][j];
}

template <class F, int N>
__device__ __forceinline__ float value(const F& f, const Vec<typename F::Element, N> (&in)[F::kIn], int j) {
  float x[F::kIn];
  element(in, j, x);
  return f.value(x);
}

// Accesses N elements of a row of `cols` columns from column c: adjacent ones in an aligned vector or, for
// rows of any length and alignment, elements that are kStep columns apart.
template <int N, int kStep, class Column>
struct RowView {
  static constexpr bool kVectorized = kStep == 1;
  Column cols;

  __device__ __forceinline__ bool has(Column c) const { return c < cols; }
  // True if element j is in a row that has(c).
  __device__ __forceinline__ bool has(Column c, int j) const { return kVectorized || c + j * kStep < cols; }
  template <class T>
  __device__ __forceinline__ Vec<T, N> load(bool pred, const T* row, Column c) const {
    if constexpr (kVectorized) return load_predicated<T, N>(pred && has(c), row + c);
    Vec<T, N> vec{};
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (pred && has(c, j)) vec.v[j] = row[c + j * kStep];
    return vec;
  }
  // Does load() for a parameter by column. The result is undefined past a vectorized row.
  template <class T>
  __device__ __forceinline__ Vec<T, N> load_vector(const T* vector, Column c) const {
    if constexpr (kVectorized && sizeof(T) * N % 16 == 0)
      return load_predicated_uninit<T, N>(vector != nullptr && has(c), vector + c);
    return load(vector != nullptr, vector, c);
  }
  template <class T>
  __device__ __forceinline__ void store(T* row, Column c, const Vec<T, N>& vec) const {
    if constexpr (!kVectorized) {
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (has(c, j)) row[c + j * kStep] = vec.v[j];
    } else if constexpr (sizeof(T) * N % 16 != 0) {
      cuda::store(row + c, vec);
    } else {
      store_v4(row + c, vec);
    }
  }
  template <class T>
  __device__ __forceinline__ void store_if_valid(T* row, Column c, const Vec<T, N>& vec) const {
    if constexpr (kVectorized && sizeof(T) * N % 16 == 0)
      store_predicated(has(c), row + c, vec);
    else if (has(c))
      store(row, c, vec);
  }
};

// Describes one row, or one group of it, and the operations on its vectors. `c` counts columns of the group.
template <class F, class W, class Y, int N, int kStep, class Column>
struct ForwardRow {
  using X = typename F::Element;
  using Inputs = Vec<X, N>[F::kIn];
  using Params = Vec<W, N>[F::kParams];
  // True if rounding of the mean is visible in X and is corrected; bf16 has too few digits for it.
  static constexpr bool kCorrectsMean = !std::is_same_v<X, __nv_bfloat16>;
  static constexpr int kStatistics = F::kSubtractMean && kCorrectsMean ? 2 : 1;
  const NormForward<F, W, Y>& p;
  int64_t row, col_offset, stat_index;
  bool live;
  Y* y;
  RowView<N, kStep, Column> view;

  __device__ __forceinline__ ForwardRow(const NormForward<F, W, Y>& p, const BlockCoord& coord, int64_t row)
      : p(p),
        row(row),
        col_offset(int64_t(coord.group) * p.cols),
        stat_index(row * p.groups + coord.group),
        live(row < p.rows),
        y(p.y + row * p.y_stride + col_offset),
        view{Column(p.cols)} {}
  // Moves on to the row that is `step` rows further, if there is one.
  __device__ __forceinline__ void advance(int64_t step, bool is_live) {
    row += step;
    stat_index += step * p.groups;
    y += step * p.y_stride;
    live = is_live;
  }
  __device__ __forceinline__ X* residual_out() const {
    return p.residual_out + row * p.residual_out_stride + col_offset;
  }
  __device__ __forceinline__ const X* in(int k) const { return p.in[k] + row * p.in_stride[k] + col_offset; }
  // Returns where a parameter begins for this row. Rows past the end take row 0's.
  __device__ __forceinline__ int64_t param_offset(int k) const {
    if constexpr (kRowParams<F>)
      return p.f.param_offset(k, live ? row : 0);
    else
      return col_offset;
  }

  // An output may overwrite an input in place: an element is read only by the thread that writes it.
  __device__ __forceinline__ void load(Column c, Inputs& vecs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) vecs[k] = view.load(live, in(k), c);
  }
  __device__ __forceinline__ void load_params(Column c, Params& vecs) const {
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) {
      const W* param = p.param[k];
      if constexpr (!kPerChannel<F>) {
        vecs[k] = view.load_vector(param ? param + param_offset(k) : nullptr, c);
      } else if constexpr (!view.kVectorized) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (param && view.has(c, j)) vecs[k].v[j] = param[(col_offset + c + j * kStep) / p.cols_per_param];
      } else {
        if (param && view.has(c)) vecs[k] = fill_vec<W, N>(widen(param[(col_offset + c) / p.cols_per_param]));
      }
    }
  }
  __device__ __forceinline__ void finish_params(Params& vecs) const {
    constexpr int kWords = N * int(sizeof(W)) / 4;
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) {
      // The selection is by words: one between elements would unpack them.
      const Vec<W, N> default_value = fill_vec<W, N>(p.default_value[k]);
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        uint32_t& word = reinterpret_cast<uint32_t*>(&vecs[k])[j];
        word = p.param[k] ? word : reinterpret_cast<const uint32_t*>(&default_value)[j];
      }
    }
  }
  // Replaces in[0] by the merged row.
  __device__ __forceinline__ void merge(Inputs& vecs) const {
    float merged[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[F::kIn];
      element(vecs, j, x);
      merged[j] = p.f.merge(x);
    }
    vecs[0].set(merged);
  }
  __device__ __forceinline__ void write_residual(Column c, Inputs& vecs) const {
    if constexpr (F::kWritesResidual) {
      if (!live || !view.has(c)) return;
      merge(vecs);
      view.store(residual_out(), c, vecs[0]);
    }
  }
  // params are those of the column, or what they fold to. Returns what is written.
  template <class P, int K>
  __device__ __forceinline__ Vec<Y, N> write(Column c, const Inputs& vecs, const Vec<P, N> (&params)[K],
                                             float mean, float rstd) const {
    float h[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float v = value<F, N>(p.f, vecs, j);
      h[j] = (F::kSubtractMean ? v - mean : v) * rstd;
    }
    if (p.f.round_h) round_all<X>(h);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[F::kIn], w[K];
      element(vecs, j, x);
      element(params, j, w);
      h[j] = p.f.result(h[j], w, x);
    }
    Vec<Y, N> out;
    out.set(h);
    view.store_if_valid(y, c, out);
    return out;
  }

  // Returns sum / cols with one correction step, which is exact if the quotient is an fp32 number.
  __device__ __forceinline__ float mean_of(float sum) const {
    const float mean = sum * p.inv_cols;
    return fma(fma(-mean, float(p.cols), sum), p.inv_cols, mean);
  }
  // Returns the sum of one vector. Vectors have dependency chains of their own, for instruction-level
  // parallelism.
  __device__ __forceinline__ float sum_of(const Inputs& vecs) const {
    float s = value<F, N>(p.f, vecs, 0);
#pragma unroll
    for (int j = 1; j < N; ++j) s += value<F, N>(p.f, vecs, j);
    return s;
  }
  // Adds the squares about the mean and, with kCorrectsMean, the deviations: the sum of a long row far from
  // zero is some ulp off, and this is the error of its mean.
  template <int K>
  __device__ __forceinline__ void statistics_of(Column c, const Inputs& vecs, float mean,
                                                float (&sums)[K]) const {
    float off = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float v = value<F, N>(p.f, vecs, j);
      if constexpr (F::kSubtractMean) {
        v = view.has(c, j) ? v - mean : 0.0f;
        if constexpr (kCorrectsMean) off += v;
      }
      squares = fma(v, v, squares);
    }
    sums[0] = squares;
    if constexpr (F::kSubtractMean && kCorrectsMean) sums[1] = off;
  }
  template <int K>
  __device__ __forceinline__ void add_to_statistics(Column c, const Inputs& vecs, float mean,
                                                    float (&sums)[K]) const {
    float of_vec[K];
    statistics_of(c, vecs, mean, of_vec);
#pragma unroll
    for (int k = 0; k < K; ++k) sums[k] += of_vec[k];
  }
  template <int K>
  __device__ __forceinline__ float finish_statistics(const float (&sums)[K], float& mean) const {
    float variance = sums[0] * p.inv_cols;
    if constexpr (F::kSubtractMean && kCorrectsMean) {
      float off = sums[1] * p.inv_cols;
      mean += off;
      variance = fma(-off, off, variance);
      if (variance < 0.0f) variance = 0.0f;
    }
    // 16-bit types take an approximate root: exact division and root take some 60 instructions, which are
    // noticeable in short rows.
    return sizeof(X) == 2 ? rsqrtf(variance + p.eps) : 1.0f / sqrtf(variance + p.eps);
  }
  __device__ __forceinline__ void hide_inputs(Inputs& vecs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) vecs[k] = hide_from_compiler(vecs[k], p.opaque_zero);
  }
  // Computes the statistics of a row that its threads hold in registers, and writes the residual.
  // all_reduce(sums) combines the threads of the row. center[i] is subtracted from vector i: it is the mean,
  // or 0 if the vector is padding. Its origin is hidden, or the compiler would compute the differences a
  // second time in write().
  template <int VecsPerThread, class ColumnOf, class Merge>
  __device__ __forceinline__ void statistics(Inputs (&in)[VecsPerThread], ColumnOf&& column,
                                             Merge&& all_reduce, float (&center)[VecsPerThread], float& mean,
                                             float& rstd) const {
#pragma unroll
    for (int i = 0; i < VecsPerThread; ++i) write_residual(column(i), in[i]);
    float sums[kStatistics];
    mean = 0.0f;
    if constexpr (F::kSubtractMean) {
      float of[VecsPerThread];
#pragma unroll
      for (int i = 0; i < VecsPerThread; ++i) of[i] = sum_of(in[i]);
      float total[1] = {reduce_registers<Sum>(of)};
      all_reduce(total);
      mean = mean_of(total[0]);
    }
    float of[kStatistics][VecsPerThread];
#pragma unroll
    for (int i = 0; i < VecsPerThread; ++i) {
      if (F::kSubtractMean && VecsPerThread > 4) hide_inputs(in[i]);
      center[i] = 0.0f;
      if constexpr (F::kSubtractMean) {
        center[i] = view.has(column(i)) ? mean : 0.0f;
        keep_in_register(center[i]);
      }
      float of_vec[kStatistics];
      statistics_of(column(i), in[i], center[i], of_vec);
#pragma unroll
      for (int k = 0; k < kStatistics; ++k) of[k][i] = of_vec[k];
    }
#pragma unroll
    for (int k = 0; k < kStatistics; ++k) sums[k] = reduce_registers<Sum>(of[k]);
    all_reduce(sums);
    rstd = finish_statistics(sums, mean);
    if constexpr (F::kSubtractMean && kCorrectsMean) {
#pragma unroll
      for (int i = 0; i < VecsPerThread; ++i) center[i] = mean;
    }
  }
  __device__ __forceinline__ void save_statistics(float mean, float rstd) const {
    if (p.rstd == nullptr) return;
    p.rstd[stat_index] = rstd;
    if constexpr (F::kSubtractMean) p.mean[stat_index] = mean;
  }
};

}  // namespace norm_detail
}  // namespace tigon::cuda
