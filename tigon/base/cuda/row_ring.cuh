// Rows that pass through the shared memory of a block, or of the blocks of a cluster, in a ring of chunks (sm_90 on). Workers read a
// chunk as often as they like and release it; a warp of its own, the feeder, asks for the next one as soon as all have.
// Nothing else holds them together: warps may be a row or two apart.
#pragma once

#include "tigon/base/cuda/async_copy.cuh"
#include "tigon/base/cuda/cluster.cuh"
#include "tigon/base/cuda/row_packs.cuh"

namespace tigon::cuda {

// Rows that count (or do not), dealt out one by one; asked by all lanes of a warp together. Rows: rows, their number, which is also
// what comes after the last; labels, null where all count; ignored(r).
template <bool Ignored = false>
struct Deal {
  int at = 0;  // the first label not looked at
  template <class Rows>
  __device__ int next(const Rows& p, int skip) {
    const int rows = int(p.rows), lane = int(threadIdx.x) % 32;
    if (p.labels == nullptr) {
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

// The rows of one of `takers`, one after another.
template <class Rows>
struct DealTo {
  const Rows& p;
  int skip;
  const int step;
  Deal<> deal;
  __device__ DealTo(const Rows& p, int taker, int takers) : p(p), skip(taker), step(takers - 1) {}
  __device__ __forceinline__ int end() const { return int(p.rows); }
  __device__ __forceinline__ int operator()() {
    const int row = deal.next(p, skip);
    skip = step;
    return row;
  }
};

// Zeros in the gradients of rows that do not count, every so many of them by a warp, some packs at a time. Rows, besides: cols; gradient(r),
// null where none is wanted; pass(r), what else there is to do for such a row, by one thread.
template <class Rows>
struct Clearing {
  static constexpr int kPacks = 8;  // of a lane, at a time
  const Rows& p;
  const int first, step_by;
  Deal<true> deal;
  int row = -1, at = 0;

  // The `first` warp of `warps`.
  __device__ Clearing(const Rows& p, int first, int warps) : p(p), first(first), step_by(warps) {}

  // False when there is no more. A whole warp.
  __device__ __forceinline__ bool step() {
    const int rows = int(p.rows), lane = int(threadIdx.x) % 32;
    if (p.labels == nullptr || row >= rows) return false;
    if (at == 0) {
      row = deal.next(p, row < 0 ? first : step_by - 1);
      if (row >= rows) return false;
      if (lane == 0) p.pass(row);
    }
    auto* out = p.gradient(row);
    if (out == nullptr) return true;
    const Row to(out, p.cols);
    constexpr int N = decltype(to)::N;
    if (at > 0 && to.whole(at + kPacks * 32 - 1)) {
      auto* words = reinterpret_cast<uint4*>(to.base) + at + lane;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) words[i * 32] = make_uint4(0, 0, 0, 0);
    } else {
      const float zeros[N] = {};
#pragma unroll 1
      for (int i = 0; i < kPacks; ++i)
        if (const int k = at + i * 32 + lane; k < to.packs) store_pack(to, k, zeros);
    }
    at += kPacks * 32;
    if (at >= to.packs) at = 0;
    return true;
  }
};

// Warps at work, packs of a worker in a chunk of each of several tensors.
template <int Warps, int Packs, int Tensors>
struct RingShape {
  static constexpr int warps = Warps, workers = Warps * 32, packs = Packs, tensors = Tensors;
  static constexpr int chunk = workers * packs;                  // packs, of a tensor
  static constexpr int slots = 229376 / (chunk * tensors * 16);  // 3 KB are left
  static constexpr size_t shared = size_t(slots) * chunk * tensors * 16;
};

// A place in the ring, and how often the ring has been gone round.
template <class Shape>
struct RingPlace {
  int slot = 0, round = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == Shape::slots) slot = 0, ++round;
  }
};

template <class Shape>
struct Ring {
  using Place = RingPlace<Shape>;
  uint64_t full[Shape::slots], empty[Shape::slots];
  int row[Shape::slots];

  // One thread, before the block and its cluster meet.
  __device__ void init() {
    for (int i = 0; i < Shape::slots; ++i) arrival_init(&full[i]), arrival_init(&empty[i], Shape::warps);
  }
  // This worker's pack of a chunk; `memory`: the ring's, aligned to 16 bytes.
  __device__ static __forceinline__ uint4* pack(uint4* memory, const Place& at, int tensor, int i) {
    return memory + ((at.slot * Shape::tensors + tensor) * Shape::packs + i) * Shape::workers + threadIdx.x;
  }
  // The row that a chunk, which is waited for, is of.
  __device__ __forceinline__ int wait(const Place& at) {
    arrival_wait<false>(&full[at.slot], at.round & 1);
    return row[at.slot];
  }
  __device__ __forceinline__ void release(const Place& at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrival_arrive(&empty[at.slot]);
  }

  // The feeder, a whole warp: the `chunks` chunks of every row that next() names, then one of none for the row that is next.end().
  // at(row, tensor): its first pack, aligned to 16 bytes; words(row): its whole packs (what the last one holds in part is left to
  // the workers).
  template <class Next, class At, class Words>
  __device__ __forceinline__ void feed(uint4* memory, int chunks, Next next, At&& at, Words&& words) {
    constexpr int kBytes = Shape::chunk * 16;
    Place place;
    for (int r = next();; r = next()) {
      const bool last = r >= next.end();
      const int whole = last ? 0 : words(r);
      for (int h = 0; h < (last ? 1 : chunks); ++h, place.advance()) {
        if (place.round > 0) arrival_wait<false>(&empty[place.slot], (place.round - 1) & 1);
        if (threadIdx.x % 32 == 0) {
          const int bytes = min(max(whole - h * Shape::chunk, 0), Shape::chunk) * 16;
          row[place.slot] = r;
          arrival_expect(&full[place.slot], Shape::tensors * bytes);
          copy_bulk_after_stores();  // a worker may have written to the slot
          if (bytes > 0) {
#pragma unroll
            for (int t = 0; t < Shape::tensors; ++t)
              copy_bulk(shared_address(memory) + (place.slot * Shape::tensors + t) * kBytes,
                        reinterpret_cast<const char*>(at(r, t)) + int64_t(h) * kBytes, bytes,
                        &full[place.slot]);
          }
        }
        __syncwarp();
      }
      if (last) break;
    }
  }
};

}  // namespace tigon::cuda
