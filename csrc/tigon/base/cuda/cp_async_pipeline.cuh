// A multi-stage cp.async pipeline copies the rows of the next iterations to shared memory while the current
// ones are processed. Loads in flight need no registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

// Handles the full vectors of one tensor's rows that a thread uses: rows are `step` elements apart, with
// kConfig.vecs_per_thread aligned vectors each.
template <class T, int N, RowConfig kConfig>
class CpAsyncPipeline {
 public:
  static constexpr int M = 16 / int(sizeof(T)), kWords = N / M;
  // Returns the 16-byte words of shared memory per stage, for a row of `threads` threads.
  __host__ __device__ static constexpr int words(int threads) {
    return threads * kConfig.vecs_per_thread * kWords;
  }

  // Takes `first`, the first vector of the first row; `step`, the elements from row to row; `first_vec`, this
  // thread's first vector; `vec_stride`, the step from one of its vectors to the next; `vecs`, the vectors of
  // a row, 0 for an absent tensor; `pitch`, the words from stage to stage. Words that are never copied are
  // zeroed.
  __device__ __forceinline__ CpAsyncPipeline(const T* first, int64_t step, int first_vec, int vec_stride,
                                             int vecs, uint4* words, int pitch)
      : step_(step), vecs_(vecs), first_vec_(first_vec), vec_stride_(vec_stride), pitch_(pitch) {
    next_ = first + int64_t(first_vec) * N;
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
    const int vecs = valid ? vecs_ : 0;
#pragma unroll
    for (int i = 0; i < kConfig.vecs_per_thread; ++i)
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        cp_async_predicated(first_vec_ + i * vec_stride_ < vecs,
                            uint32_t(__cvta_generic_to_shared(to + i * row_threads<kConfig>() * kWords + j)),
                            next_ + i * vec_stride_ * N + j * M);
    next_ += step_;
  }
  // Returns vector i of this thread, which has copied its words itself.
  __device__ __forceinline__ Vec<T, N> vec(int stage, int i) const {
    const uint4* at = words_ + stage * pitch_ + i * row_threads<kConfig>() * kWords;
    Vec<T, N> r;
#pragma unroll
    for (int j = 0; j < kWords; ++j) reinterpret_cast<uint4*>(&r)[j] = at[j];
    return r;
  }

 private:
  // Points to this thread's first word of the row to be copied next.
  const T* next_;
  // Points to its place in stage 0.
  uint4* words_;
  int64_t step_;
  int vecs_, first_vec_, vec_stride_, pitch_;
};

}  // namespace tigon::cuda
