// The main loop multiplies the operands of a tile (sm_90a): one thread brings tiles of A and B to shared
// memory by TMA, and two warpgroups multiply them by wgmma. A ring of stages is between them, each with a
// full and an empty barrier.
#pragma once

#include "tigon/base/cuda/matmul/ptx.cuh"
#include "tigon/base/cuda/matmul/tensor_map.h"
#include "tigon/base/cuda/matmul/tile_scheduler.cuh"

namespace tigon::cuda::matmul {

// Names the contiguous dimension of an operand: K, or M of A and N of B.
enum class Major { K, MN };

constexpr int kWarpgroup = 128, kConsumers = 2, kStages = 4;
// The first consumer ends a tile, and begins the next one, kLead steps of K before the second: while one is
// in its epilogue the other uses the tensor cores. The stages of these steps are held until both have read
// them, so there are fewer than kStages.
constexpr int kLead = 3, kTurnBarrier = 3;
static_assert(kLead < kStages);
constexpr int kAccumulators = kTileN / 2;  // per thread

// Says what a tensor map covers: one matrix; one matrix for each GEMM or group; or the rows of all groups one
// after the other, of which a box takes only those of the tile's group.
enum class View { matrix, stack, ragged };
constexpr View view_of_a(Groups g) {
  return g == Groups::none ? View::stack : g == Groups::rows ? View::matrix : View::ragged;
}
constexpr View view_of_b(Groups g) { return g == Groups::depth ? View::ragged : View::stack; }
constexpr View view_of_d(Groups g) { return g == Groups::rows ? View::ragged : View::stack; }

// Returns the coordinates of a box whose first row is `row`.
template <View kView>
__device__ __forceinline__ auto outer_coordinates(const Tile& tile, int row) {
  if constexpr (kView == View::ragged)
    return int3{kRagged - (tile.end - row), kRagged, tile.end};
  else
    return int2{row, kView == View::stack ? tile.matrix : 0};
}

// CTAs of a cluster that compute tiles below each other share columns of B: each loads half of them and
// multicasts it. `kSources` pairs of A and B follow each other along K: the sum of their matmuls has one
// accumulator and one store. With `kGather`, groups' rows of the first A are gathered as they are loaded.
template <class T, Major kMajorA, Major kMajorB, Groups kGroups, int kSources, bool kGather>
struct Mainloop {
  static_assert(!kGather || (kMajorA == Major::K && kGroups == Groups::rows && kSources <= 2));
  static constexpr int kLoaders = kGather ? kWarpgroup : 1;  // in threads
  static constexpr View kViewA = view_of_a(kGroups), kViewB = view_of_b(kGroups);
  // Counts the columns of half a tile of B, and the rows and columns of a box of TMA.
  static constexpr int kLoadB = kTileN / kCluster;
  static constexpr int kBoxA = kMajorA == Major::K ? kTileM : 64, kBoxB = kMajorB == Major::K ? kLoadB : 64;
  static constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2;

  struct Params {
    CUtensorMap a[kSources], b[kSources];
    int k_blocks[kSources];
    // If not 0, B's columns are in two halves, of which a tile has 128 columns each, and the second half
    // begins here.
    int halves = 0;
    // With kGather, row r of A is row order[r] / choices of `rows`, which begin 16 row_vecs bytes apart and
    // have k_vecs vectors of 16 bytes.
    const uint4* rows;
    const int32_t* order;
    int choices, k_vecs;
    uint32_t row_vecs;
    // Counts the blocks of 16 of the last step of K; used with two sources, of which the second is short.
    int last_blocks = kTileK / 16;
  };
  struct Tensors {
    alignas(1024) uint8_t a[kStages][kBytesA];
    alignas(1024) uint8_t b[kStages][kBytesB];
  };
  struct Barriers {
    uint64_t full[kStages], empty[kStages];
    // One thread calls it before the cluster synchronises.
    __device__ void init() {
      for (int i = 0; i < kStages; ++i)
        mbarrier_init(&full[i], kGather ? 1 + kWarpgroup : 1),
            mbarrier_init(&empty[i], kConsumers * (kWarpgroup / 32) * kCluster);
    }
  };
  // Names a stage, and the parity with which its full barrier completes next.
  struct PipelineState {
    int stage = 0, phase = 0;
    __device__ __forceinline__ void advance() {
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  };

  // Loads the operands of the tile, by one thread.
  __device__ static __forceinline__ void load(const Params& p, Tensors& smem, Barriers& barriers,
                                              PipelineState& state, int rank, const Tile& tile) {
#pragma unroll
    for (int source = 0; source < kSources; ++source)
#pragma unroll 1
      for (int k = 0; k < (kSources == 1 ? tile.k_blocks : p.k_blocks[source]); ++k, state.advance()) {
        const int s = state.stage;
        uint64_t* full = &barriers.full[s];
        mbarrier_wait_parity(&barriers.empty[s], state.phase ^ 1);
        mbarrier_arrive_expect_tx(full, kBytesA + kBytesB);
        load_boxes<kMajorA, kViewA, kTileM, kBoxA, false>(p.a[source], smem.a[s], full, tile, tile.m, k);
        load_b(p, smem, full, rank, tile, source, k, s);
      }
  }

  // Does the same by the producer warpgroup if the groups' rows of A are rows of a shorter matrix: eight
  // threads copy a row.
  __device__ static __forceinline__ void gather(const Params& p, Tensors& smem, Barriers& barriers,
                                                PipelineState& state, int rank, const Tile& tile) {
    constexpr int kRows = kTileM / (kWarpgroup / 8);
    const int first = int(threadIdx.x) / 8, part = int(threadIdx.x) % 8;
    // Past the group's last row this row is loaded again, and nobody uses it.
    uint32_t from[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      from[i] = uint32_t(p.order[min(tile.m + first + 16 * i, tile.end - 1)] / p.choices) * p.row_vecs + part;
    const int gathered = kSources == 1 ? tile.k_blocks : p.k_blocks[0];
#pragma unroll 1
    for (int k = 0; k < tile.k_blocks; ++k, state.advance()) {
      const int s = state.stage;
      uint64_t* full = &barriers.full[s];
      mbarrier_wait_parity(&barriers.empty[s], state.phase ^ 1);
      if constexpr (kSources > 1)
        if (k >= gathered) {
          if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(full, kBytesA + kBytesB);
            load_boxes<kMajorA, kViewA, kTileM, kBoxA, false>(p.a[1], smem.a[s], full, tile, tile.m,
                                                              k - gathered);
            load_b(p, smem, full, rank, tile, 1, k - gathered, s);
          }
          mbarrier_arrive(full);
          continue;
        }
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(full, kBytesB);
        load_b(p, smem, full, rank, tile, 0, k, s);
      }
      const uint32_t to = cast_smem_ptr_to_uint(smem.a[s]) + first * 128 + (part ^ first % 8) * 16;
      // The last step of K ends before its stage does.
      const bool inside = k * (kTileK / 8) + part < p.k_vecs;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        cp_async(to + i * 16 * 128, p.rows + (inside ? from[i] + k * (kTileK / 8) : 0), inside ? 16 : 0);
      cp_async_mbarrier_arrive_noinc(full);
    }
  }

  // Runs on a consumer warpgroup, which takes rows from 64 * consumer on of the tile. The barriers are those
  // of its next stage.
  __device__ static __forceinline__ void mma(const Params& p, int k_blocks, Tensors& smem, Barriers& barriers,
                                             PipelineState& state, int consumer,
                                             float (&acc)[kAccumulators]) {
    // At step `stop` this consumer waits for the other one, and at step `go` it lets the other one go on. A
    // short tile does neither.
    const bool first = consumer == 0, takes_turns = k_blocks > 2 * kLead;
    const int stop = takes_turns ? first ? kLead : k_blocks - kLead : -1,
              go = takes_turns ? first ? k_blocks - 1 : kLead - 1 : -1;
    const uint64_t a = descriptor<kMajorA>(smem.a[0]) + (64 * kTileK * 2 * consumer >> 4),
                   b = descriptor<kMajorB>(smem.b[0]);
    PipelineState released = state;
    // The last step of two sources has as many blocks as there are columns: as an own loop its MMAs are not
    // in a branch.
    constexpr bool kShortLast = kSources == 2;
    auto step = [&]<bool kLast>(int k) {
      if (k == stop) bar_sync(kTurnBarrier + consumer, kConsumers * kWarpgroup);
      mbarrier_wait_parity<false>(&barriers.full[state.stage], state.phase);
      // cp.async wrote A.
      if constexpr (kGather) fence_proxy_async();
      const uint64_t stage_a = a + uint32_t(state.stage * kBytesA >> 4),
                     stage_b = b + uint32_t(state.stage * kBytesB >> 4);
      wgmma_fence();
      auto block = [&](int i) {
        wgmma_m64n256k16<T, kMajorA == Major::MN, kMajorB == Major::MN>(
            acc, stage_a + i * kStepK<kMajorA>, stage_b + i * kStepK<kMajorB>, k + i != 0);
      };
      if constexpr (kLast) {
#pragma unroll 1
        for (int i = 0; i < p.last_blocks; ++i) wgmma_fence(), block(i);
      } else {
#pragma unroll
        for (int i = 0; i < kTileK / 16; ++i) block(i);
      }
      wgmma_commit_group();
      if (k == go) bar_arrive(kTurnBarrier + 1 - consumer, kConsumers * kWarpgroup);
      wgmma_wait_group<1>();
      if (k > 0) release(barriers, released);
      state.advance();
    };
    int k = 0;
#pragma unroll 1
    for (; k < k_blocks - int(kShortLast); ++k) step.template operator()<false>(k);
    if constexpr (kShortLast) step.template operator()<true>(k);
    wgmma_wait(acc);
    release(barriers, released);
  }

 private:
  // Loads columns of B for stage s, or half of them if the other CTA brings the others.
  __device__ static __forceinline__ void load_b(const Params& p, Tensors& smem, uint64_t* full, int rank,
                                                const Tile& tile, int source, int k, int s) {
    auto load_half = [&]<bool kMulticast>(int half) {
      load_boxes<kMajorB, kViewB, kLoadB, kBoxB, kMulticast>(
          p.b[source], smem.b[s] + half * kLoadB * kTileK * 2, full, tile,
          p.halves > 0 ? tile.n / 2 + half * p.halves : tile.n + half * kLoadB, k);
    };
    if (tile.shares_b)
      load_half.template operator()<true>(rank);
    else
      load_half.template operator()<false>(0), load_half.template operator()<false>(1);
  }
  template <Major kMajor, View kView, int kRows, int kBox, bool kMulticast>
  __device__ static __forceinline__ void load_boxes(const CUtensorMap& map, uint8_t* to, uint64_t* barrier,
                                                    const Tile& tile, int mn, int k) {
    const int depth = k * kTileK + (kView == View::ragged ? tile.begin : 0);
#pragma unroll
    for (int i = 0; i < kRows; i += kBox)
      cp_async_bulk_tensor_load<kMulticast>(
          cast_smem_ptr_to_uint(to + i * kTileK * 2), &map, kMajor == Major::K ? depth : mn + i,
          outer_coordinates<kView>(tile, kMajor == Major::K ? mn + i : depth), barrier, (1 << kCluster) - 1);
  }

  // Both CTAs write to the stage, so both learn that a warp has read it.
  __device__ static __forceinline__ void release(Barriers& barriers, PipelineState& released) {
    if (const unsigned lane = threadIdx.x % 32; lane < kCluster)
      mbarrier_arrive_cluster(&barriers.empty[released.stage], lane);
    released.advance();
  }

  // Returns wgmma's matrix descriptor of a tile in swizzled rows of 128 bytes, in units of 16 bytes. Eight
  // such rows are 1024 bytes, which is the stride of M or N for K-major operands, and that of K for others;
  // those have M or N in blocks of 64. The address has 18 bits: above them is the CTA's rank.
  template <Major kMajor>
  __device__ static __forceinline__ uint64_t descriptor(const uint8_t* tile) {
    constexpr uint64_t kSwizzle128B = 1, kRows8 = 1024 >> 4, kBlock64 = 64 * kTileK * 2 >> 4;
    return kSwizzle128B << 62 | kRows8 << 32 | (kMajor == Major::K ? 1 : kBlock64) << 16 |
           (cast_smem_ptr_to_uint(tile) & 0x3ffff) >> 4;
  }
  // Returns the step from one block of 16 along K to the next, in units of 16 bytes.
  template <Major kMajor>
  static constexpr uint32_t kStepK = (kMajor == Major::K ? 16 * 2 : 16 * 128) >> 4;
};

}  // namespace tigon::cuda::matmul
