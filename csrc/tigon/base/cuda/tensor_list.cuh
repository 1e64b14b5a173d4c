// Takes lists of tensors to one launch: a table of entries that the kernel reads, and the entry of a CTA. The
// table travels as kernel parameters, never by cudaMemcpyAsync: nothing waits, nothing must stay alive on the
// host, and a captured graph keeps its own copy. A short table is a parameter of the kernel itself. A longer
// one is written to scratch by small kernels, one for each block of it.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/tensor.h"

namespace tigon::cuda {

// A table may take this many bytes of a kernel's parameters, which are 4 KiB in all, or 32764 bytes from CUDA
// 12.1 on.
inline constexpr size_t kSmallTable = 3584, kLargeTable = CUDART_VERSION >= 12010 ? 32256 : kSmallTable;

template <size_t Bytes>
struct alignas(16) TableBlock {
  unsigned char bytes[Bytes];
};
// The kernels that read a table take this block, which holds it if their pointer to the table is null.
using SmallTable = TableBlock<kSmallTable>;

template <size_t Bytes>
__global__ void write_table_kernel(uint4* to, int vectors, const __grid_constant__ TableBlock<Bytes> block) {
  const uint4* from = reinterpret_cast<const uint4*>(block.bytes);
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = from[i];
}

// Appends records to a table of known size.
class TableWriter {
 public:
  TableWriter(const char* op, Context& ctx, size_t bytes) : op_(op), ctx_(ctx), limit_(block_bytes()) {
    if (bytes > kSmallTable)
      begin_ = next_ = static_cast<unsigned char*>(ctx.scratch((bytes + 15) / 16 * 16));
  }
  // Records have a multiple of 8 bytes; one may be split over two blocks.
  template <class T>
  void append(const T& record) {
    static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>);
    const auto* from = reinterpret_cast<const unsigned char*>(&record);
    for (size_t left = sizeof(T); left > 0;) {
      const size_t n = std::min(left, limit_ - used_);
      std::memcpy(block_.bytes + used_, from, n);
      used_ += n, from += n, left -= n;
      if (used_ == limit_ && begin_ != nullptr) flush();
    }
  }
  // run(table, block) launches a kernel that takes them.
  template <class Run>
  void finish(const Run& run) {
    if (begin_ != nullptr) flush();
    run(static_cast<const unsigned char*>(begin_), small());
  }

 private:
  const char* op_;
  Context& ctx_;
  size_t limit_, used_ = 0;
  // These are null if the table is short.
  unsigned char *begin_ = nullptr, *next_ = nullptr;
  TableBlock<kLargeTable> block_;

  static size_t block_bytes() {
    static const bool large = [] {
      int driver = 0;
      return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010;
    }();
    return large ? kLargeTable : kSmallTable;
  }
  SmallTable small() const {
    SmallTable block;
    std::memcpy(block.bytes, block_.bytes, std::min(used_, kSmallTable));
    return block;
  }
  void flush() {
    if (used_ == 0) return;
    const int vectors = int((used_ + 15) / 16);
    auto* to = reinterpret_cast<uint4*>(next_);
    if (limit_ == kLargeTable) {
      launch(op_, ctx_, write_table_kernel<kLargeTable>, {.threads = 512}, to, vectors, block_);
    } else {
      launch(op_, ctx_, write_table_kernel<kSmallTable>, {.threads = 256}, to, vectors, small());
    }
    next_ += used_, used_ = 0;
  }
};

// Returns the last entry whose first_chunk is <= chunk, found by the lanes of each warp together. Entries are
// ordered; those of empty tensors have the first_chunk of the next one.
template <class Entry>
__device__ __forceinline__ int find_entry(const Entry* entries, int count, int chunk) {
  const int lane = threadIdx.x % 32;
  int low = 0;
  while (count > 1) {
    const int step = (count + 31) / 32, probe = lane * step;
    const bool reached = probe < count && entries[low + probe].first_chunk <= chunk;
    const int passed = (__popc(__ballot_sync(0xffffffffu, reached)) - 1) * step;
    low += passed;
    count = min(step, count - passed);
  }
  return low;
}

// Serves ops whose lists have one vector per tensor.
struct VectorEntry {
  void* data;
  int64_t size;
  int32_t first_chunk;
  DType dtype;
};
static_assert(sizeof(VectorEntry) == 24);

// Returns the vector of CTA `blockIdx.x`: one chunk of at most `length` elements.
__device__ __forceinline__ Vector vector_chunk(const VectorEntry* entries, int count, int64_t length) {
  const int chunk = int(blockIdx.x);
  const VectorEntry e = entries[find_entry(entries, count, chunk)];
  const int64_t begin = int64_t(chunk - e.first_chunk) * length;
  return {.data = static_cast<char*>(e.data) + begin * int64_t(size_of(e.dtype)),
          .dtype = e.dtype,
          .size = min(length, e.size - begin)};
}

// Divides n elements from p, which may begin anywhere, into vectors of N and the elements before and after
// them.
template <int N, class T>
struct VectorSplit {
  int head, vecs, tail;
  __device__ __forceinline__ VectorSplit(const T* p, int n) {
    const int misaligned = int(reinterpret_cast<uintptr_t>(p) % (N * sizeof(T)) / sizeof(T));
    head = min((N - misaligned) % N, n), vecs = (n - head) / N, tail = n - head - vecs * N;
  }
  // Returns the element before or after the vectors that a thread of the CTA has, or -1. Needs 32 + N
  // threads.
  __device__ __forceinline__ int edge(int thread) const {
    if (thread < head) return thread;
    return thread >= 32 && thread - 32 < tail ? head + vecs * N + thread - 32 : -1;
  }
};

// Appends a list of vectors. Returns the number of its chunks.
inline int64_t append_vectors(const char* op, const char* name, TableWriter& table,
                              std::span<const Vector> list, int64_t length) {
  int64_t chunks = 0;
  for (const Vector& v : list) {
    table.append(
        VectorEntry{.data = v.data, .size = v.size, .first_chunk = int32_t(chunks), .dtype = v.dtype});
    chunks += ceil_div(v.size, length);
    TIGON_CHECK(op, chunks <= INT32_MAX, name, " must have less than 2^31 chunks of ", length,
                " elements in all");
  }
  return chunks;
}

}  // namespace tigon::cuda
