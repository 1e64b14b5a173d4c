// This forward of the norm family serves vectorized rows if a group of adjacent rows shares its parameters
// (kRowParams). Persistent CTAs of one group each keep its folded parameters (norm_math.inc) in shared
// memory. The row operations are in norm_row.cuh.
#pragma once

#include "tigon/base/cuda/norm_row.cuh"
#include "tigon/base/cuda/ptx.cuh"

namespace tigon::cuda {
namespace norm_detail {

// The loads of the next row are issued as each vector of this row is stored. Sums are those of
// forward_kernel.
template <class F, class W, class Y, int N, class Config>
__global__ __launch_bounds__(
    Config::value.max_threads,
    Config::value
        .min_blocks_per_sm) void forward_shared_params_kernel(const __grid_constant__ NormForward<F, W, Y>
                                                                  p) {
  constexpr RowConfig kConfig = Config::value;
  constexpr int kVecsPerThread = kConfig.vecs_per_thread;
  using X = typename F::Element;
  using VecRow = ForwardRow<F, W, Y, N, 1, int>;
  using Tile = RowTile<kConfig, N>;
  __shared__ __align__(16) float slots[2][2][VecRow::kStatistics * 32];
  extern __shared__ __align__(16) unsigned char shared[];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const BlockCoord coord(p.row_groups, kConfig.rows_per_block);
  const int row_in_block = kConfig.rows_per_block == 1 ? 0 : threadIdx.x / kConfig.threads_per_row;
  const int64_t step = int64_t(gridDim.x / unsigned(p.row_groups)) * kConfig.rows_per_block;
  const int64_t rows = p.f.rows_per_param - (coord.first + row_in_block);
  VecRow row(p, BlockCoord(1, 1, 0), (coord.group + 1) * p.f.rows_per_param - rows);
  int left = rows > 0 ? int((rows + step - 1) / step) : 0;
  row.live = left > 0;
  Vec<X, N> in[kVecsPerThread][F::kIn];
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) row.load(Tile::column(i), in[i]);
  using Folded = Vec<float, N>[F::kFolded];
  const ThreadSlots<float, N> slots_of_params(shared, int(blockDim.x));
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    Vec<W, N> params[F::kParams];
    row.load_params(Tile::column(i), params);
    row.finish_params(params);
    Folded folded;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float w[F::kParams], of[F::kFolded];
      element(params, j, w);
      p.f.fold(w, of);
#pragma unroll
      for (int k = 0; k < F::kFolded; ++k) folded[k].v[j] = of[k];
    }
#pragma unroll
    for (int k = 0; k < F::kFolded; ++k) slots_of_params.set(i * F::kFolded + k, folded[k]);
  }
#pragma unroll 1
  for (int parity = 0; left > 0; --left, parity ^= 1) {
    float center[kVecsPerThread], mean, rstd;
    int phase = 0;
    row.statistics(
        in, [](int i) { return Tile::column(i); },
        [&](auto& sums) { reduce_row<Sum, kConfig.threads_per_row>(sums, slots[parity][phase++]); }, center,
        mean, rstd);
    const VecRow current = row;
    row.advance(step, left > 1);
    if (Tile::thread() == 0) current.save_statistics(mean, rstd);
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (row.view.has(Tile::column(i))) {
        Folded folded;
#pragma unroll
        for (int k = 0; k < F::kFolded; ++k) folded[k] = slots_of_params.get(i * F::kFolded + k);
        current.hide_inputs(in[i]);
        current.write(Tile::column(i), in[i], folded, center[i], rstd);
      }
      row.load(Tile::column(i), in[i]);
    }
  }
}

}  // namespace norm_detail
}  // namespace tigon::cuda
