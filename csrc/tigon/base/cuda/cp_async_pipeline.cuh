// A multi-stage cp.async pipeline for rows: the rows of the next iterations are copied to shared
// memory while the current ones are processed, without registers for loads in flight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/cuda/row_view.cuh"

namespace tigon::cuda {

// The full vectors of the rows of one tensor that a thread uses: rows `step` elements apart,
// kConfig.vecs_per_thread vectors each. kMixedOffset: the vectors are not aligned, so aligned words
// are copied and shifted when they are read.
template <class T, int N, RowConfig kConfig, bool kMixedOffset>
class CpAsyncPipeline {
 public:
  static constexpr int M = 16 / int(sizeof(T)), kWords = N / M;
  // 16-byte words of shared memory per stage for a row of `threads` threads.
  __host__ __device__ static constexpr int words(int threads) {
    return (threads * kConfig.vecs_per_thread + kMixedOffset) * kWords;
  }

  // `first`: the first vector of the first row; `step`: elements from row to row; `first_vec`: this
  // thread's first vector; `vec_stride`: from one of its vectors to the next; `vecs`: vectors of a
  // row, 0 for a tensor that is absent; `end`: end of the tensor; `pitch`: words from stage to
  // stage. Words that are never copied are zeroed.
  __device__ __forceinline__ CpAsyncPipeline(const T* first, int64_t step, int first_vec, int vec_stride,
                                             int vecs, const T* end, uint4* words, int pitch)
      : step_(step), vecs_(vecs), first_vec_(first_vec), vec_stride_(vec_stride), pitch_(pitch), end_(end) {
    off_ = kMixedOffset ? int(reinterpret_cast<uintptr_t>(first) % 16 / sizeof(T)) : 0;
    next_ = first - off_ + int64_t(first_vec) * N;
    words_ = words + RowTile<kConfig, kWords>::column(0);
#pragma unroll
    for (int i = 0; i < kConfig.vecs_per_thread; ++i) {
      if (first_vec + i * vec_stride < vecs) continue;
#pragma unroll
      for (int j = 0; j < kConfig.stages * kWords; ++j)
        words_[j / kWords * pitch + i * row_threads<kConfig>() * kWords + j % kWords] = uint4{};
    }
  }

  // Starts the copies of this thread's words of the next row, or of nothing unless `valid`. Rows
  // come in order.
  __device__ __forceinline__ void copy(int stage, bool valid) {
    uint4* to = words_ + stage * pitch_;
    // The last word may be partial.
    const int vecs = valid ? vecs_ + (kMixedOffset && vecs_ > 0 && off_ != 0) : 0;
    auto at = [&](int i, int j) {
      return uint32_t(__cvta_generic_to_shared(to + i * row_threads<kConfig>() * kWords + j));
    };
    if (!kMixedOffset || next_ + int64_t(vecs - first_vec_) * N <= end_) {
#pragma unroll
      for (int i = 0; i < kConfig.vecs_per_thread; ++i)
#pragma unroll
        for (int j = 0; j < kWords; ++j)
          cp_async_predicated(first_vec_ + i * vec_stride_ < vecs, at(i, j),
                              next_ + i * vec_stride_ * N + j * M);
    } else {
      // The last row of the tensor.
#pragma unroll 1
      for (int i = 0; i < kConfig.vecs_per_thread && first_vec_ + i * vec_stride_ < vecs; ++i)
#pragma unroll 1
        for (int j = 0; j < kWords; ++j) {
          const T* from = next_ + i * vec_stride_ * N + j * M;
          cp_async_partial(at(i, j), from, int(min(end_ - from, int64_t(M))) * int(sizeof(T)));
        }
    }
    next_ += step_;
  }
  // Vector i of this thread. Its words were copied by this thread, with kMixedOffset also by the
  // next one.
  __device__ __forceinline__ Vec<T, N> vec(int stage, int i) const {
    if (kMixedOffset && first_vec_ + i * vec_stride_ >= vecs_) return {};
    const uint4* at = words_ + stage * pitch_ + i * row_threads<kConfig>() * kWords;
    uint32_t w[4 * (kWords + 1)];
#pragma unroll
    for (int j = 0; j < kWords + kMixedOffset; ++j) reinterpret_cast<uint4&>(w[4 * j]) = at[j];
    if constexpr (kMixedOffset) shift_words<T>(w, off_);
    Vec<T, N> r;
#pragma unroll
    for (int j = 0; j < 4 * kWords; ++j) reinterpret_cast<uint32_t*>(&r)[j] = w[j];
    return r;
  }
  // Overwrites a vector that this thread has copied.
  __device__ __forceinline__ void overwrite(int stage, int i, const Vec<T, N>& vec) const {
    static_assert(!kMixedOffset);
    cuda::store(reinterpret_cast<T*>(words_ + stage * pitch_ + i * row_threads<kConfig>() * kWords), vec);
  }

 private:
  // This thread's first word of the row to be copied next.
  const T* next_;
  // Its place in stage 0.
  uint4* words_;
  int64_t step_;
  int vecs_, first_vec_, vec_stride_, pitch_, off_;
  const T* end_;
};

// Synchronises the threads that share a row.
template <RowConfig kConfig>
__device__ __forceinline__ void sync_row() {
  static_assert(kConfig.rows_per_block == 1 || kConfig.threads_per_row <= 32);
  if constexpr (kConfig.rows_per_block == 1)
    __syncthreads();
  else
    __syncwarp();
}

}  // namespace tigon::cuda
