// The host's side: tensor maps, and a launch of as many clusters as are resident.
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

// Whether TMA takes a matrix: rows that begin at multiples of 16 bytes.
inline bool is_tma_matrix(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

// The sum of the products g.a and g.b [op(A) op(B)] of `kSources` problems of one M and N, with the layouts of `kMajorA` and
// `kMajorB`; what becomes of it is the epilogue's. A source without K, which may not be the first, adds nothing. Of `count` adjacent
// matrices each; `lower`: only of the tiles that are not above the diagonal.
template <class T, Major kMajorA, Major kMajorB, class Epilogue, int kSources = 1>
struct Matmul {
  using Loop = Mainloop<T, kMajorA, kMajorB, kSources>;
  static constexpr auto kernel = &matmul_kernel<Loop, Epilogue>;
  static constexpr size_t kShared = sizeof(SharedStorage<Loop, Epilogue>);

  // Whether this device runs it: a kernel compiled for anything but sm_90a is empty, and says so by its bound.
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
                  const typename Epilogue::Params& epilogue, int64_t count = 1, bool lower = false) {
    static OccupancyCache occupancy;
    KernelParams<Loop, Epilogue> p;
    auto map = [&](const void* data, Major major, int64_t mn, int64_t k, int64_t stride, int box) {
      return make_tensor_map(op, data, kTensorMapType<T>, major == Major::K ? k : mn,
                             major == Major::K ? mn : k, stride, box, count);
    };
    for (int i = 0; i < kSources; ++i) {
      const Gemm& g = sources[i];
      p.mainloop.k_blocks[i] = int(ceil_div(g.k, int64_t(kTileK)));
      const bool any = g.k > 0;
      p.mainloop.a[i] = any ? map(g.a, kMajorA, g.m, g.k, g.lda, Loop::kBoxA) : p.mainloop.a[0];
      p.mainloop.b[i] = any ? map(g.b, kMajorB, g.n, g.k, g.ldb, Loop::kBoxB) : p.mainloop.b[0];
    }
    p.epilogue = epilogue;
    p.scheduler = {.tiles_m = int(ceil_div(sources[0].m, int64_t(kTileM * kCluster))),
                   .tiles_n = int(ceil_div(sources[0].n, int64_t(kTileN))),
                   .matrices = int(count),
                   .lower = lower};
    const int clusters = std::min(occupancy.max_active(op, kernel, kCluster, kThreads, kShared),
                                  p.scheduler.tiles() * p.scheduler.matrices);
    TIGON_CHECK(op, clusters > 0, "a cluster of ", kCluster, " CTAs must fit on the device, found none");
    launch(op, ctx, kernel,
           {.blocks = clusters * kCluster,
            .threads = kThreads,
            .shared = kShared,
            .pdl = true,
            .cluster = kCluster},
           p);
  }
};

}  // namespace tigon::cuda::matmul
