// A RowConfig says how the threads of a CTA share the rows of a matrix. This is plain C++: kernels take a
// RowConfig as a template argument, the host selects it at run time, and tests print it. A row is divided
// into vectors of adjacent elements, mostly of 16 bytes. Thread t of a row owns vectors t, t + threads, ...,
// at most vecs_per_thread of them, so that adjacent lanes access adjacent words. A CTA has at least 128
// threads and holds several short rows, or it has one row and as many warps as that row needs.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace tigon::cuda {

// A cluster has at most this many CTAs.
constexpr int kMaxCluster = 16;

enum class RowAlignment {
  // All rows and parameters consist of aligned vectors.
  vectorized,
  // Inputs have the same offset within 16 bytes as the outputs, row by row.
  same_offset,
  // All other rows: vectors are aligned to the first output, and inputs are loaded as aligned words and
  // shifted.
  any,
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct RowConfig {
  // The number of threads that share a row. 0 means all of the CTA, which has as many warps as the row's
  // vectors need.
  int threads_per_row = 0;
  // The most vectors of a row that a thread holds.
  int vecs_per_thread = 1;
  int rows_per_block = 1;
  // A CTA has at most this many threads.
  int max_threads = 0;
  // Bounds the registers by the CTAs per SM.
  int min_blocks_per_sm = 1;
  // Counts the stages of the shared-memory pipeline; 0 if rows are loaded into registers.
  int stages = 0;
  // The first of two passes is this many rows ahead of the second.
  int lookahead = 0;
  // This many lanes of a warp share the vectors of one thread. A sum that combines these lanes first is
  // bitwise equal.
  int lane_split = 1;
  // The longest row for which a table selects the configuration; 0 for the longest that it holds.
  int64_t limit_vecs = 0;

  constexpr int64_t max_vecs() const {
    if (limit_vecs > 0) return limit_vecs;
    return int64_t(threads_per_row > 0 ? threads_per_row : max_threads) * vecs_per_thread;
  }
  // Returns the threads of a CTA for rows of `vecs` vectors.
  constexpr int block_threads(int64_t vecs) const {
    if (threads_per_row > 0) return max_threads;
    return int(ceil_div(vecs, 32 * vecs_per_thread * lane_split) * 32 * lane_split);
  }
  // Returns the configuration that kernels are compiled for: limits do not make another kernel.
  constexpr RowConfig without_limit() const {
    RowConfig c = *this;
    c.limit_vecs = 0;
    return c;
  }
  // Returns the configuration limited to rows of `vecs` vectors.
  constexpr RowConfig up_to(int64_t vecs) const {
    RowConfig c = *this;
    c.limit_vecs = vecs;
    return c;
  }
};

// Returns a configuration with several rows in a CTA, by default as many as fill 128 threads.
constexpr RowConfig several_rows(RowConfig c) {
  if (c.rows_per_block == 1 && c.threads_per_row < 128) c.rows_per_block = 128 / c.threads_per_row;
  c.max_threads = c.threads_per_row * c.rows_per_block;
  return c;
}

// Makes a type of a configuration: nvcc takes no value of class type as a template argument of a kernel.
template <RowConfig kConfig>
struct ConfigType {
  static constexpr RowConfig value = kConfig;
};

// Lists the configurations of a kernel, shortest rows first.
struct RowConfigs {
  static constexpr int kMost = 10;
  RowConfig at[kMost] = {};
  int size = 0;

  template <std::same_as<RowConfig>... C>
  constexpr RowConfigs(C... configs) : at{configs...}, size(sizeof...(C)) {}
};

// Calls fn.operator()<kConfig>() for configuration `index` of the table.
template <RowConfigs kConfigs, class Fn>
void with_config(int index, Fn&& fn) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    ((index == int(I) && (fn.template operator()<kConfigs.at[I].without_limit()>(), true)) || ...);
  }(std::make_index_sequence<size_t(kConfigs.size)>{});
}
// Returns the index of the first configuration that holds a row of `vecs` vectors; -1 if there is none.
constexpr int select_config(const RowConfigs& configs, int64_t vecs) {
  for (int i = 0; i < configs.size; ++i)
    if (vecs <= configs.at[i].max_vecs()) return i;
  return -1;
}

}  // namespace tigon::cuda
