// A cp.async pipeline copies the next rows of heads to shared memory while the current ones are processed.
// CTAs are persistent and take adjacent units. A thread reads only what it copied itself, so there is no
// barrier.
#pragma once

#include "tigon/base/cuda/ptx.cuh"
#include "tigon/ops/rope/rope_heads.cuh"

namespace tigon::cuda::rope_kernels {

// A unit has this many heads.
constexpr int kFewHeads = 4, kManyHeads = 8;

// Counts the 16-byte words of a vector.
template <class T>
constexpr int kWordsOf = int(sizeof(T)) * kVecColumns / 16;

// Holds the 16-byte words of shared memory that a thread copies per row, in stages of which all but one are
// in flight.
template <int Words, int Stages>
class CpAsyncStages {
 public:
  static constexpr size_t kBytes = size_t(Words) * Stages * kThreads * 16;

  __device__ __forceinline__ CpAsyncStages() {
    extern __shared__ uint4 smem_vecs[];
    first_ = uint32_t(__cvta_generic_to_shared(smem_vecs + threadIdx.x));
  }
  // Copies the vector to words of a stage from `at` on.
  template <class T>
  __device__ __forceinline__ void copy(int stage, int at, const T* from) const {
#pragma unroll
    for (int w = 0; w < kWordsOf<T>; ++w)
      cp_async(word(stage, at + w), from + w * (kVecColumns / kWordsOf<T>));
  }
  template <class T>
  __device__ __forceinline__ Vec<T, kVecColumns> read(int stage, int at) const {
    Vec<T, kVecColumns> r;
#pragma unroll
    for (int w = 0; w < kWordsOf<T>; ++w) {
      reinterpret_cast<uint4*>(&r)[w] = ld_shared(word(stage, at + w));
    }
    return r;
  }
  // Holds both vectors of a row.
  template <class T>
  __device__ __forceinline__ void read(int stage, int at, float (&v)[kColumns]) const {
    const auto a = read<T>(stage, at);
    widen_vecs(a, read<T>(stage, at + kWordsOf<T>), v);
  }

  // Zeroes words that are never copied.
  __device__ __forceinline__ void clear() const {
    for (int w = 0; w < Words * Stages; ++w) st_shared(word(0, w), uint4{});
  }

 private:
  __device__ __forceinline__ uint32_t word(int stage, int w) const {
    return first_ + uint32_t(stage * Words + w) * (kThreads * 16);
  }
  uint32_t first_;
};

// Describes the rows of a tensor that a thread copies, in order: two vectors, vec_stride columns apart.
template <class T>
struct Source {
  const T* row = nullptr;
  int64_t step = 0;

  template <class CpAsyncStages>
  __device__ __forceinline__ void copy(const CpAsyncStages& stages, int stage, int at, int vec_stride) const {
    stages.copy(stage, at, row), stages.copy(stage, at + kWordsOf<T>, row + vec_stride);
  }
};

// Prefetches the rows of units index, index + stride, ..., Stages - 1 rows ahead. begin(index)
// returns the unit's heads and prepares copy(stage, wanted), which copies its next row.
template <int Stages, class Begin, class Copy>
class RowPrefetcher {
 public:
  __device__ __forceinline__ RowPrefetcher(uint32_t index, uint32_t stride, const Begin& begin,
                                           const Copy& copy)
      : begin_(begin), copy_(copy), index_(index), stride_(stride), range_(begin(index)) {
#pragma unroll 1
    for (int s = 0; s < Stages - 1; ++s) start();
  }
  // Returns the stage of the next row, which has arrived. The stage before it is free from here on.
  __device__ __forceinline__ int next_stage() {
    start();
    cp_async_wait_group<Stages - 1>();
    const int stage = read_stage_;
    read_stage_ = read_stage_ + 1 == Stages ? 0 : read_stage_ + 1;
    return stage;
  }

 private:
  __device__ __forceinline__ void start() {
    copy_(write_stage_, range_.has());
    cp_async_commit_group();
    write_stage_ = write_stage_ + 1 == Stages ? 0 : write_stage_ + 1;
    range_.next += range_.step;
    if (!range_.any()) range_ = begin_(index_ += stride_);
  }

  const Begin& begin_;
  const Copy& copy_;
  uint32_t index_, stride_;
  HeadRange range_;
  int write_stage_ = 0, read_stage_ = 0;
};

// Returns the heads of a unit: eight, or four if the last CTA then ends sooner. A unit costs as much as its
// heads plus two.
inline int heads_per_unit_of(const RopeHeads& x, int64_t heads, int64_t lanes, int64_t blocks) {
  const int64_t rows = ceil_div(x.batch * x.tokens * heads, kThreads / lanes);
  const auto cost = [&](int heads_per_unit) {
    return ceil_div(ceil_div(rows, heads_per_unit), device_facts().sms * blocks) * (heads_per_unit + 2);
  };
  return cost(kFewHeads) < cost(kManyHeads) ? kFewHeads : kManyHeads;
}

// Returns the number of persistent CTAs: as many as are resident, or as there are tiles of work.
template <auto* kernel>
int64_t resident_blocks(const char* op, size_t shared, int64_t tiles) {
  static OccupancyCache occupancy;
  return std::min<int64_t>(tiles, std::max(1, occupancy.max_active(op, kernel, 1, kThreads, shared)));
}
template <auto* kernel, class Params>
void launch_persistent(const char* op, Context& ctx, size_t shared, int64_t tiles, const Params& p) {
  launch(op, ctx, kernel,
         {.blocks = resident_blocks<kernel>(op, shared, tiles),
          .threads = kThreads,
          .shared = shared,
          .pdl = true},
         p);
}

}  // namespace tigon::cuda::rope_kernels
