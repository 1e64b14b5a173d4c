// The host side makes tensor maps and launches as many clusters as are resident.
#pragma once

#include <array>
#include <atomic>

#include "tigon/base/context.h"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/matmul/kernel.cuh"
#include "tigon/base/cuda/matmul/tensor_map.h"

namespace tigon::cuda::matmul {

template <class T>
constexpr CUtensorMapDataType kTensorMapType =
    std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// True if TMA takes the matrix: its rows begin at multiples of 16 bytes.
inline bool is_tma_matrix(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

template <class T, View kView>
CUtensorMap make_map(const char* op, const void* data, int64_t inner, int64_t outer, int64_t stride, int box,
                     int64_t count) {
  if constexpr (kView == View::ragged)
    return make_ragged_tensor_map(op, data, kTensorMapType<T>, inner, stride, box);
  else
    return make_tensor_map(op, data, kTensorMapType<T>, inner, outer, stride, box, count);
}

struct Options {
  int64_t count = 1;   // adjacent matrices, or groups
  bool lower = false;  // only tiles that are not above the diagonal
  // [count + 1]: the first rows of the groups, along M (rows) or K (depth).
  const int32_t* offsets = nullptr;
  // If not 0, B's columns are two halves of this many, and tiles take half of their columns from each.
  int64_t halves = 0;
  // With kGather, row r of A is row order[r] / choices of g.a.
  const int32_t* order = nullptr;
  int64_t choices = 1;
};

// Computes the sum of the GEMMs g.a and g.b [op(A) op(B)] of `kSources` problems of one M and N, with the
// layouts of `kMajorA` and `kMajorB`, and passes it to the epilogue. A source without K, which may not be the
// first, adds nothing.
template <class T, Major kMajorA, Major kMajorB, class Epilogue, Groups kGroups = Groups::none,
          int kSources = 1, bool kGather = false>
struct Matmul {
  using Loop = Mainloop<T, kMajorA, kMajorB, kGroups, kSources, kGather>;
  using Scheduler = TileScheduler<kGroups>;
  static constexpr auto kernel = &matmul_kernel<Loop, Epilogue, Scheduler>;
  static constexpr size_t kShared = sizeof(SharedStorage<Loop, Epilogue>);

  // True if this device runs the kernel: compiled for anything but sm_90a it is empty, and its launch bound
  // says so.
  static bool is_available(const char* op) {
    if (device_facts().capability < 90) return false;
    static std::atomic<int> bound[kMaxDevices];
    std::atomic<int>& known = bound[current_device(op)];
    if (known == 0) {
      cudaFuncAttributes attributes;
      TIGON_CUDA_CHECK(op, cudaFuncGetAttributes(&attributes, kernel));
      known = attributes.maxThreadsPerBlock;
    }
    return known >= kThreads;
  }

  static void run(const char* op, Context& ctx, const std::array<Gemm, kSources>& sources,
                  const typename Epilogue::Params& epilogue, const Options& options = {}) {
    static OccupancyCache occupancy;
    KernelParams<Loop, Epilogue, Scheduler> p;
    for (int i = 0; i < kSources; ++i) {
      const Gemm& g = sources[i].k > 0 ? sources[i] : sources[0];
      p.mainloop.k_blocks[i] = int(ceil_div(sources[i].k, int64_t(kTileK)));
      p.scheduler.k_blocks += p.mainloop.k_blocks[i];
      p.mainloop.a[i] = map<kMajorA, Loop::kViewA>(op, g.a, g.m, g.k, g.lda, Loop::kBoxA, options.count);
      p.mainloop.b[i] = map<kMajorB, Loop::kViewB>(op, g.b, g.n, g.k, g.ldb, Loop::kBoxB, options.count);
    }
    if constexpr (kSources == 2)
      if (sources[1].k > 0)
        p.mainloop.last_blocks = int(ceil_div((sources[1].k - 1) % kTileK + 1, int64_t(16)));
    const Gemm& g = sources[0];
    p.mainloop.halves = int(options.halves);
    p.mainloop.rows = static_cast<const uint4*>(g.a);
    p.mainloop.order = options.order;
    p.mainloop.choices = int(options.choices);
    p.mainloop.k_vecs = int(g.k / 8);
    p.mainloop.row_vecs = uint32_t(g.lda / 8);
    p.epilogue = epilogue;
    p.scheduler.m = int(g.m);
    p.scheduler.tiles_n = int(ceil_div(g.n, int64_t(kTileN)));
    p.scheduler.matrices = int(options.count);
    p.scheduler.lower = options.lower;
    p.scheduler.offsets = options.offsets;
    // This is at least the number of pairs.
    const int64_t tiles = ceil_div(g.m, int64_t(kTileM)) * p.scheduler.tiles_n * options.count;
    const int clusters =
        int(std::min<int64_t>(occupancy.max_active(op, kernel, kCluster, kThreads, kShared), tiles));
    TIGON_CHECK(op, clusters > 0, "a cluster of ", kCluster, " CTAs must fit on the device, found none");
    launch(op, ctx, kernel,
           {.blocks = clusters * kCluster,
            .threads = kThreads,
            .shared = kShared,
            .pdl = true,
            .cluster = kCluster},
           p);
  }

 private:
  template <Major kMajor, View kView>
  static CUtensorMap map(const char* op, const void* data, int64_t mn, int64_t k, int64_t stride, int box,
                         int64_t count) {
    const int64_t inner = kMajor == Major::K ? k : mn, outer = kMajor == Major::K ? mn : k;
    return make_map<T, kView>(op, data, inner, outer, stride, box, kView == View::stack ? count : 1);
  }
};

}  // namespace tigon::cuda::matmul
