// How GroupNorm's kernels share out sections (a group of a sample, one stretch of memory), and how warps tell what they have found.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/divider.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

constexpr int kSectionThreads = 320;  // of a block at most
constexpr int kMostSectionBlocks = 16, kMostEntries = kMostSectionBlocks * kSectionThreads / 32;

// How a section is shared out, in packs. Its channels are cut into pieces, one a team of adjacent lanes; the pieces that a warp's teams
// have at a time are a step, some steps in a row an entry of what is found. All this depends on the section alone, and entries are added
// in their order: sums do not depend on how many warps and blocks share the work.
struct Partition {
  int channels, vecs_per_channel;             // of a section, of a channel
  int lanes_per_piece, log2_lanes_per_piece;  // lanes of a team: a power of two <= 32; of which power
  int pieces, piece_vecs;                     // of a channel, of a piece (the last one may be shorter)
  int steps_per_entry, entries;               // steps of an entry, entries of a section
  int iterations;                             // steps of a warp
  int blocks, threads;                        // of a section, of a block
  Divider by_blocks, by_pieces;

  __host__ __device__ int64_t size() const { return int64_t(channels) * vecs_per_channel; }
};

// Of a piece, what a lane does: every `across`-th pack.
struct Piece {
  int channel, index;  // of the section, of the channel
  int first, vecs;     // the first pack in the section, how many
};

// A thread's share of its section.
struct ThreadCoord {
  const Partition& partition;
  unsigned section, sample, group;
  int warp, lane, rank;  // warp: of the section; lane: of the team

  __device__ __forceinline__ ThreadCoord(const Partition& partition, const Divider& by_groups)
      : partition(partition) {
    section = partition.by_blocks.divide(blockIdx.x),
    rank = int(blockIdx.x - section * unsigned(partition.blocks));
    sample = by_groups.divide(section), group = section - sample * by_groups.divisor;
    warp = rank * int(blockDim.x / 32) + int(threadIdx.x / 32),
    lane = int(threadIdx.x) & (partition.lanes_per_piece - 1);
  }
  template <class T>
  __device__ __forceinline__ T* part(T* of, int64_t stride, int64_t size) const {
    return of + (int64_t(sample) * stride + int64_t(group) * size);
  }
  __device__ __forceinline__ Piece piece(int iteration) const {
    // `across` is a power of two.
    const unsigned u = (unsigned(warp * partition.iterations + iteration) * 32 + threadIdx.x % 32) >>
                       partition.log2_lanes_per_piece;
    const int c = int(partition.by_pieces.divide(u)), index = int(u) - c * partition.pieces;
    const int vecs = c < partition.channels ? min(partition.piece_vecs,
                                                  partition.vecs_per_channel - index * partition.piece_vecs)
                                            : 0;
    return {
        min(c, partition.channels - 1), index,
        c * partition.vecs_per_channel + index * partition.piece_vecs + lane,
        vecs > lane ? (vecs - lane + partition.lanes_per_piece - 1) >> partition.log2_lanes_per_piece : 0};
  }
  __device__ __forceinline__ int entry(int iteration) const {
    return (warp * partition.iterations + iteration) / partition.steps_per_entry;
  }
};

// A lane's packs of a piece of several inputs, all on their way at a time.
template <class T, int N, int VecsPerThread, int Ins>
__device__ __forceinline__ void load_piece(const ThreadCoord& coord, const Piece& piece,
                                           const T* const (&from)[Ins], Vec<T, N> (&x)[VecsPerThread][Ins]) {
#pragma unroll
  for (int r = 0; r < VecsPerThread; ++r)
#pragma unroll
    for (int i = 0; i < Ins; ++i)
      x[r][i] = load_predicated<T, N>(
          r < piece.vecs, from[i] + (int64_t(piece.first) + r * coord.partition.lanes_per_piece) * N);
}

// What all warps of a section have found. V is 8 or 16 bytes and has V::none(), and merge(list, entries), by all lanes of a warp.
template <class V>
struct SectionReduceStorage {
  V list[kMostEntries];
  uint64_t barrier;

  // All threads, before what they load; then before they tell.
  __device__ __forceinline__ void init(const Partition& partition) {
    if (partition.blocks == 1) return;
    if (threadIdx.x == 0) {
      mbarrier_init(&barrier);
      mbarrier_arrive_expect_tx(&barrier, partition.entries * int(sizeof(V)));
    }
    cluster_arrive();
  }
  __device__ __forceinline__ void wait_for_cluster(const Partition& partition) const {
    if (partition.blocks > 1) cluster_wait();
  }
  __device__ __forceinline__ void publish(const Partition& partition, int entry, const V& v) {
    const int lane = int(threadIdx.x % 32);
    if (entry >= partition.entries) return;
    if (partition.blocks == 1) {
      if (lane == 0) list[entry] = v;
    } else if (lane < partition.blocks) {
      st_async(&list[entry], unsigned(lane), v, &barrier);
    }
  }
  // A block has all that others write to it before it goes on: they need not meet again.
  __device__ __forceinline__ V collect(const Partition& partition) const {
    if (partition.blocks == 1)
      __syncthreads();
    else
      mbarrier_wait_parity(&barrier, 0);
    return V::merge(list, partition.entries);
  }
};

// Pieces of at most `held` packs a lane, of so many lanes that there are few steps; of eight at least, which read a line of memory.
inline Partition make_partition(int64_t channels, int64_t vecs_per_channel, int64_t vecs_per_thread) {
  TIGON_CHECK("group_norm", vecs_per_channel * channels <= INT32_MAX,
              "a group has at most 2^31 packs of 16 bytes (elements, where it "
              "begins elsewhere), got ",
              vecs_per_channel * channels);
  int64_t log2_lanes = 0, piece_vecs = 0, steps = INT64_MAX / 16;
  for (int l = 5; l >= 0; --l) {
    const int64_t lanes_per_piece = int64_t(1) << l,
                  wanted_vecs = ceil_div(vecs_per_channel,
                                         ceil_div(vecs_per_channel, lanes_per_piece * vecs_per_thread));
    const int64_t of_piece = ceil_div(wanted_vecs, lanes_per_piece) * lanes_per_piece;
    const int64_t needed = ceil_div(channels * ceil_div(vecs_per_channel, of_piece), 32 / lanes_per_piece);
    if (l < 3 && lanes_per_piece < vecs_per_channel) break;
    if (needed * 10 < steps * 9) log2_lanes = l, piece_vecs = of_piece, steps = needed;
  }
  const int64_t lanes_per_piece = int64_t(1) << log2_lanes, pieces = ceil_div(vecs_per_channel, piece_vecs);
  const int64_t steps_per_entry = ceil_div(steps, kMostEntries);
  return {.channels = int(channels),
          .vecs_per_channel = int(vecs_per_channel),
          .lanes_per_piece = int(lanes_per_piece),
          .log2_lanes_per_piece = int(log2_lanes),
          .pieces = int(pieces),
          .piece_vecs = int(piece_vecs),
          .steps_per_entry = int(steps_per_entry),
          .entries = int(ceil_div(steps, steps_per_entry)),
          .iterations = int(steps_per_entry),
          .blocks = 1,
          .threads = 32,
          .by_blocks = Divider(1),
          .by_pieces = Divider(pieces)};
}
// By so many blocks of at most so many warps: as few turns as can be, then as few warps.
inline Partition with_blocks(Partition partition, int64_t blocks, int64_t warps) {
  const int64_t runs = ceil_div(partition.entries, blocks * warps);  // of a warp
  partition.iterations = int(runs * partition.steps_per_entry);
  partition.blocks = int(blocks);
  partition.by_blocks = Divider(blocks);
  partition.threads = int(ceil_div(ceil_div(partition.entries, runs), blocks) * 32);
  return partition;
}

}  // namespace tigon::cuda
