// A multi-stage cp.async pipeline for rows: the rows of the next iterations are copied to shared
// memory while the current ones are processed, without registers for loads in flight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

// The full vectors of the rows of one tensor that a thread uses: rows `step` elements apart,
// kConfig.vecs_per_thread aligned vectors each.
template <class T, int N, RowConfig kConfig>
class CpAsyncPipeline {
 public:
  static constexpr int M = 16 / int(sizeof(T)), kWords = N / M;
  // 16-byte words of shared memory per stage for a row of `threads` threads.
  __host__ __device__ static constexpr int words(int threads) {
    return threads * kConfig.vecs_per_thread * kWords;
  }

  // `first`: the first vector of the first row; `step`: elements from row to row; `first_vec`: this
  // thread's first vector; `vec_stride`: from one of its vectors to the next; `vecs`: vectors of a
  // row, 0 for a tensor that is absent; `pitch`: words from stage to stage. Words that are never
  // copied are zeroed.
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
  // Vector i of this thread, which has copied its words itself.
  __device__ __forceinline__ Vec<T, N> vec(int stage, int i) const {
    const uint4* at = words_ + stage * pitch_ + i * row_threads<kConfig>() * kWords;
    Vec<T, N> r;
#pragma unroll
    for (int j = 0; j < kWords; ++j) reinterpret_cast<uint4*>(&r)[j] = at[j];
    return r;
  }

 private:
  // This thread's first word of the row to be copied next.
  const T* next_;
  // Its place in stage 0.
  uint4* words_;
  int64_t step_;
  int vecs_, first_vec_, vec_stride_, pitch_;
};

}  // namespace tigon::cuda
