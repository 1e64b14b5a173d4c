// A producer/consumer pipeline takes row chunks through the shared memory of a CTA, or of the CTAs of a
// cluster, by bulk copies (sm_90). Consumer warps read a chunk as often as they need and release its stage. A
// producer warp refills the stage when all consumers have released it. Warps are not synchronised otherwise
// and may be a row or two apart.
#pragma once

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/ptx.cuh"

namespace tigon::cuda {

// Finds the rows that are not ignored (with Ignored: that are). All lanes of a warp call it together. Rows
// has `rows`, which is also returned after the last row; `labels`, false if no row is ignored; and
// ignored(r).
template <bool Ignored = false>
struct MaskedRowScanner {
  // The first label that has not been examined.
  int at = 0;
  template <class Rows>
  __device__ int next(const Rows& p, int skip) {
    const int rows = int(p.rows), lane = int(threadIdx.x) % 32;
    if (!p.labels) {
      const int r = at < rows && skip < rows - at ? at + skip : rows;
      at = r + 1;
      return r;
    }
    for (; at < rows; at += 128) {
      unsigned counts[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = at + i * 32 + lane;
        counts[i] = __ballot_sync(0xffffffffu, r < rows && p.ignored(r < rows ? r : 0) == Ignored);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned left = counts[i];
        const int n = __popc(left);
        if (skip < n) {
          for (; skip > 0; --skip) left &= left - 1;
          const int r = at + i * 32 + __ffs(int(left)) - 1;
          at = r + 1;
          return r;
        }
        skip -= n;
      }
    }
    return rows;
  }
};

// Returns the rows of one of `workers` workers, in order.
template <class Rows>
struct MaskedRowScheduler {
  const Rows& p;
  int skip;
  const int step;
  MaskedRowScanner<> scanner;
  __device__ MaskedRowScheduler(const Rows& p, int worker, int workers)
      : p(p), skip(worker), step(workers - 1) {}
  __device__ __forceinline__ int end() const { return int(p.rows); }
  __device__ __forceinline__ int operator()() {
    const int row = scanner.next(p, skip);
    skip = step;
    return row;
  }
};

// Writes zeros to the gradients of ignored rows, distributed over warps, some vectors per step. Rows also has
// `cols`; gradient(r), null if no gradient is wanted; and write_ignored(r), which writes the other results of
// such a row and is called by one thread.
template <class Rows>
struct ZeroMaskedRows {
  // A lane takes this many vectors per step.
  static constexpr int kVecs = 8;
  const Rows& p;
  const int first, stride;
  MaskedRowScanner<true> scanner;
  int row = -1, at = 0;

  // This is warp `first` of num_warps.
  __device__ ZeroMaskedRows(const Rows& p, int first, int num_warps)
      : p(p), first(first), stride(num_warps) {}

  // Makes one step of a whole warp. Returns false if no ignored row is left.
  __device__ __forceinline__ bool step() {
    const int rows = int(p.rows), lane = int(threadIdx.x) % 32;
    if (!p.labels || row >= rows) return false;
    if (at == 0) {
      row = scanner.next(p, row < 0 ? first : stride - 1);
      if (row >= rows) return false;
      if (lane == 0) p.write_ignored(row);
    }
    auto* out = p.gradient(row);
    if (out == nullptr) return true;
    const AlignedRow to(out, p.cols);
    constexpr int N = decltype(to)::N;
    if (at > 0 && to.is_full(at + kVecs * 32 - 1)) {
      auto* words = reinterpret_cast<uint4*>(to.base) + at + lane;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) words[i * 32] = make_uint4(0, 0, 0, 0);
    } else {
      const float zeros[N] = {};
#pragma unroll 1
      for (int i = 0; i < kVecs; ++i)
        if (const int k = at + i * 32 + lane; k < to.vecs) store_vec(to, k, zeros);
    }
    at += kVecs * 32;
    if (at >= to.vecs) at = 0;
    return true;
  }
};

// Counts the consumer warps, and the vectors that a consumer thread has in a chunk of each of `Tensors`
// tensors.
template <int ConsumerWarps, int VecsPerThread, int Tensors>
struct TmaPipelineShape {
  static constexpr int consumer_warps = ConsumerWarps, consumers = ConsumerWarps * 32,
                       vecs_per_thread = VecsPerThread, tensors = Tensors;
  // A chunk has this many vectors of a tensor.
  static constexpr int chunk = consumers * vecs_per_thread;
  // The stages leave 3 KB of shared memory for other use.
  static constexpr int stages = 229376 / (chunk * tensors * 16);
  static constexpr size_t shared = size_t(stages) * chunk * tensors * 16;
};

// Names a stage and the number of times the pipeline has wrapped around. Full barriers complete with parity
// round & 1.
template <class Shape>
struct PipelineState {
  int stage = 0, round = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Shape::stages) stage = 0, ++round;
  }
};

template <class Shape>
struct TmaPipeline {
  using State = PipelineState<Shape>;
  uint64_t full_barrier[Shape::stages], empty_barrier[Shape::stages];
  int row[Shape::stages];

  // One thread calls it before the CTA and its cluster synchronise.
  __device__ void init() {
    for (int i = 0; i < Shape::stages; ++i)
      mbarrier_init(&full_barrier[i]), mbarrier_init(&empty_barrier[i], Shape::consumer_warps);
  }
  // Returns this consumer's vector of a chunk. `smem` is the pipeline's memory, aligned to 16 bytes.
  __device__ static __forceinline__ uint4* vec(uint4* smem, const State& at, int tensor, int i) {
    return smem + ((at.stage * Shape::tensors + tensor) * Shape::vecs_per_thread + i) * Shape::consumers +
           threadIdx.x;
  }
  // Waits for a chunk and returns its row.
  __device__ __forceinline__ int consumer_wait(const State& at) {
    mbarrier_wait_parity<false>(&full_barrier[at.stage], at.round & 1);
    return row[at.stage];
  }
  __device__ __forceinline__ void consumer_release(const State& at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty_barrier[at.stage]);
  }

  // The producer is a whole warp. It copies `chunks` chunks of every row that next() returns, then one empty
  // chunk that carries next.end(). at(row, tensor) is the first vector, aligned to 16 bytes; words(row) is
  // the number of full vectors. Consumers load the partial last vector themselves.
  template <class Next, class At, class Words>
  __device__ __forceinline__ void produce(uint4* smem, int chunks, Next next, At&& at, Words&& words) {
    constexpr int kBytes = Shape::chunk * 16;
    State state;
    for (int r = next();; r = next()) {
      const bool last = r >= next.end();
      const int whole = last ? 0 : words(r);
      for (int h = 0; h < (last ? 1 : chunks); ++h, state.advance()) {
        if (state.round > 0) mbarrier_wait_parity<false>(&empty_barrier[state.stage], (state.round - 1) & 1);
        if (threadIdx.x % 32 == 0) {
          const int bytes = min(max(whole - h * Shape::chunk, 0), Shape::chunk) * 16;
          row[state.stage] = r;
          mbarrier_arrive_expect_tx(&full_barrier[state.stage], Shape::tensors * bytes);
          // A consumer may have written to the stage.
          fence_proxy_async();
          if (bytes > 0) {
#pragma unroll
            for (int t = 0; t < Shape::tensors; ++t)
              cp_async_bulk(cast_smem_ptr_to_uint(smem) + (state.stage * Shape::tensors + t) * kBytes,
                            reinterpret_cast<const char*>(at(r, t)) + int64_t(h) * kBytes, bytes,
                            &full_barrier[state.stage]);
          }
        }
        __syncwarp();
      }
      if (last) break;
    }
  }
};

}  // namespace tigon::cuda
