// Forward of the norm family for vectorized rows whose parameters are shared by a group of adjacent rows (kRowParams): persistent
// CTAs of one group each, which keep its parameters in shared memory. The row operations are in norm_row.cuh.
#pragma once

#include "tigon/base/cuda/norm_row.cuh"
#include "tigon/base/cuda/ptx.cuh"

namespace tigon::cuda {
namespace norm_detail {

// Those of a thread's columns, without parameters that are absent.
template <class F, class W, class Y, int N>
struct SharedParams {
  const NormForward<F, W, Y>& p;
  ThreadSlots<W, N> slots;
  int present = 0;

  __device__ __forceinline__ SharedParams(const NormForward<F, W, Y>& p, void* shared)
      : p(p), slots(shared, int(blockDim.x)) {
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) present += int(p.param[k] != nullptr);
  }
  // Starts the copies of vector i, at column c of the parameters of `group`.
  __device__ __forceinline__ void copy(int i, int64_t group, int c) const {
    int slot = i * present;
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) {
      const W* from = p.param[k] + group * p.f.param_stride[k] + c;
#pragma unroll
      for (int j = 0; j < slots.kWords; ++j)
        cp_async_predicated(p.param[k] && c < p.cols, uint32_t(__cvta_generic_to_shared(slots.word(slot, j))),
                            from + j * (16 / int(sizeof(W))));
      slot += int(p.param[k] != nullptr);
    }
  }
  __device__ __forceinline__ void get(int i, Vec<W, N> (&w)[F::kParams]) const {
    int slot = i * present;
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) {
      if (p.param[k])
        w[k] = slots.get(slot++);
      else
        w[k] = fill_vec<W, N>(p.default_value[k]);
    }
  }
};

// The loads of the next row are issued as each vector of this row is stored. Sums are those of forward_kernel.
template <class F, class W, class Y, int N, class Config>
__global__ __launch_bounds__(
    Config::value.max_threads,
    Config::value
        .min_blocks_per_sm) void forward_shared_params_kernel(const __grid_constant__ NormForward<F, W, Y>
                                                                  p) {
  constexpr RowConfig kConfig = Config::value;
  constexpr int kVecsPerThread = kConfig.vecs_per_thread;
  using X = typename F::Element;
  using VecRow = ForwardRow<F, W, Y, N, RowAlignment::vectorized, int>;
  using Tile = RowTile<kConfig, N>;
  __shared__ __align__(16) float slots[2][2][VecRow::kStatistics * 32];
  extern __shared__ __align__(16) unsigned char shared[];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const BlockCoord coord(p.row_groups, kConfig.rows_per_block);
  const int row_in_block = kConfig.rows_per_block == 1 ? 0 : threadIdx.x / kConfig.threads_per_row;
  const RowRange range = row_range_of(p.row_schedule, p.f.rows_per_param, coord.first + row_in_block);
  VecRow row(p, BlockCoord(1, 1, 0), coord.group * p.f.rows_per_param + range.first);
  int left = range.count();
  row.live = left > 0;
  Vec<X, N> in[kVecsPerThread][F::kIn];
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) row.load(Tile::column(i), in[i]);
  const SharedParams<F, W, Y, N> params(p, shared);
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) params.copy(i, coord.group, Tile::column(i));
  cp_async_commit_group();
  cp_async_wait_group<0>();
#pragma unroll 1
  for (int parity = 0; left > 0; --left, parity ^= 1) {
    float center[kVecsPerThread], mean, rstd;
    int phase = 0;
    row.statistics(
        in, [](int i) { return Tile::column(i); },
        [&](auto& sums) { reduce_row<Sum, kConfig.threads_per_row>(sums, slots[parity][phase++]); },
        NoEdgeElement{}, center, mean, rstd);
    const VecRow current = row;
    row.advance(range.step, left > 1);
    if (Tile::thread() == 0) current.save_statistics(mean, rstd);
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (row.view.has(Tile::column(i))) {
        Vec<W, N> w[F::kParams];
        params.get(i, w);
        current.hide_inputs(in[i]);
        current.write(Tile::column(i), in[i], w, center[i], rstd);
      }
      row.load(Tile::column(i), in[i]);
    }
  }
}

}  // namespace norm_detail
}  // namespace tigon::cuda
