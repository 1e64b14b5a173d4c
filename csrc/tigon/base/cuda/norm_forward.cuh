// Holds the forward kernels of the norm family, which keep rows in registers or loop over them, and the
// launch of the kernel that plan_forward (norm_plan.h) selects. The row operations are in norm_row.cuh.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/norm_forward_shared.cuh"
#include "tigon/base/cuda/norm_plan.h"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {
namespace norm_detail {

// Each CTA takes a group of kConfig.rows_per_block vectorized rows. With kBytes it has one row, whose results
// stay in registers until the largest is known.
template <class F, class W, class Y, int N, class Config, bool kBytes = false>
__global__ __launch_bounds__(Config::value.max_threads, Config::value.min_blocks_per_sm) void forward_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  constexpr RowConfig kConfig = Config::value;
  using X = typename F::Element;
  using VecRow = ForwardRow<F, W, Y, N, 1, int>;
  // Parameters are loaded before the reduction if they fit in registers.
  constexpr int kParamBytes = kConfig.vecs_per_thread * N * int(sizeof(W)) * F::kParams * F::kIn;
  constexpr bool kLoadParamsEarly = kParamBytes <= (kConfig.threads_per_row == 32 ? 128 : 64);
  __shared__ __align__(16) float slots[2][VecRow::kStatistics * 32];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  using Tile = RowTile<kConfig, N>;
  const BlockCoord coord(p.groups, kConfig.rows_per_block);
  const int64_t row_in_block = kConfig.rows_per_block == 1 ? 0 : threadIdx.x / kConfig.threads_per_row;
  const VecRow row(p, coord, coord.first + row_in_block);
  Vec<X, N> in[kConfig.vecs_per_thread][F::kIn];
  Vec<W, N> w[kConfig.vecs_per_thread][F::kParams];
#pragma unroll
  for (int i = 0; i < kConfig.vecs_per_thread; ++i) row.load(Tile::column(i), in[i]);
  if constexpr (kLoadParamsEarly) {
#pragma unroll
    for (int i = 0; i < kConfig.vecs_per_thread; ++i) row.load_params(Tile::column(i), w[i]);
  }
  float center[kConfig.vecs_per_thread], mean, rstd;
  int phase = 0;
  row.statistics(
      in, [](int i) { return Tile::column(i); },
      [&](auto& sums) { reduce_row<Sum, kConfig.threads_per_row, kConfig.lane_split>(sums, slots[phase++]); },
      center, mean, rstd);
  if (!row.live) return;
  if (Tile::thread() == 0) row.save_statistics(mean, rstd);
  Vec<Y, N> results[kBytes ? kConfig.vecs_per_thread : 1] = {};
#pragma unroll
  for (int i = 0; i < kConfig.vecs_per_thread; ++i) {
    // CTAs of several rows run without this branch.
    if (kConfig.rows_per_block == 1 && !row.view.has(Tile::column(i))) continue;
    if constexpr (!kLoadParamsEarly) row.load_params(Tile::column(i), w[i]);
    row.finish_params(w[i]);
    if constexpr (kConfig.vecs_per_thread > (F::kSubtractMean ? 4 : 2)) row.hide_inputs(in[i]);
    const Vec<Y, N> y = row.write(Tile::column(i), in[i], w[i], center[i], rstd);
    if constexpr (kBytes) results[i] = y;
  }
  if constexpr (kBytes) {
    __shared__ uint32_t largest_slots[32];
    bool infinite;
    const float inverse = finish_e4m3(p.bytes, row.row, largest_e4m3(results, infinite), largest_slots);
    uint8_t* q = p.bytes.q + row.row * p.bytes.stride;
#pragma unroll
    for (int i = 0; i < kConfig.vecs_per_thread; ++i)
      if (row.view.has(Tile::column(i)))
        store_e4m3(q + Tile::column(i), hide_from_compiler(results[i], p.opaque_zero), inverse, infinite);
  }
}

// Handles rows that no register shape holds, of any alignment, in a pass for each statistic and one that
// writes. All but the first read from L2.
template <class F, class W, class Y>
__global__ __launch_bounds__(kLoopThreads, kLoopBlocks) void forward_looped_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int N = 16 / int(sizeof(X));
  using VecRow = ForwardRow<F, W, Y, N, kLoopThreads, int64_t>;
  __shared__ __align__(16) float slots[2][VecRow::kStatistics * 32];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const BlockCoord coord(p.groups, 1);
  const VecRow row(p, coord, coord.first);
  // Calls fn(first column, inputs).
  auto for_each_vec = [&](bool first, auto&& fn) {
    for (int64_t c = threadIdx.x; row.view.has(c); c += kLoopThreads * N) {
      Vec<X, N> in[F::kIn] = {};
      if (F::kWritesResidual && !first) {
        in[0] = row.view.load(true, row.residual_out(), c);
      } else {
        row.load(c, in);
        row.write_residual(c, in);
      }
      fn(c, in);
    }
  };
  float mean = 0.0f, sums[VecRow::kStatistics] = {};
  if constexpr (F::kSubtractMean) {
    for_each_vec(true, [&](int64_t, const Vec<X, N>(&in)[F::kIn]) { mean += row.sum_of(in); });
    mean = row.mean_of(reduce_row<Sum, kLoopThreads>(mean, slots[0]));
  }
  for_each_vec(!F::kSubtractMean,
               [&](int64_t c, const auto& in) { row.add_to_statistics(c, in, mean, sums); });
  reduce_row<Sum, kLoopThreads>(sums, slots[1]);
  const float rstd = row.finish_statistics(sums, mean);
  if (threadIdx.x == 0) row.save_statistics(mean, rstd);
  for_each_vec(false, [&](int64_t c, const Vec<X, N>(&in)[F::kIn]) {
    Vec<W, N> w[F::kParams];
    row.load_params(c, w);
    row.finish_params(w);
    row.write(c, in, w, mean, rstd);
  });
}

inline DeviceLimits device_limits() {
  const DeviceFacts& facts = device_facts();
  return {.sms = facts.sms, .shared_per_block = facts.shared_per_block, .clusters = facts.capability >= 90};
}

}  // namespace norm_detail

// Calls fn(x type, weight type); the weight's is x's or float.
template <class Fn>
void with_weight_types(const char* op, DType x, const Vector& weight, Fn&& fn) {
  dispatch_float(op, "x", x, [&](auto t) {
    using X = typename DeviceType<typename decltype(t)::type>::type;
    if (!weight || weight.dtype == x) return fn(Type<X>{}, Type<X>{});
    fn(Type<X>{}, Type<float>{});
  });
}
// Calls fn(x type, weight type, y type). y has x's type, or float with a float weight.
template <class Fn>
void with_result_types(const char* op, DType x, const Vector& weight, DType y, Fn&& fn) {
  with_weight_types(op, x, weight, [&](auto tx, auto tw) {
    if (y == x) return fn(tx, tw, tx);
    fn(tx, Type<float>{}, Type<float>{});
  });
}

template <class F, class W, class Y>
void norm_forward(const char* op, Context& ctx, NormForward<F, W, Y> p) {
  using namespace norm_detail;
  constexpr NormTraits kTraits = forward_traits<F, W, Y>();
  p.inv_cols = 1.0f / float(p.cols);
  NormOperand rows[F::kIn + 2], params[F::kParams];
  for (int k = 0; k < F::kIn; ++k) rows[k] = {p.in[k], p.in_stride[k], kTraits.x_bytes};
  rows[F::kIn] = {p.residual_out, p.residual_out_stride, kTraits.x_bytes};
  rows[F::kIn + 1] = {p.y, p.y_stride, kTraits.y_bytes};
  // Parameters of channels are read one by one: whole vectors of a row share one.
  for (int k = 0; k < F::kParams; ++k) {
    params[k] = kPerChannel<F> ? NormOperand{nullptr, p.cols_per_param, kTraits.weight_bytes}
                               : NormOperand{p.param[k], 0, kTraits.weight_bytes};
    if constexpr (kRowParams<F>) params[k].stride = p.f.param_stride[k];
  }
  NormProblem problem = norm_problem(p.rows, p.cols, p.groups, kTraits.x_bytes, rows, params);
  if constexpr (kRowParams<F>)
    problem.rows_per_param = p.f.rows_per_param, p.row_groups = int(p.rows / p.f.rows_per_param);
  const NormPlan plan = plan_forward(kTraits, problem, device_limits());

  // The plan names this kernel; null means `looped`.
  const void* entry = nullptr;
  LaunchConfig grid{.blocks = ceil_div(p.rows, plan.rows.rows_per_block) * p.groups,
                    .threads = plan.threads,
                    .shared = size_t(plan.shared),
                    .pdl = true};
  const auto registers = [&]<RowConfig kConfig>() {
    if constexpr (kWritesBytes<F, W, Y> && kConfig.threads_per_row == 0)
      if (p.bytes.q != nullptr && p.bytes.takes_vectors()) {
        *p.bytes.written = true;
        entry = entry_of(forward_kernel<F, W, Y, kTraits.vec_size(), ConfigType<kConfig>, true>);
        return;
      }
    entry = entry_of(forward_kernel<F, W, Y, kTraits.vec_size(), ConfigType<kConfig>>);
  };
  switch (plan.kernel) {
    case NormKernel::registers:
      if (plan.rows.lane_split == 1)
        with_config<forward_register_configs(kTraits)>(plan.config, registers);
      else if constexpr (F::kSubtractMean && !kTraits.rare)
        with_config<kForwardSplitConfigs>(plan.config, registers);
      break;
    case NormKernel::shared_params:
      if constexpr (kRowParams<F>) {
        OccupancyCache* occupancy = nullptr;
        with_config<forward_shared_configs(kTraits)>(plan.config, [&]<RowConfig kConfig>() {
          static OccupancyCache cache;
          occupancy = &cache;
          entry = entry_of(forward_shared_params_kernel<F, W, Y, kTraits.vec_size(), ConfigType<kConfig>>);
        });
        grid.blocks = persistent_workers(op, *occupancy, entry, plan.rows, grid.threads, grid.shared,
                                         p.f.rows_per_param, p.row_groups) *
                      p.row_groups;
        // If a CTA needs more than the device has, `looped` runs.
        if (grid.blocks == 0) entry = nullptr;
      }
      break;
    default: break;
  }
  if (entry == nullptr) {
    entry = entry_of(forward_looped_kernel<F, W, Y>);
    grid = {.blocks = p.rows * p.groups, .threads = kLoopThreads, .pdl = true};
  }
  void* parameters[] = {&p};
  launch_entry(op, ctx, entry, grid, parameters);
}

}  // namespace tigon::cuda
