// How GroupNorm's kernels share out sections (a group of a sample, one stretch of memory) and hold them in shared memory.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/async_copy.cuh"
#include "tigon/base/cuda/cluster.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/row_packs.cuh"

namespace tigon::cuda {

constexpr int kSectionThreads = 512;  // of a block at most

// How a section is shared out, in packs: the pieces of its channels, in order, a block's side by side, one a team and turn.
struct Split {
  int channels, places;  // of a section, of a channel
  int across;            // lanes of a team: a power of two <= 32
  int pieces, length;    // of a channel, of a piece (the last one may be shorter)
  int turns;             // pieces of a team
  int blocks, threads;
  int held;  // packs of a block that shared memory holds

  __host__ __device__ int64_t size() const { return int64_t(channels) * places; }
  __host__ __device__ int64_t start(int64_t piece) const {
    const int64_t c = piece / pieces, at = c * places + (piece - c * pieces) * length;
    return at < size() ? at : size();
  }
  __host__ __device__ int of_block() const { return turns * (threads / across); }
};

// Of a piece, what a thread does: every `across`-th pack.
struct Mine {
  int channel, index;  // of the section, of the channel
  int first, packs;    // the first of the block's packs, how many
};

// What a thread has to do in its block.
struct Share {
  const Split& split;
  int64_t begin;  // of the block in the section
  int count, lane, rank;
  bool all_held;
  Mine first;

  __device__ __forceinline__ explicit Share(const Split& split) : split(split), rank(int(cluster_rank())) {
    lane = int(threadIdx.x) & (split.across - 1);
    begin = split.start(int64_t(rank) * split.of_block());
    count = int(split.start(int64_t(rank + 1) * split.of_block()) - begin);
    all_held = count <= split.held;
    first = find(0);
  }
  __device__ __forceinline__ Mine find(int turn) const {
    const int team = int(threadIdx.x) / split.across, teams = int(blockDim.x) / split.across;
    const int u = rank * split.of_block() + turn * teams + team, c = u / split.pieces,
              index = u - c * split.pieces;
    const int packs = c < split.channels ? min(split.length, split.places - index * split.length) : 0;
    return {min(c, split.channels - 1), index,
            int(int64_t(c) * split.places + index * split.length - begin) + lane,
            packs > lane ? (packs - lane + split.across - 1) / split.across : 0};
  }
  // Most teams have one turn, whose piece is known.
  __device__ __forceinline__ Mine mine(int turn) const { return turn == 0 ? first : find(turn); }
};

// The section that a cluster is at, every so many of them.
struct Sections {
  int64_t at, step, all, sample;
  int group, groups, samples_on, groups_on;

  __device__ __forceinline__ Sections(int64_t samples, int64_t groups_)
      : at(blockIdx.x / cluster_size()),
        step(gridDim.x / cluster_size()),
        all(samples * groups_),
        groups(int(groups_)) {
    sample = unsigned(at) / unsigned(groups), group = int(unsigned(at) % unsigned(groups));
    samples_on = int(unsigned(step) / unsigned(groups)), groups_on = int(unsigned(step) % unsigned(groups));
  }
  __device__ __forceinline__ bool there() const { return at < all; }
  __device__ __forceinline__ bool more() const { return at + step < all; }
  __device__ __forceinline__ bool wraps() const { return group + groups_on >= groups; }
  __device__ __forceinline__ void go_on() {
    sample += samples_on + wraps(), group += groups_on - (wraps() ? groups : 0);
    at += step;
  }
};
// From a matrix' part of this section to its part of the next one.
struct Step {
  int64_t on, wrap;
  __device__ __forceinline__ Step(const Sections& s, int64_t stride, int64_t size)
      : on(s.samples_on * stride + s.groups_on * size), wrap(on + stride - s.groups * size) {}
  template <class T>
  __device__ __forceinline__ T* operator()(T* part, const Sections& s) const {
    return part + (s.wraps() ? wrap : on);
  }
};

// A block's part of a section in shared memory. Packs: whole ones, each for the thread that reads it alone. N = 1: elements that
// begin anywhere, in the words that they touch, for all threads of the block.
template <class T, int N>
struct Image {
  static constexpr int kPerWord = N > 1 ? 1 : 16 / int(sizeof(T)), kEdges = N > 1 ? 0 : 2;
  uint4* words;
  const T* from;

  __device__ __forceinline__ void copy_pack(int i) const { copy_async(words + i, from + int64_t(i) * N); }
  // All of it.
  __device__ __forceinline__ void copy(const Share& share) const {
    const int held = min(share.split.held, share.count);
    if constexpr (N > 1) {
      for (int turn = 0; turn < share.split.turns; ++turn) {
        const Mine mine = share.mine(turn);
        for (int k = 0, i = mine.first; k < mine.packs && i < held; ++k, i += share.split.across)
          copy_pack(i);
      }
    } else {
      const Row<const T> row(from, held);
      for (int k = int(threadIdx.x); k < row.packs; k += int(blockDim.x)) {
        if (row.whole(k)) {
          copy_async(words + k, row.base + int64_t(k) * kPerWord);
        } else {
          T* to = reinterpret_cast<T*>(words + k);
          for (int j = 0; j < kPerWord; ++j)
            if (row.has(row.column(k) + j)) to[j] = from[row.column(k) + j];
        }
      }
    }
  }
  __device__ __forceinline__ Pack<T, N> held(int i) const {
    if constexpr (N > 1) {
      const uint4 w = words[i];
      return reinterpret_cast<const Pack<T, N>&>(w);
    } else {
      return {
          {reinterpret_cast<const T*>(words)[int(reinterpret_cast<uintptr_t>(from) % 16 / sizeof(T)) + i]}};
    }
  }
  __device__ __forceinline__ Pack<T, N> beyond(int i) const {
    return load_stream<T, N>(from + int64_t(i) * N);
  }
};

// fn(pack of the block, its packs of the images), some at a time.
template <class T, int N, int K, class Fn>
__device__ __forceinline__ void for_packs(const Share& share, const Mine& mine,
                                          const Image<T, N> (&images)[K], const Fn& fn) {
  constexpr int kTogether = 4 / K;
  const int step = share.split.across;
  int i = mine.first, left = mine.packs;
  if (share.all_held) {
#pragma unroll 1
    for (; left >= kTogether; left -= kTogether, i += kTogether * step) {
      Pack<T, N> q[kTogether][K];
#pragma unroll
      for (int r = 0; r < kTogether; ++r)
#pragma unroll
        for (int k = 0; k < K; ++k) q[r][k] = images[k].held(i + r * step);
#pragma unroll
      for (int r = 0; r < kTogether; ++r) fn(i + r * step, q[r]);
    }
  }
#pragma unroll 1
  for (; left > 0; --left, i += step) {
    Pack<T, N> q[K];
#pragma unroll
    for (int k = 0; k < K; ++k) q[k] = i < share.split.held ? images[k].held(i) : images[k].beyond(i);
    fn(i, q);
  }
}

// A team adds up at most `longest` packs a lane; as few turns as can be, then as few warps: what a warp does once for a section is
// as much as six packs' work.
inline Split split_of(int64_t channels, int64_t places, int64_t blocks, int64_t longest, bool packs) {
  int64_t across = 32;
  while (across > 1 && ceil_div(places, across) * across - places > places / (packs ? 8 : 3)) across /= 2;
  const int64_t most = blocks * kSectionThreads * longest;
  for (int64_t turns = std::max<int64_t>(1, channels * places / most);; ++turns)
    for (int64_t warps = 1; warps <= kSectionThreads / 32; ++warps) {
      const int64_t of_channel = turns * blocks * warps * (32 / across) / channels;
      if (of_channel == 0) continue;
      const int64_t length = ceil_div(ceil_div(places, of_channel), across) * across;
      if (length > across * longest) continue;
      return {.channels = int(channels),
              .places = int(places),
              .across = int(across),
              .pieces = int(ceil_div(places, length)),
              .length = int(length),
              .turns = int(turns),
              .blocks = int(blocks),
              .threads = int(warps * 32),
              .held = 0};
    }
}

}  // namespace tigon::cuda
