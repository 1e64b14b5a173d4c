// Says how GroupNorm's kernels divide a section (one group of one sample, contiguous in memory), and how its
// warps combine their results.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/divider.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

// A CTA has at most this many threads.
constexpr int kSectionThreads = 320;
constexpr int kMaxSectionBlocks = 16, kMaxEntries = kMaxSectionBlocks * kSectionThreads / 32;

// Divides a section, in vectors. Channels are divided into pieces, each of which some adjacent lanes process.
// The pieces that a warp processes at a time are a step; some consecutive steps form an entry of the
// reduction. Steps and entries depend on the section only, and entries are added in their order, so that sums
// do not depend on the number of warps and CTAs.
struct Partition {
  // Counts the channels of a section.
  int channels, vecs_per_channel;
  // Lanes that share a piece: a power of two <= 32, and its logarithm.
  int lanes_per_piece, log2_lanes_per_piece;
  // Counts the pieces of a channel, and the vectors of a piece, of which the last one may have fewer.
  int pieces, piece_vecs;
  // Counts the entries of a section.
  int steps_per_entry, entries;
  // Counts the steps of a warp.
  int iterations;
  // Counts the CTAs of a section and the threads of a CTA.
  int blocks, threads;
  Divider by_blocks, by_pieces;

  __host__ __device__ int64_t size() const { return int64_t(channels) * vecs_per_channel; }
};

// A lane processes every lanes_per_piece-th vector of a piece.
struct Piece {
  // Gives the channel within the section, and the piece within the channel.
  int channel, index;
  // Gives the first vector within the section, and the number of vectors.
  int first, vecs;
};

// Gives the position of a thread in its section.
struct ThreadCoord {
  const Partition& partition;
  unsigned section, sample, group;
  // `warp` counts within the section, `lane` within the lanes of a piece.
  int warp, lane, rank;

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
    // lanes_per_piece is a power of two.
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

// Loads a lane's vectors of a piece of several inputs, all in flight at once.
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

// Holds the entries of all warps of a section. V has 8 or 16 bytes, V::identity(), and merge(list, entries),
// which all lanes of a warp call.
template <class V>
struct SectionReduceStorage {
  V list[kMaxEntries];
  uint64_t barrier;

  // All threads call init() before their loads, and wait_for_cluster() before they publish.
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
  // A CTA has received everything that others write to it when this returns, so no cluster barrier
  // is needed at exit.
  __device__ __forceinline__ V collect(const Partition& partition) const {
    if (partition.blocks == 1)
      __syncthreads();
    else
      mbarrier_wait_parity(&barrier, 0);
    return V::merge(list, partition.entries);
  }
};

// Returns pieces of at most vecs_per_thread vectors per lane, with the number of lanes that gives the fewest
// steps; at least eight lanes, which read a 128-byte line.
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
    const int64_t vecs_per_piece = ceil_div(wanted_vecs, lanes_per_piece) * lanes_per_piece;
    const int64_t needed =
        ceil_div(channels * ceil_div(vecs_per_channel, vecs_per_piece), 32 / lanes_per_piece);
    if (l < 3 && lanes_per_piece < vecs_per_channel) break;
    if (needed * 10 < steps * 9) log2_lanes = l, piece_vecs = vecs_per_piece, steps = needed;
  }
  const int64_t lanes_per_piece = int64_t(1) << log2_lanes, pieces = ceil_div(vecs_per_channel, piece_vecs);
  const int64_t steps_per_entry = ceil_div(steps, kMaxEntries);
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
// Divides the entries over `blocks` CTAs of at most `warps` warps: as few iterations as possible, then as few
// warps.
inline Partition with_blocks(Partition partition, int64_t blocks, int64_t warps) {
  // Counts the entries of a warp.
  const int64_t runs = ceil_div(partition.entries, blocks * warps);
  partition.iterations = int(runs * partition.steps_per_entry);
  partition.blocks = int(blocks);
  partition.by_blocks = Divider(blocks);
  partition.threads = int(ceil_div(ceil_div(partition.entries, runs), blocks) * 32);
  return partition;
}

}  // namespace tigon::cuda
