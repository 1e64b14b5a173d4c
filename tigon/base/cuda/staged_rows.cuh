// Rows on their way through shared memory: the words of the next turns are copied while this turn's rows are worked on, and no
// register waits for them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tigon/base/cuda/async_copy.cuh"
#include "tigon/base/cuda/row_lie.cuh"
#include "tigon/base/cuda/rows.cuh"

namespace tigon::cuda {

// The whole packs of the rows of one tensor that a thread sees, a step apart, `Shape::held` of them a thread's. Apart: they lie across
// the words of memory, which are copied as they are and put together when they are read.
template <class T, int N, class Shape, bool Apart>
class StagedRows {
 public:
  static constexpr int M = 16 / int(sizeof(T)), kWords = N / M;
  // In shared memory, for a row of `threads` threads.
  __host__ __device__ static constexpr int words(int threads) {
    return (threads * Shape::held + Apart) * kWords;
  }

  // `first`: the first pack of the first row, `step`: elements to the next one, `pack`: this thread's first, `apart`: packs from one of
  // its packs to the next; `packs` in a row, none of a tensor that is not there; `end` of memory; `pitch`: words from stage to stage.
  // What is never copied stays zero.
  __device__ __forceinline__ StagedRows(const T* first, int64_t step, int pack, int apart, int packs,
                                        const T* end, uint4* words, int pitch)
      : step_(step), packs_(packs), pack_(pack), apart_(apart), pitch_(pitch), end_(end) {
    off_ = Apart ? int(reinterpret_cast<uintptr_t>(first) % 16 / sizeof(T)) : 0;
    next_ = first - off_ + int64_t(pack) * N;
    words_ = words + RowTile<Shape, kWords>::column(0);
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) {
      if (pack + i * apart < packs) continue;
#pragma unroll
      for (int j = 0; j < Shape::stages * kWords; ++j)
        words_[j / kWords * pitch + i * thread_stride<Shape>() * kWords + j % kWords] = uint4{};
    }
  }

  // Starts the copies of this thread's words of the next row, which come in order, if there is one.
  __device__ __forceinline__ void copy(int stage, bool live) {
    uint4* to = words_ + stage * pitch_;
    const int packs = live ? packs_ + (Apart && packs_ > 0 && off_ != 0) : 0;  // the last one in part
    auto at = [&](int i, int j) {
      return uint32_t(__cvta_generic_to_shared(to + i * thread_stride<Shape>() * kWords + j));
    };
    if (!Apart || next_ + int64_t(packs - pack_) * N <= end_) {
#pragma unroll
      for (int i = 0; i < Shape::held; ++i)
#pragma unroll
        for (int j = 0; j < kWords; ++j)
          copy_async_where(pack_ + i * apart_ < packs, at(i, j), next_ + i * apart_ * N + j * M);
    } else {  // the last row of memory
#pragma unroll 1
      for (int i = 0; i < Shape::held && pack_ + i * apart_ < packs; ++i)
#pragma unroll 1
        for (int j = 0; j < kWords; ++j) {
          const T* from = next_ + i * apart_ * N + j * M;
          copy_async_upto(at(i, j), from, int(min(end_ - from, int64_t(M))) * int(sizeof(T)));
        }
    }
    next_ += step_;
  }
  // Pack i of this thread, which all threads of the row have copied where it lies apart, else this one.
  __device__ __forceinline__ Pack<T, N> pack(int stage, int i) const {
    if (Apart && pack_ + i * apart_ >= packs_) return {};
    const uint4* at = words_ + stage * pitch_ + i * thread_stride<Shape>() * kWords;
    uint32_t w[4 * (kWords + 1)];
#pragma unroll
    for (int j = 0; j < kWords + Apart; ++j) reinterpret_cast<uint4&>(w[4 * j]) = at[j];
    if constexpr (Apart) shift_words<T>(w, off_);
    Pack<T, N> r;
#pragma unroll
    for (int j = 0; j < 4 * kWords; ++j) reinterpret_cast<uint32_t*>(&r)[j] = w[j];
    return r;
  }
  // In the place of what this thread has copied.
  __device__ __forceinline__ void put(int stage, int i, const Pack<T, N>& pack) const {
    static_assert(!Apart);
    cuda::store(reinterpret_cast<T*>(words_ + stage * pitch_ + i * thread_stride<Shape>() * kWords), pack);
  }

 private:
  const T* next_;  // of the row to be copied next, this thread's first word
  uint4* words_;   // where it goes in stage 0
  int64_t step_;
  int packs_, pack_, apart_, pitch_, off_;
  const T* end_;
};

// A shape of the row engine whose rows come so, Stages of them; Lead: how many rows the first of two passes is ahead of the second.
template <int Stages, class Rows, int Lead = 0>
struct StagedShape : Rows {
  static constexpr int stages = Stages, lead = Lead;
  static_assert(Stages > Lead + 1);
};
template <int Stages, int Threads, int Held, int Rows, int MinBlocks>
using Staged = StagedShape<Stages, RowShape<Threads, Held, Rows, MinBlocks>>;
template <int Stages, int Held, int Most, int MinBlocks = 1, int Lead = 0>
using StagedBlock = StagedShape<Stages, RowBlock<Held, Most, MinBlocks>, Lead>;

// All threads that share a row.
template <class Shape>
__device__ __forceinline__ void sync_row() {
  static_assert(Shape::rows == 1 || Shape::threads <= 32);
  if constexpr (Shape::rows == 1)
    __syncthreads();
  else
    __syncwarp();
}

}  // namespace tigon::cuda
