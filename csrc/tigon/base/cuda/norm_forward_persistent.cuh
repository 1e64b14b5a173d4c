// Forward of the norm family for rows of any alignment: persistent CTAs whose next row is
// prefetched into registers. The row operations are in norm_row.cuh.
#pragma once

#include <algorithm>
#include <utility>

#include "tigon/base/cuda/norm_row.cuh"

namespace tigon::cuda {
namespace norm_detail {

// Vectors of a parameter in the vector numbering of the output: each spans two aligned words.
template <class X, int VecsPerThread>
class ShiftedVecs {
  static constexpr int N = 16 / int(sizeof(X));
  const X *first_, *end_;
  int pitch_, off_;
  uint4 words_[VecsPerThread][2];

 public:
  // `first`: this thread's first full vector; `pitch`: elements from one of its vectors to the next.
  __device__ __forceinline__ ShiftedVecs(const X* first, const X* end, int pitch) : end_(end), pitch_(pitch) {
    off_ = int(reinterpret_cast<uintptr_t>(first) % 16 / sizeof(X));
    first_ = first - off_;
  }
  __device__ __forceinline__ void load(int i, bool wanted) {
    const X* word = first_ + i * pitch_;
    words_[i][0] = ld_global_predicated(wanted, word);
    words_[i][1] = ld_global_predicated(wanted && off_ != 0 && word + 2 * N <= end_, word + N);
  }
  __device__ __forceinline__ Vec<X, N> vec(int i, bool wanted) const {
    uint32_t w[8];
    reinterpret_cast<uint4&>(w[0]) = words_[i][0], reinterpret_cast<uint4&>(w[4]) = words_[i][1];
    shift_words<X>(w, off_);
    Vec<X, N> r;
#pragma unroll
    for (int j = 0; j < 4; ++j) reinterpret_cast<uint32_t*>(&r)[j] = w[j];
    const X* word = first_ + i * pitch_;
    // The last word of the tensor is read by elements.
    if (wanted && off_ != 0 && word + 2 * N > end_) {
#pragma unroll
      for (int j = 0; j < N; ++j) r.v[j] = word[off_ + j];
    }
    return r;
  }
};

// One parameter of a column.
template <class F, class W, class Y>
__device__ __forceinline__ W param_of(const NormForward<F, W, Y>& p, int k, int64_t column) {
  if (p.param[k] == nullptr) return narrow<W>(p.default_value[k]);
  if constexpr (kPerChannel<F>)
    return p.param[k][column / p.cols_per_param];
  else
    return p.param[k][column];
}

// The column of this thread's edge element, or cols if it has none. `head` elements come before the
// full vectors, which hold `whole` elements.
template <int N, class RowReducer>
__device__ __forceinline__ int edge_column(const RowReducer& reducer, int head, int whole, int cols) {
  int column = cols;
  if (const int t = reducer.thread; reducer.rank == 0 && t < 2 * N)
    column = t < N ? (t < head ? t : cols) : min(cols, head + whole + t - N);
  return column;
}
// `col_offset`: the first column of the group.
template <class F, class W, class Y>
__device__ __forceinline__ void load_edge_params(const NormForward<F, W, Y>& p, int64_t col_offset,
                                                 EdgeElement<F, W, Y>& edge) {
#pragma unroll
  for (int k = 0; k < F::kParams; ++k) edge.param[k].v[0] = param_of(p, k, col_offset + edge.column);
}

// Calls assign(i, k, vec) for this thread's vectors i < VecsPerThread of K parameters of `size`
// elements, which start anywhere: the first at element `begin`, the next ones `pitch` elements
// further. A null parameter becomes default_value[k]. Several loads are in flight at a time.
template <int VecsPerThread, bool Unrolled = false, class W, int K, class InBounds, class Assign>
__device__ __forceinline__ void load_shifted_vecs(const W* const (&vectors)[K],
                                                  const float (&default_value)[K], int64_t begin,
                                                  int64_t size, int pitch, InBounds&& in_bounds,
                                                  Assign&& assign) {
  constexpr int N = 16 / int(sizeof(W)), kBatch = std::min(VecsPerThread, 4 / K);
  static_assert(VecsPerThread % kBatch == 0 && K <= 4);
  using Words = ShiftedVecs<W, kBatch>;
#pragma unroll(Unrolled ? VecsPerThread : 1)
  for (int first = 0; first < VecsPerThread; first += kBatch) {
    auto words = [&]<size_t... I>(std::index_sequence<I...>) {
      return Array<Words, K>{{Words(vectors[I] + begin + first * pitch, vectors[I] + size, pitch)...}};
    }(std::make_index_sequence<K>{});
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < kBatch; ++i) words.data[k].load(i, vectors[k] != nullptr && in_bounds(first + i));
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        assign(first + i, k,
               vectors[k] && in_bounds(first + i) ? words.data[k].vec(i, true)
                                                  : fill_vec<W, N>(default_value[k]));
  }
}

// The same for the parameters of the columns from `begin` on.
template <int VecsPerThread, bool Unrolled, class F, class W, class Y, class InBounds, class Assign>
__device__ __forceinline__ void load_columns(const NormForward<F, W, Y>& p, int64_t begin, int pitch,
                                             InBounds&& in_bounds, Assign&& assign) {
  using X = typename F::Element;
  constexpr int N = 16 / int(sizeof(X));
  if constexpr (sizeof(W) == sizeof(X) && !kPerChannel<F>) {
    load_shifted_vecs<VecsPerThread, Unrolled>(p.param, p.default_value, begin, p.groups * p.cols, pitch,
                                               in_bounds, assign);
  } else {
#pragma unroll(Unrolled ? VecsPerThread : 1)
    for (int i = 0; i < VecsPerThread; ++i) {
      if (!in_bounds(i)) continue;
#pragma unroll
      for (int k = 0; k < F::kParams; ++k) {
        Vec<W, N> w;
#pragma unroll
        for (int j = 0; j < N; ++j) w.v[j] = param_of(p, k, begin + i * pitch + j);
        assign(i, k, w);
      }
    }
  }
}

// Persistent CTAs for rows that all begin at one offset: full vectors of the output, and the edge elements, at
// most one per thread. All rows of a worker have the same output offset, so that its shifted
// parameters stay in shared memory. Loads of the next row are issued as each vector of this row is
// stored.
template <class F, class W, class Y, class Config>
__global__
__launch_bounds__(Config::value.max_threads, Config::value.min_blocks_per_sm) void forward_persistent_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  constexpr RowConfig kConfig = Config::value;
  using X = typename F::Element;
  constexpr int N = 16 / int(sizeof(X)), kVecsPerThread = kConfig.vecs_per_thread;
  // 32-bit columns: addresses take half the registers.
  using VecRow = ForwardRow<F, W, Y, N, RowAlignment::vectorized, unsigned>;
  using ElementRow = ForwardRow<F, W, Y, 1, RowAlignment::vectorized, int>;
  using Sums = SumArray<VecRow::kStatistics>;
  __shared__ ReduceStorage<Sums> storage;
  extern __shared__ __align__(16) unsigned char shared[];
  RowReducer<kConfig, false, false, Sums> reducer(storage);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const BlockCoord coord(p.groups, kConfig.rows_per_block);
  const int row_in_block = kConfig.rows_per_block == 1 ? 0 : threadIdx.x / kConfig.threads_per_row;
  const RowRange range = row_range_of(p.row_schedule, p.rows, coord.first + row_in_block);
  const int cols = int(p.cols), pitch = reducer.threads * N;
  auto column = [&](int i) { return reducer.vec_index(i) * N; };
  auto param_slot = [&](int i, int k) {
    return reinterpret_cast<Vec<W, N>*>(shared) + (i * F::kParams + k) * blockDim.x + threadIdx.x;
  };
  ElementRow edge_row(p, coord, range.first);
  const int head = elements_to_alignment<N>(edge_row.written(), cols);
  const int whole = (cols - head) / N * N;
  VecRow row(p, coord, range.first, head, whole);
  int left = range.count();
  edge_row.live = row.live = left > 0;

  auto in_bounds = [&](int i) { return column(i) < whole; };
  const int64_t begin = edge_row.col_offset + head + column(0);
  load_columns<kVecsPerThread, false>(p, begin, pitch, in_bounds,
                                      [&](int i, int k, const Vec<W, N>& w) { *param_slot(i, k) = w; });
  const X* next[F::kIn];
#pragma unroll
  for (int k = 0; k < F::kIn; ++k) next[k] = row.in(k) + column(0);
  uint4 words[F::kIn][kVecsPerThread];
  auto load = [&](int i, bool live) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k)
      words[k][i] = ld_global_predicated(live && in_bounds(i), next[k] + i * pitch);
  };
  EdgeElement<F, W, Y> edge;
  edge.column = edge_column<N>(reducer, head, whole, cols);
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) load(i, row.live);
  edge_row.load(edge.column, edge.next);
  if (edge.column < cols) load_edge_params(p, edge_row.col_offset, edge);
#pragma unroll 1
  for (; left > 0; --left) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) next[k] += range.step * p.in_stride[k];
    Vec<X, N> in[kVecsPerThread][F::kIn];
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i)
#pragma unroll
      for (int k = 0; k < F::kIn; ++k) in[i][k] = reinterpret_cast<const Vec<X, N>&>(words[k][i]);
    const auto current = row;
    const auto current_edge = edge_row;
    edge.row = &current_edge;
    edge.take_next();
    float center[kVecsPerThread], mean, rstd;
    current.statistics(in, column, [&](auto& sums) { reducer.all_reduce(sums); }, edge, center, mean, rstd);
    row.advance(range.step, left > 1), edge_row.advance(range.step, left > 1);
    edge_row.load(edge.column, edge.next);
    if (reducer.thread == 0) current.save_statistics(mean, rstd);
    if (edge.valid()) current_edge.write(edge.column, edge.in, edge.param, mean, rstd);
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (in_bounds(i)) {
        Vec<W, N> w[F::kParams];
#pragma unroll
        for (int k = 0; k < F::kParams; ++k) w[k] = *param_slot(i, k);
        if constexpr (!F::kSubtractMean || kVecsPerThread > 4) current.hide_inputs(in[i]);
        current.write(column(i), in[i], w, kVecsPerThread > 4 ? mean : center[i], rstd);
      }
      load(i, row.live);
    }
  }
}

}  // namespace norm_detail
}  // namespace tigon::cuda
