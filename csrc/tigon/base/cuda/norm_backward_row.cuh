// Holds what the backward kernels of the norm family share, over a formula B (norm_math.inc). BackwardRow has
// the operations on a row's vectors and elements, BackwardPipeline its stages in shared memory, and
// ColumnWeights the weights of a thread's columns. norm_backward.cuh launches.
#pragma once

#include "tigon/base/cuda/cp_async_pipeline.cuh"
#include "tigon/base/cuda/norm_plan.h"
#include "tigon/base/cuda/norm_row.cuh"

namespace tigon::cuda {

template <class B, class W, class Y>
struct NormBackward {
  using X = typename B::Element;
  B f;
  const Y* dy;
  const X* in[B::kIn];
  X* out[B::kOut];
  int64_t dy_stride, in_stride[B::kIn], out_stride[B::kOut];
  // If null, all weights are 1 and there is no offset.
  const W* weight;
  // There is one number per row and group.
  const float *rstd, *mean;
  int64_t rows, cols;
  int groups = 1;
  // [parts, kSums, groups * cols]; null if not wanted.
  float* partials = nullptr;
  // hide_from_compiler() takes this.
  uint32_t opaque_zero = 0;
};

namespace norm_detail {

#include "tigon/base/norm_math.inc"

// Gradients wider than x take more registers.
template <class B, class Y>
constexpr int backward_blocks(const RowConfig& c) {
  return sizeof(Y) > sizeof(typename B::Element) && c.min_blocks_per_sm > 1 ? c.min_blocks_per_sm * 3 / 4
                                                                            : c.min_blocks_per_sm;
}

// Locates row `row` of a group in memory: its row, its first column, and its statistics.
template <class B, class W, class Y>
__device__ __forceinline__ int64_t row_of_group(const NormBackward<B, W, Y>& p, int64_t group, int64_t row) {
  if constexpr (kRowGroups<B>)
    return group * p.rows + row;
  else
    return row;
}
template <class B, class W, class Y>
__device__ __forceinline__ int64_t column_of_group(const NormBackward<B, W, Y>& p, int64_t group) {
  if constexpr (kRowGroups<B>)
    return 0;
  else
    return group * p.cols;
}
template <class B, class W, class Y>
__device__ __forceinline__ int64_t statistics_of_group(const NormBackward<B, W, Y>& p, int64_t group,
                                                       int64_t row) {
  if constexpr (kRowGroups<B>)
    return group * p.rows + row;
  else
    return row * p.groups + group;
}

// True if the formula makes the weights of a group of rows.
template <class B>
constexpr bool kMakesWeights = requires(const B& f, float (&w)[1]) { f.weights(0, int64_t(0), w); };
// True if the weight has no offset.
template <class B>
constexpr bool kPlainWeight = std::is_base_of_v<NoNormScalars, B>;

// Holds the statistics of a row.
struct Statistics {
  float rstd = 0.0f, mean = 0.0f;
};

// Holds the operations of both passes over a vectorized row, which the kernels have in common.
template <class B, class W, class Y, int N>
struct BackwardRow {
  using X = typename B::Element;
  using Inputs = Vec<X, N>[B::kIn];
  static constexpr int kMeans = B::kSubtractMean ? 2 : 1, kPair = 2;
  // A branch on whether h is rounded doubles the code of the first pass, so rare rows select each element.
  static constexpr bool kSelectsRounding = kRareTypes<X, W> && !kRowGroups<B>;
  const NormBackward<B, W, Y>& p;
  int group;
  // The group begins at this column of all columns.
  int64_t begin;
  float inv_cols;

  __device__ __forceinline__ BackwardRow(const NormBackward<B, W, Y>& p, int group)
      : p(p), group(group), begin(int64_t(group) * int(p.cols)), inv_cols(1.0f / float(int(p.cols))) {}
  // Returns the first vector of a row.
  template <class T>
  __device__ __forceinline__ T* vectors(T* data, int64_t stride, int64_t row) const {
    if constexpr (kRowGroups<B>)
      return data + row_of_group(p, group, row) * stride;
    else
      return data + row * stride + begin;
  }
  __device__ __forceinline__ const X* in(int k, int64_t row) const {
    return vectors(p.in[k], p.in_stride[k], row);
  }
  __device__ __forceinline__ const Y* dy(int64_t row) const { return vectors(p.dy, p.dy_stride, row); }
  __device__ __forceinline__ X* out(int k, int64_t row) const {
    return vectors(p.out[k], p.out_stride[k], row);
  }
  __device__ __forceinline__ bool has(int k) const { return k == 0 || p.in[k]; }
  __device__ __forceinline__ bool wants_rows() const {
    bool wants = false;
#pragma unroll
    for (int k = 0; k < B::kOut; ++k) wants = wants || p.out[k] != nullptr;
    return wants;
  }
  // Returns zeros at `end` and beyond.
  __device__ __forceinline__ Statistics statistics(int64_t row, int64_t end) const {
    Statistics s;
    s.rstd = row < end ? p.rstd[statistics_of_group(p, group, row)] : 0.0f;
    if constexpr (B::kSubtractMean) s.mean = row < end ? p.mean[statistics_of_group(p, group, row)] : 0.0f;
    return s;
  }
  __device__ __forceinline__ void load(bool in_bounds, int64_t row, int64_t end, int column, Inputs& x,
                                       Vec<Y, N>& y) const {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k)
      x[k] = load_predicated<X, N>(in_bounds && row < end && has(k), in(k, row) + column);
    y = load_predicated<Y, N>(in_bounds && row < end, dy(row) + column);
  }
  // Runs before a vector in registers is used: hide_from_compiler().
  __device__ __forceinline__ void hide(Inputs& x, Vec<Y, N>& y) const {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) x[k] = hide_from_compiler(x[k], p.opaque_zero);
    y = hide_from_compiler(y, p.opaque_zero);
  }

  __device__ __forceinline__ float normalized(const Statistics& of, const float (&x)[B::kIn]) const {
    float v = p.f.value(x);
    if constexpr (B::kSubtractMean) v -= of.mean;
    return v * of.rstd;
  }
  // The means use the unrounded h; the column sums use h as the forward rounded it.
  __device__ __forceinline__ void add_means(float h, float d, float w, float (&means)[kMeans]) const {
    means[0] = fma(d * w, h, means[0]);
    if constexpr (B::kSubtractMean) means[1] = fma(d, w, means[1]);
  }
  // Runs the first pass for vector i: adds to the means of the row and to its part of the column sums,
  // sums[k][i].
  template <int K>
  __device__ __forceinline__ void add(const Statistics& of, const Inputs& in, const Vec<Y, N>& dy,
                                      const float (&w)[N], int i, float (&means)[kMeans],
                                      float (&sums)[B::kSums][K][N]) const {
    auto add = [&](auto rounded) {
#pragma unroll
      for (int j = 0; j < N; j += kPair) {
        float h[kPair], d[kPair];
#pragma unroll
        for (int k = 0; k < kPair; ++k) {
          float x[B::kIn];
          element(in, j + k, x);
          h[k] = normalized(of, x);
          d[k] = p.f.upstream(dy[j + k], x);
          add_means(h[k], d[k], w[j + k], means);
        }
        if constexpr (kSelectsRounding) {
          float exact[kPair];
#pragma unroll
          for (int k = 0; k < kPair; ++k) exact[k] = h[k];
          round_all<X>(h);
#pragma unroll
          for (int k = 0; k < kPair; ++k) h[k] = p.f.round_h ? h[k] : exact[k];
        } else if constexpr (rounded) {
          round_all<X>(h);
        }
#pragma unroll
        for (int k = 0; k < kPair; ++k) {
          sums[0][i][j + k] = fma(d[k], h[k], sums[0][i][j + k]);
          if constexpr (B::kSums > 1) sums[1][i][j + k] += d[k];
        }
      }
    };
    if constexpr (kSelectsRounding)
      add(std::true_type{});
    else
      p.f.round_h ? add(std::true_type{}) : add(std::false_type{});
  }
  // Runs the first pass over a thread's vectors. fetch(i) makes in[i] and dy[i] those of the row.
  template <int K, class Weights, class Fetch>
  __device__ __forceinline__ void first_pass(const Statistics& of, Inputs (&in)[K], Vec<Y, N> (&dy)[K],
                                             const Weights& weights, Fetch&& fetch, float (&means)[kMeans],
                                             float (&sums)[B::kSums][K][N]) const {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      fetch(i);
      float w[N];
      weights.get(i, w);
      add(of, in[i], dy[i], w, i, means, sums);
    }
  }
  // Runs the second pass over the vectors that begin before column `end`. `means` are sums here.
  template <int K, class Weights, class Fetch, class Column>
  __device__ __forceinline__ void second_pass(const Statistics& of, int64_t row, Column&& column, int end,
                                              Inputs (&in)[K], Vec<Y, N> (&dy)[K], const Weights& weights,
                                              Fetch&& fetch, float (&means)[kMeans]) const {
#pragma unroll
    for (int k = 0; k < kMeans; ++k) means[k] *= inv_cols;
    // The barrier makes the compiler reload the weights instead of keeping them in registers.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < K; ++i) {
      if (column(i) >= end) continue;
      fetch(i);
      float w[N];
      weights.get(i, w);
      write(of, row, column(i), in[i], dy[i], w, means);
    }
  }
  // Computes the gradients of one element. g is formed exactly as in the means.
  __device__ __forceinline__ void results(const Statistics& of, const float (&x)[B::kIn], float dy, float w,
                                          const float (&means)[kMeans], float (&out)[B::kOut]) const {
    float h = normalized(of, x), g = __fmul_rn(p.f.upstream(dy, x), w);
    if constexpr (B::kSubtractMean) g -= means[1];
    p.f.results(norm_gradient(g, h, means[0], of.rstd), dy, h, w, x, out);
  }
  // Runs the second pass for a vector: writes its gradients.
  __device__ __forceinline__ void write(const Statistics& of, int64_t row, int column, const Inputs& in,
                                        const Vec<Y, N>& dy, const float (&w)[N],
                                        const float (&means)[kMeans]) const {
    float result[B::kOut][N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[B::kIn], of_element[B::kOut];
      element(in, j, x);
      results(of, x, dy[j], w[j], means, of_element);
#pragma unroll
      for (int k = 0; k < B::kOut; ++k) result[k][j] = of_element[k];
    }
#pragma unroll
    for (int k = 0; k < B::kOut; ++k) {
      if (B::kOut > 1 && p.out[k] == nullptr) continue;
      Vec<X, N> vec;
      vec.set(result[k]);
      if constexpr (sizeof(X) * N % 16 == 0)
        store_v4(out(k, row) + column, vec);
      else
        store(out(k, row) + column, vec);
    }
  }
};

// Holds the weights of a thread's columns in shared memory.
template <class B, class W, int N, RowConfig kConfig>
struct ColumnWeights {
  ThreadSlots<W, N> slots;
  float offset;

  __device__ __forceinline__ ColumnWeights(unsigned char* shared, float offset)
      : slots(shared, kConfig.threads_per_row ? kConfig.max_threads : int(blockDim.x)), offset(offset) {}
  __device__ __forceinline__ uint4* end() const { return slots.end(kConfig.vecs_per_thread); }
  __device__ __forceinline__ void get(int i, float (&w)[N]) const {
    const Vec<W, N> vec = slots.get(i);
#pragma unroll
    for (int j = 0; j < N; ++j) w[j] = kPlainWeight<B> || kMakesWeights<B> ? vec[j] : offset + vec[j];
  }
};

// Loads the weights of a thread's columns, which begin at column begin + column(i) of all columns, or
// computes them if the formula does so (norm_math.inc).
template <int N, RowConfig kConfig, class B, class W, class Y, class Column>
__device__ __forceinline__ void load_weights(const NormBackward<B, W, Y>& p,
                                             const ColumnWeights<B, W, N, kConfig>& weights, int group,
                                             int64_t begin, Column&& column) {
  const int cols = int(p.cols);
#pragma unroll
  for (int i = 0; i < kConfig.vecs_per_thread; ++i) {
    if constexpr (kMakesWeights<B>) {
      float w[N] = {};
      if (column(i) < cols) p.f.weights(group, column(i), w);
      Vec<W, N> vec;
      vec.set(w);
      weights.slots.set(i, vec);
    } else {
      weights.slots.set(i, p.weight && column(i) < cols ? cuda::load<W, N>(p.weight + begin + column(i))
                                                        : fill_vec<W, N>(1.0f));
    }
  }
}

// Holds the stages of the inputs and dy for the rows of a thread's range.
template <class B, class W, class Y, int N, RowConfig kConfig>
struct BackwardPipeline {
  using X = typename B::Element;
  using Row = BackwardRow<B, W, Y, N>;
  using In = CpAsyncPipeline<X, N, kConfig>;
  using Dy = CpAsyncPipeline<Y, N, kConfig>;
  Array<In, B::kIn> in;
  Dy dy;

  // `threads` counts those of a row and CTA, `vecs` the full vectors of a row, `words` the shared memory of
  // the CTA.
  __device__ __forceinline__ BackwardPipeline(const Row& row, int64_t first_row, int64_t step, int first_vec,
                                              int vec_stride, int vecs, int threads, int row_in_block,
                                              uint4* words)
      : BackwardPipeline(std::make_index_sequence<B::kIn>{}, row, first_row, step, first_vec, vec_stride,
                         vecs, threads, words + row_in_block * row_words(threads)) {}
  // Starts the copies of the next row, or of nothing if it is not valid.
  __device__ __forceinline__ void copy(int stage, bool valid) {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) in.data[k].copy(stage, valid);
    dy.copy(stage, valid);
    cp_async_commit_group();
  }
  __device__ __forceinline__ void vec(int stage, int i, typename Row::Inputs& x, Vec<Y, N>& y) const {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) x[k] = in.data[k].vec(stage, i);
    y = dy.vec(stage, i);
  }

 private:
  __device__ static constexpr int row_words(int threads) {
    return B::kIn * In::words(threads) + Dy::words(threads);
  }
  template <size_t... K>
  __device__ __forceinline__ BackwardPipeline(std::index_sequence<K...>, const Row& row, int64_t first_row,
                                              int64_t step, int first_vec, int vec_stride, int vecs,
                                              int threads, uint4* words)
      : in{{In(row.in(K, first_row), step * row.p.in_stride[K], first_vec, vec_stride, row.has(K) ? vecs : 0,
               words + int(K) * In::words(threads), kConfig.rows_per_block * row_words(threads))...}},
        dy(row.dy(first_row), step * row.p.dy_stride, first_vec, vec_stride, vecs,
           words + B::kIn * In::words(threads), kConfig.rows_per_block * row_words(threads)) {}
};

// Adds the column sums of the CTA's threads and writes them to the partials, if there are any.
template <RowConfig kConfig, class B, class W, class Y, int N, class Column>
__device__ __forceinline__ void reduce_column_sums(const NormBackward<B, W, Y>& p, const BlockCoord& coord,
                                                   float (&sums)[B::kSums][kConfig.vecs_per_thread][N],
                                                   Column&& column, unsigned char* memory) {
  if (p.partials == nullptr) return;
  const int cols = int(p.cols);
  const int64_t out_pitch = int64_t(p.groups) * cols;
  float* out =
      p.partials + coord.first / kConfig.rows_per_block * B::kSums * out_pitch + int64_t(coord.group) * cols;
  float* shared = reinterpret_cast<float*>(memory);
  constexpr int kParts = backward_parts(kConfig);
  auto store_sums = [&](float* to, int k) {
#pragma unroll
    for (int i = 0; i < kConfig.vecs_per_thread; ++i)
      if (column(i) < cols) store(to + column(i), *reinterpret_cast<Vec<float, N>*>(sums[k][i]));
  };
  if constexpr (kConfig.rows_per_block == 1) {
#pragma unroll
    for (int k = 0; k < B::kSums; ++k) store_sums(out + k * out_pitch, k);
  } else {
    // Shuffles first add the rows that share a warp.
    constexpr bool kRowsShareWarp = kConfig.threads_per_row < 32;
    if constexpr (kRowsShareWarp) {
#pragma unroll
      for (int k = 0; k < B::kSums; ++k)
#pragma unroll
        for (int i = 0; i < kConfig.vecs_per_thread; ++i)
#pragma unroll
          for (int j = 0; j < N; ++j)
#pragma unroll
            for (int m = kConfig.threads_per_row; m < 32; m <<= 1)
              sums[k][i][j] += __shfl_xor_sync(0xffffffffu, sums[k][i][j], m);
    }
    const int part = kRowsShareWarp ? threadIdx.x / 32 : threadIdx.x / kConfig.threads_per_row;
    __syncthreads();
    if (!kRowsShareWarp || threadIdx.x % 32 < kConfig.threads_per_row) {
#pragma unroll
      for (int k = 0; k < B::kSums; ++k) store_sums(shared + (k * kParts + part) * cols, k);
    }
    __syncthreads();
    for (int k = 0; k < B::kSums; ++k)
      for (int c = threadIdx.x; c < cols; c += kConfig.max_threads) {
        const float* mine = shared + k * kParts * cols + c;
        float total = mine[0];
        for (int g = 1; g < kParts; ++g) total += mine[g * cols];
        out[k * out_pitch + c] = total;
      }
  }
}

}  // namespace norm_detail
}  // namespace tigon::cuda
