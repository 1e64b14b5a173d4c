// Rows on their way through shared memory: the words of the next turns are copied while this turn's rows are worked on, and no
// register waits for them. A row may lie anywhere (row_lie.cuh): its words are copied as they are, and what is not the row's in
// the first and the last of them is made zero when they have arrived, so that whoever reads packs of it need not look.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "tigon/base/cuda/async_copy.cuh"
#include "tigon/base/cuda/row_lie.cuh"
#include "tigon/base/cuda/rows.cuh"

namespace tigon::cuda {

// The rows of one tensor that a thread sees, a step apart, in packs of N elements, `Shape::held` of them a thread's. They all lie
// as its first one does (persistent_blocks sees to it), so all but a pointer is worked out once.
template <class T, int N, class Shape, Lying How>
class StagedRows {
 public:
  static constexpr int M = 16 / int(sizeof(T)), kWords = N / M;
  // Packs of a row that lies otherwise reach over the ends of this one.
  static constexpr int kBefore = How == Lying::apart ? kWords : 0,
                       kMargin = How == Lying::apart ? kWords + 1 : 0;
  // In shared memory, for a row of `threads` threads.
  __host__ __device__ static constexpr int words(int threads) {
    return threads * Shape::held * kWords + kMargin;
  }

  // `written`: elements between a boundary and the first one of the row that the packs are of; `pitch`: words from stage to stage.
  __device__ __forceinline__ StagedRows(const T* base, int64_t first, int64_t step, int64_t rows,
                                        int64_t stride, int cols, int written, uint4* words, int pitch)
      : rows_(rows), step_(step * stride), cols_(cols), pitch_(pitch) {
    const T* row = base + first * stride;
    const int lead = How == Lying::packs ? 0 : int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    count_ = (lead + cols + M - 1) / M;
    const int own = RowTile<Shape, kWords>::column(0);
    next_ = row - lead + int64_t(own) * M;
    words_ = words + kBefore + own;
    if constexpr (How != Lying::packs) {
      lead_ = lead;
      if ((lead + cols) % M != 0)  // from here on, the last word reaches over the end of memory
        over_ = stride > 0 ? max(int64_t(0), rows - (15 + stride) / stride) : 0;
      each([&](int i, int j, int k) {
        bool partial = (k == 0 && lead != 0) || (k == count_ - 1 && count_ * M != lead + cols);
        edges_ |= uint32_t(partial) << (i * kWords + j);
      });
    }
    if constexpr (How == Lying::apart) {
      const int apart = lead - written + N;  // >= 1
      down_ = apart / M - kWords, off_ = apart % M;
      const int thread = RowTile<Shape, 1>::thread(), threads = thread_stride<Shape>();
      for (int s = 0; s < Shape::stages; ++s)
        if (thread < kMargin)
          words[s * pitch + (thread < kBefore ? thread : StagedRows::words(threads) - 1)] = uint4{};
    }
  }

  // Starts the copies of this thread's words of `row`, which come in order: zeros where there is none. `memory`: any word of it.
  __device__ __forceinline__ void copy(int stage, int64_t row, bool wanted, const void* memory) {
    const int count = !wanted || row >= rows_ ? 0 : How == Lying::packs || row < over_ ? count_ : count_ - 1;
    uint4* to = words_ + stage * pitch_;
    each([&](int i, int j, int k) {
      const int at = k - RowTile<Shape, kWords>::column(0);
      copy_async(to + at, k < count ? next_ + int64_t(at) * M : memory, k < count ? 16 : 0);
    });
    next_ += step_;
  }
  // The words that this thread copied of `row` have arrived; `behind` rows have been started since.
  __device__ __forceinline__ void mend(int stage, int64_t row, int behind, bool wanted) const {
    if constexpr (How != Lying::packs) {
      if (edges_ == 0 || !wanted || row >= rows_) return;
#pragma unroll 1
      for (uint32_t left = edges_; left != 0; left &= left - 1) {
        const int which = __ffs(int(left)) - 1,
                  at = which / kWords * thread_stride<Shape>() * kWords + which % kWords;
        const int k = RowTile<Shape, kWords>::column(0) + at, begin = lead_ - k * M, end = begin + cols_;
        uint4& word = words_[stage * pitch_ + at];
        if (row >= over_ && k == count_ - 1) {
          const T* from = next_ - behind * step_ + int64_t(at) * M;
#pragma unroll 1
          for (int e = max(0, begin); e < end; ++e) reinterpret_cast<T*>(&word)[e] = from[e];
          asm volatile("" ::: "memory");  // word is read as another type
        }
        uint32_t w[4] = {word.x, word.y, word.z, word.w};
        constexpr int kEach = 4 / int(sizeof(T));
#pragma unroll
        for (int e = 0; e < M; ++e)
          if (e < begin || e >= end)
            w[e / kEach] &= ~((sizeof(T) == 4 ? 0xffffffffu : 0xffffu) << (e % kEach * 16));
        word = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
  // Pack i of this thread. All threads of the row have mended their words where it lies apart, else this one.
  __device__ __forceinline__ Pack<T, N> pack(int stage, int i) const {
    const uint4* at =
        words_ + stage * pitch_ + i * thread_stride<Shape>() * kWords + (How == Lying::apart ? down_ : 0);
    uint32_t w[4 * (kWords + 1)];
#pragma unroll
    for (int j = 0; j < kWords + (How == Lying::apart); ++j) reinterpret_cast<uint4&>(w[4 * j]) = at[j];
    if constexpr (How == Lying::apart) shift_words<T>(w, off_);
    Pack<T, N> r;
#pragma unroll
    for (int j = 0; j < 4 * kWords; ++j) reinterpret_cast<uint32_t*>(&r)[j] = w[j];
    return r;
  }

 private:
  // fn(pack of this thread, word of the pack, word of the row)
  template <class Fn>
  __device__ __forceinline__ static void each(Fn&& fn) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i)
#pragma unroll
      for (int j = 0; j < kWords; ++j) fn(i, j, RowTile<Shape, kWords>::column(i) + j);
  }

  const T* next_;  // of the row to be copied next, this thread's first word
  uint4* words_;   // where it goes in stage 0
  int64_t rows_, step_, over_ = INT64_MAX;
  int count_, cols_, pitch_, lead_ = 0, down_ = 0, off_ = 0;
  uint32_t edges_ = 0;  // which of this thread's words hold elements that are not the row's
};

__device__ __forceinline__ const void* word_of(const void* p) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) / 16 * 16);
}

// An array of what has no default.
template <class T, int K>
struct Several {
  T of[K];
};

// A shape of the row engine whose rows come so; Stages - 1 of them are on their way.
template <int Stages, class Rows>
struct StagedShape : Rows {
  static constexpr int stages = Stages;
};
template <int Stages, int Threads, int Held, int Rows, int MinBlocks>
using Staged = StagedShape<Stages, RowShape<Threads, Held, Rows, MinBlocks>>;
template <int Stages, int Held, int Most, int MinBlocks = 1>
using StagedBlock = StagedShape<Stages, RowBlock<Held, Most, MinBlocks>>;

// Persistent blocks of a section: all that are resident, no more than there are rows, and such that the rows of a block lie alike
// in every tensor, if they are `period` apart.
// 0 when a block needs more shared memory than there is. `known`: blocks a multiprocessor of this kernel, by warps, once asked.
template <class Shape, class Kernel>
int64_t persistent_blocks(const char* op, Kernel* kernel, int threads, size_t shared, int64_t rows,
                          int sections, int64_t period, std::atomic<int> (&known)[33]) {
  constexpr int kMost = 227 << 10;
  if (shared + 1024 > size_t(device_facts().shared_per_block)) return 0;
  std::atomic<int>& per_sm = known[threads / 32];
  if (per_sm == 0) {
    int n = 0;
    TIGON_CUDA_CHECK(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              std::min(kMost, device_facts().shared_per_block - 1024)));
    TIGON_CUDA_CHECK(op, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, threads, shared));
    per_sm = std::max(n, 1);
  }
  const int64_t resident = std::max<int64_t>(1, int64_t(device_facts().sms) * per_sm / sections);
  const int64_t blocks = std::min<int64_t>(ceil_div(rows, Shape::rows), resident);
  return blocks * Shape::rows < rows ? std::max(period, blocks / period * period) : blocks;
}

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
