// Defines and selects the kernels of the norm family: plan_forward and plan_backward are plain C++ that runs
// and is tested without a GPU (tests/cpp/test_norm_plan.cpp prints the plans of many shapes). The number of
// SMs and the shared memory choose only between kernels with bitwise equal results. Apart from these a plan
// depends on the row's length, alignment and types only, so the results of a row do not depend on the batch.
#pragma once

#include <algorithm>
#include <span>
#include <type_traits>

#include "tigon/base/cuda/row_config.h"
#include "tigon/base/dtype.h"

namespace tigon::cuda {

// Rows in fp16 (norm_row.cuh has the device's type) or with weights of another type are rare, so fewer
// configurations serve them. Their lengths take the next longer configuration; rows of one length cost at
// most about a third more.
template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, f16>;
template <class X, class W>
constexpr bool kRareTypes = kIsHalf<X> || !std::is_same_v<X, W>;

// These tell of a formula (norm_math.inc) whether parameters differ by row, whether there are parameters by
// channel, and whether rows form groups.
template <class F>
constexpr bool kRowParams = requires(const F& f) { f.param_offset(0, int64_t(0)); };
template <class F>
constexpr bool kPerChannel = requires { typename F::PerChannel; };
template <class F>
constexpr bool kRowGroups = requires { typename F::RowGroups; };

// Holds the properties of a formula and its types that a plan depends on.
struct NormTraits {
  // Counts rows read and written, and parameters or sums by column.
  int inputs, outputs, columns;
  bool subtracts_mean, writes_residual;
  // True if the backward has clusters for rows that no CTA holds.
  bool clusters = false;
  // True for kRowParams or kRowGroups.
  bool by_row;
  // True for kRareTypes, which take fewer configurations. With by_row, whose kernels share configurations, it
  // is true only for fp16 in the forward.
  bool rare;
  int x_bytes, weight_bytes, y_bytes;
  // This is kFolded for kRowParams.
  int folded = 0;

  constexpr int vec_size() const { return 16 / x_bytes; }
};
// F is a forward formula (norm_math.inc), W and Y are the types of parameters and result.
template <class F, class W, class Y>
constexpr NormTraits forward_traits() {
  using X = typename F::Element;
  int folded = 0;
  if constexpr (kRowParams<F>) folded = F::kFolded;
  return {.inputs = F::kIn,
          .outputs = 1 + F::kWritesResidual,
          .columns = F::kParams,
          .subtracts_mean = F::kSubtractMean,
          .writes_residual = F::kWritesResidual,
          .by_row = kRowParams<F>,
          .rare = kRowParams<F> ? kIsHalf<X> : kRareTypes<X, W>,
          .x_bytes = int(sizeof(X)),
          .weight_bytes = int(sizeof(W)),
          .y_bytes = int(sizeof(Y)),
          .folded = folded};
}
template <class B, class W, class Y>
constexpr NormTraits backward_traits() {
  using X = typename B::Element;
  constexpr bool kSame = std::is_same_v<W, X> && std::is_same_v<Y, X>;
  return {.inputs = B::kIn,
          .outputs = B::kOut,
          .columns = B::kSums,
          .subtracts_mean = B::kSubtractMean,
          .writes_residual = false,
          .clusters = kSame && !kIsHalf<X> && B::kOut == 1 && !kRowGroups<B>,
          .by_row = kRowGroups<B>,
          .rare = kRareTypes<X, W> && !kRowGroups<B>,
          .x_bytes = int(sizeof(X)),
          .weight_bytes = int(sizeof(W)),
          .y_bytes = int(sizeof(Y))};
}

// Describes the rows of one tensor, or a parameter by column (stride 0). Null data means that it is absent.
struct NormOperand {
  const void* data;
  int64_t stride;
  int bytes;
};
struct NormProblem {
  int64_t rows, cols;
  int groups = 1;
  // All rows and parameters consist of aligned vectors.
  bool vectorized = true;
  // With kRowParams, this many rows share their parameters.
  int64_t rows_per_param = 1;
};
// Holds what kernels may count on.
struct DeviceLimits {
  int sms;
  int64_t shared_per_block;
  bool clusters;
};

// Returns the problem of these operands. `x_bytes` is the size of the elements in which vectors are counted.
inline NormProblem norm_problem(int64_t rows, int64_t cols, int groups, int x_bytes,
                                std::span<const NormOperand> operands, std::span<const NormOperand> params) {
  const int64_t vec_size = 16 / x_bytes;
  const auto aligned = [](const NormOperand& o) { return reinterpret_cast<uintptr_t>(o.data) % 16 == 0; };
  bool vectorized = cols % vec_size == 0;
  for (const NormOperand& o : operands)
    vectorized = vectorized && (o.data == nullptr ||
                                (aligned(o) && o.stride % (16 / o.bytes) == 0 && o.stride % vec_size == 0));
  for (const NormOperand& o : params) vectorized = vectorized && aligned(o) && o.stride % vec_size == 0;
  return {.rows = rows, .cols = cols, .groups = groups, .vectorized = vectorized};
}

// Rows are vectorized, except in `looped`.
enum class NormKernel {
  // The forward has a CTA per group of rows, which stay in registers. The backward has persistent CTAs.
  registers,
  // Backward only: the same with lookahead.
  lookahead,
  // Forward only: persistent CTAs take rows that share parameters of their own.
  shared_params,
  // Backward only: persistent clusters take rows that are too long for a CTA.
  cluster,
  // Everything else: a CTA takes one row and reads it once per pass, from L2 after the first.
  looped,
};

// Names the kernel and its configuration `config` in the kernel's table, and the threads and shared memory of
// a CTA. For a cluster the launcher decides about the CTAs, by how many are resident.
struct NormPlan {
  NormKernel kernel = NormKernel::looped;
  int config = -1;
  RowConfig rows = {};
  int threads = 0;
  int64_t shared = 0;
};

// ---- Tables ----

// The forward keeps vectorized rows in registers. Short rows take few threads, since the work per row costs
// as much as that per element. min_blocks_per_sm bounds the registers: there are as many CTAs per SM as the
// loads in flight of a thread allow.
constexpr RowConfigs forward_register_configs(const NormTraits& t) {
  const auto cta = [](int vecs, int threads, int min_blocks = 1) {
    return RowConfig{.vecs_per_thread = vecs, .max_threads = threads, .min_blocks_per_sm = min_blocks};
  };
  if (t.inputs == 1) {
    const RowConfig quarter = several_rows({.threads_per_row = 4,
                                            .vecs_per_thread = 4,
                                            .rows_per_block = 16,
                                            .min_blocks_per_sm = 8}),
                    warp = several_rows({.threads_per_row = 32,
                                         .vecs_per_thread = 4,
                                         .min_blocks_per_sm = t.columns == 1 ? 8 : 5});
    if (t.rare && t.by_row) return RowConfigs(quarter, warp, cta(4, 384, 3), cta(8, 1024));
    if (t.rare) return RowConfigs(quarter, warp, cta(8, 1024));
    return RowConfigs(
        several_rows({.threads_per_row = 4, .vecs_per_thread = 2}), quarter,
        several_rows(
            {.threads_per_row = 16, .vecs_per_thread = 2, .rows_per_block = 8, .min_blocks_per_sm = 10}),
        warp, cta(4, 128, 6), cta(4, 256, 4), cta(4, 384, 3), cta(8, 1024));
  }
  const RowConfig short_rows[] = {several_rows({.threads_per_row = 4, .vecs_per_thread = 2}),
                                  several_rows({.threads_per_row = 8, .vecs_per_thread = 2}),
                                  several_rows({.threads_per_row = 16, .vecs_per_thread = 2}),
                                  several_rows({.threads_per_row = 32, .vecs_per_thread = 4})};
  if (t.rare) return RowConfigs(short_rows[1], short_rows[3], cta(4, 1024));
  if (t.writes_residual)
    return RowConfigs(short_rows[0], short_rows[1], short_rows[2], short_rows[3], cta(2, 512), cta(4, 1024));
  return RowConfigs(short_rows[0], short_rows[1], short_rows[2], short_rows[3], cta(4, 1024));
}
// The same rows take twice the threads here. With two sums per row, and parameters that do not fit in
// registers, this is faster if a launch has at most kFewWarps warps per SM, which exposes the latency of
// loads.
constexpr int kFewWarps = 16;
constexpr RowConfigs kForwardSplitConfigs{
    RowConfig{.vecs_per_thread = 2, .max_threads = 1024, .lane_split = 2}};

// The forward of vectorized rows in groups that share parameters has CTAs of one group, which keep them in
// shared memory. Threads and vectors are those of forward_register_configs, so that results are bitwise
// equal. In shorter groups the copies cost more than they save.
constexpr int64_t kManyRowsPerParam = 8;
constexpr RowConfigs forward_shared_configs(const NormTraits& t) {
  const RowConfig warp = several_rows({.threads_per_row = 32, .vecs_per_thread = 4, .min_blocks_per_sm = 6}),
                  longest{.vecs_per_thread = 4, .max_threads = 384, .min_blocks_per_sm = 2};
  if (t.rare) return RowConfigs(warp, longest);
  return RowConfigs(warp, RowConfig{.vecs_per_thread = 4, .max_threads = 128, .min_blocks_per_sm = 8},
                    RowConfig{.vecs_per_thread = 4, .max_threads = 256, .min_blocks_per_sm = 4}, longest);
}

// The backward takes vectorized rows. Without a pipeline several CTAs per SM overlap their loads; stages need
// no registers for loads in flight. Both keep weights in shared memory. Lookahead, which takes another
// kernel, hides the latency of the reduction if a thread has much arithmetic. The configurations are tuned on
// H200 for bf16.
constexpr RowConfigs backward_register_configs(const NormTraits& t) {
  const auto cta = [](int stages, int vecs, int threads, int min_blocks = 1, int lookahead = 0) {
    return RowConfig{.vecs_per_thread = vecs,
                     .max_threads = threads,
                     .min_blocks_per_sm = min_blocks,
                     .stages = stages,
                     .lookahead = lookahead};
  };
  const auto warps = [](int threads_per_row, int vecs, int rows, int min_blocks, int stages = 0) {
    return several_rows({.threads_per_row = threads_per_row,
                         .vecs_per_thread = vecs,
                         .rows_per_block = rows,
                         .min_blocks_per_sm = min_blocks,
                         .stages = stages});
  };
  const RowConfig ahead = cta(3, 4, 512, 1, 1);
  // With three inputs and three gradients a thread has one vector of each, so that registers suffice for more
  // warps.
  if (t.outputs == 3)
    return RowConfigs(warps(8, 2, 32, 2), warps(32, 2, 8, 2), cta(3, 1, 512, 2), cta(3, 2, 512));
  // With gradients of two inputs groups are short, so there are few configurations.
  if (t.outputs == 2) return RowConfigs(warps(8, 2, 32, 2), warps(32, 2, 8, 2), cta(3, 2, 512));
  if (t.rare) return RowConfigs(warps(8, 2, 32, 3), warps(32, 2, 8, 3), cta(2, 4, 512));
  if (t.inputs == 2)
    return RowConfigs(warps(8, 2, 32, 3), warps(32, 2, 8, 3), warps(32, 4, 4, 4), cta(4, 2, 512),
                      cta(2, 4, 512));
  // These have two sums by column for each group of rows.
  if (t.columns == 2 && !t.subtracts_mean)
    return RowConfigs(warps(8, 2, 32, 3), warps(32, 2, 8, 3), cta(3, 2, 320, 2), cta(2, 4, 512));
  if (t.subtracts_mean)
    return RowConfigs(warps(8, 2, 32, 3), warps(32, 2, 8, 3), warps(32, 4, 8, 1, 2), cta(2, 2, 128, 4),
                      cta(2, 2, 320, 2), cta(2, 2, 512), cta(2, 4, 512));
  return RowConfigs(warps(8, 2, 32, 4), warps(32, 2, 8, 4), cta(2, 1, 256, 4), cta(2, 2, 160, 4),
                    cta(3, 2, 256, 2), cta(4, 4, 160), cta(3, 1, 1024), cta(2, 4, 512).up_to(1152), ahead,
                    cta(2, 4, 512));
}
// The backward has clusters for the longest rows. Lookahead hides the latency of the reduction, which is
// large in clusters.
constexpr RowConfigs backward_cluster_configs(const NormTraits& t) {
  const bool one = t.inputs == 1;
  return RowConfigs(
      RowConfig{.vecs_per_thread = 4, .max_threads = 512, .stages = one ? 3 : 2, .lookahead = one ? 1 : 0});
}

// ---- Shared memory ----

// A reduction takes at most this much.
constexpr int64_t kReduceBytes = 4 * ((32 + kMaxCluster) * 8 + 8);

// Persistent CTAs of the forward keep folded parameters.
constexpr int64_t forward_shared(const NormTraits& t, const RowConfig& c, int threads) {
  return int64_t(threads) * c.vecs_per_thread * t.folded * t.vec_size() * int64_t(sizeof(float));
}
// Returns the rows of column sums in shared memory that a CTA of the backward adds up.
constexpr int backward_parts(const RowConfig& c) {
  return c.threads_per_row > 0 && c.threads_per_row < 32 ? c.max_threads / 32 : c.rows_per_block;
}
// The backward keeps weights and stages and then, in the same memory, column sums.
constexpr int64_t backward_shared(const NormTraits& t, const RowConfig& c, int threads, int64_t cols) {
  const int64_t vec_size = t.vec_size(), held = int64_t(threads) * c.vecs_per_thread;
  // A row and stage take this many 16-byte words, for elements of x's size.
  const int64_t words = int64_t(threads / c.rows_per_block) * c.vecs_per_thread;
  const int64_t row_words = words * (t.inputs + vec_size * t.y_bytes / 16);
  const int64_t rows =
      held * vec_size * t.weight_bytes + int64_t(c.stages) * c.rows_per_block * row_words * 16;
  const int64_t sums = c.rows_per_block > 1 ? cols * backward_parts(c) : 0;
  return std::max(rows, int64_t(sizeof(float)) * sums * t.columns);
}

// ---- Plans ----

// Returns the first configuration that holds the row and fits in shared memory, which is shared(config,
// threads).
template <class Shared>
constexpr bool select_plan(NormPlan& plan, NormKernel kernel, const RowConfigs& configs, int64_t vecs,
                           const DeviceLimits& limits, Shared&& shared) {
  for (int i = 0; i < configs.size; ++i) {
    const RowConfig& c = configs.at[i];
    const bool cluster = kernel == NormKernel::cluster;
    if (vecs > c.max_vecs() * (cluster ? kMaxCluster : 1)) continue;
    const int threads = cluster ? 0 : c.block_threads(vecs);
    const int64_t bytes = cluster ? 0 : shared(c, threads);
    if (bytes + kReduceBytes > limits.shared_per_block) continue;
    plan = {kernel, i, c.without_limit(), threads, bytes};
    return true;
  }
  return false;
}

constexpr NormPlan plan_forward(const NormTraits& t, const NormProblem& p, const DeviceLimits& limits) {
  NormPlan plan;
  const int64_t vecs = std::max<int64_t>(1, p.cols / t.vec_size());
  const auto none = [](const RowConfig&, int) { return int64_t(0); };
  if (!p.vectorized ||
      !select_plan(plan, NormKernel::registers, forward_register_configs(t), vecs, limits, none))
    return plan;
  if (t.subtracts_mean && !t.rare && plan.rows.threads_per_row == 0 && plan.rows.vecs_per_thread == 4 &&
      p.rows * p.groups * plan.threads / 32 <= int64_t(kFewWarps) * limits.sms)
    select_plan(plan, NormKernel::registers, kForwardSplitConfigs, vecs, limits, none);
  if (t.by_row && p.rows_per_param >= kManyRowsPerParam && plan.rows.vecs_per_thread == 4 &&
      plan.rows.threads_per_row % 32 == 0)
    select_plan(plan, NormKernel::shared_params, forward_shared_configs(t), vecs, limits,
                [&](const RowConfig& c, int threads) { return forward_shared(t, c, threads); });
  return plan;
}

constexpr NormPlan plan_backward(const NormTraits& t, const NormProblem& p, const DeviceLimits& limits) {
  NormPlan plan;
  const int64_t vecs = std::max<int64_t>(1, p.cols / t.vec_size());
  const auto shared = [&](const RowConfig& c, int threads) { return backward_shared(t, c, threads, p.cols); };
  if (!p.vectorized) return plan;
  if (select_plan(plan, NormKernel::registers, backward_register_configs(t), vecs, limits, shared)) {
    if (plan.rows.lookahead > 0) plan.kernel = NormKernel::lookahead;
  } else if (t.clusters && p.groups == 1 && limits.clusters) {
    select_plan(plan, NormKernel::cluster, backward_cluster_configs(t), vecs, limits, shared);
  }
  return plan;
}

}  // namespace tigon::cuda
