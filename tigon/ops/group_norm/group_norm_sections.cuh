// How GroupNorm's kernels share out sections (a group of a sample, one stretch of memory), and how warps tell what they have found.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/cluster.cuh"
#include "tigon/base/cuda/divider.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

constexpr int kSectionThreads = 320;  // of a block at most
constexpr int kMostSectionBlocks = 16, kMostEntries = kMostSectionBlocks * kSectionThreads / 32;

// How a section is shared out, in packs. Its channels are cut into pieces, one a team of adjacent lanes; the pieces that a warp's teams
// have at a time are a step, some steps in a row an entry of what is found. All this depends on the section alone, and entries are added
// in their order: sums do not depend on how many warps and blocks share the work.
struct Split {
  int channels, places;    // of a section, of a channel
  int across, log_across;  // lanes of a team: a power of two <= 32; of which power
  int pieces, length;      // of a channel, of a piece (the last one may be shorter)
  int run, entries;        // steps of an entry, entries of a section
  int turns;               // steps of a warp
  int blocks, threads;     // of a section, of a block
  Divider by_blocks, by_pieces;

  __host__ __device__ int64_t size() const { return int64_t(channels) * places; }
};

// Of a piece, what a lane does: every `across`-th pack.
struct Piece {
  int channel, index;  // of the section, of the channel
  int first, packs;    // the first pack in the section, how many
};

// A thread's share of its section.
struct Share {
  const Split& split;
  unsigned section, sample, group;
  int warp, lane, rank;  // warp: of the section; lane: of the team

  __device__ __forceinline__ Share(const Split& split, const Divider& by_groups) : split(split) {
    section = split.by_blocks.divide(blockIdx.x), rank = int(blockIdx.x - section * unsigned(split.blocks));
    sample = by_groups.divide(section), group = section - sample * by_groups.divisor;
    warp = rank * int(blockDim.x / 32) + int(threadIdx.x / 32), lane = int(threadIdx.x) & (split.across - 1);
  }
  template <class T>
  __device__ __forceinline__ T* part(T* of, int64_t stride, int64_t size) const {
    return of + (int64_t(sample) * stride + int64_t(group) * size);
  }
  __device__ __forceinline__ Piece piece(int turn) const {
    // `across` is a power of two.
    const unsigned u = (unsigned(warp * split.turns + turn) * 32 + threadIdx.x % 32) >> split.log_across;
    const int c = int(split.by_pieces.divide(u)), index = int(u) - c * split.pieces;
    const int packs = c < split.channels ? min(split.length, split.places - index * split.length) : 0;
    return {min(c, split.channels - 1), index, c * split.places + index * split.length + lane,
            packs > lane ? (packs - lane + split.across - 1) >> split.log_across : 0};
  }
  __device__ __forceinline__ int entry(int turn) const { return (warp * split.turns + turn) / split.run; }
};

// A lane's packs of a piece of several inputs, all on their way at a time.
template <class T, int N, int Held, int Ins>
__device__ __forceinline__ void load_piece(const Share& share, const Piece& piece,
                                           const T* const (&from)[Ins], Pack<T, N> (&x)[Held][Ins]) {
#pragma unroll
  for (int r = 0; r < Held; ++r)
#pragma unroll
    for (int i = 0; i < Ins; ++i)
      x[r][i] =
          load_where<T, N>(r < piece.packs, from[i] + (int64_t(piece.first) + r * share.split.across) * N);
}

// What all warps of a section have found. V is 8 or 16 bytes and has V::none(), and merge(list, entries), by all lanes of a warp.
template <class V>
struct Found {
  V list[kMostEntries];
  uint64_t arrival;

  // All threads, before what they load; then before they tell.
  __device__ __forceinline__ void begin(const Split& split) {
    if (split.blocks == 1) return;
    if (threadIdx.x == 0) {
      arrival_init(&arrival);
      arrival_expect(&arrival, split.entries * int(sizeof(V)));
    }
    cluster_arrive();
  }
  __device__ __forceinline__ void meet(const Split& split) const {
    if (split.blocks > 1) cluster_wait();
  }
  __device__ __forceinline__ void tell(const Split& split, int entry, const V& v) {
    const int lane = int(threadIdx.x % 32);
    if (entry >= split.entries) return;
    if (split.blocks == 1) {
      if (lane == 0) list[entry] = v;
    } else if (lane < split.blocks) {
      put_arriving(&list[entry], unsigned(lane), v, &arrival);
    }
  }
  // A block has all that others write to it before it goes on: they need not meet again.
  __device__ __forceinline__ V all(const Split& split) const {
    if (split.blocks == 1)
      __syncthreads();
    else
      arrival_wait(&arrival, 0);
    return V::merge(list, split.entries);
  }
};

// Pieces of at most `held` packs a lane, of so many lanes that there are few steps; of eight at least, which read a line of memory.
inline Split split_of(int64_t channels, int64_t places, int64_t held) {
  TIGON_CHECK("group_norm", places * channels <= INT32_MAX,
              "a group has at most 2^31 packs of 16 bytes (elements, where it "
              "begins elsewhere), got ",
              places * channels);
  int64_t log = 0, length = 0, steps = INT64_MAX / 16;
  for (int l = 5; l >= 0; --l) {
    const int64_t across = int64_t(1) << l, wanted = ceil_div(places, ceil_div(places, across * held));
    const int64_t of_piece = ceil_div(wanted, across) * across;
    const int64_t needed = ceil_div(channels * ceil_div(places, of_piece), 32 / across);
    if (l < 3 && across < places) break;
    if (needed * 10 < steps * 9) log = l, length = of_piece, steps = needed;
  }
  const int64_t across = int64_t(1) << log, pieces = ceil_div(places, length);
  const int64_t run = ceil_div(steps, kMostEntries);
  return {.channels = int(channels),
          .places = int(places),
          .across = int(across),
          .log_across = int(log),
          .pieces = int(pieces),
          .length = int(length),
          .run = int(run),
          .entries = int(ceil_div(steps, run)),
          .turns = int(run),
          .blocks = 1,
          .threads = 32,
          .by_blocks = Divider(1),
          .by_pieces = Divider(pieces)};
}
// By so many blocks of at most so many warps: as few turns as can be, then as few warps.
inline Split shared_by(Split split, int64_t blocks, int64_t warps) {
  const int64_t runs = ceil_div(split.entries, blocks * warps);  // of a warp
  split.turns = int(runs * split.run);
  split.blocks = int(blocks);
  split.by_blocks = Divider(blocks);
  split.threads = int(ceil_div(ceil_div(split.entries, runs), blocks) * 32);
  return split;
}

}  // namespace tigon::cuda
