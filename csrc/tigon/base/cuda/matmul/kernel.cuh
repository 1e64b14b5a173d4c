// The persistent GEMM kernel has a producer warpgroup, two consumer warpgroups, and one CTA per SM.
#pragma once

#include "tigon/base/cuda/matmul/mainloop.cuh"

namespace tigon::cuda::matmul {

template <class Mainloop, class Epilogue, class Scheduler>
struct KernelParams {
  typename Mainloop::Params mainloop;
  typename Epilogue::Params epilogue;
  typename Scheduler::Params scheduler;
};
template <class Mainloop, class Epilogue>
struct SharedStorage {
  typename Mainloop::Tensors mainloop;
  typename Epilogue::Tensors epilogue;
  typename Mainloop::Barriers barriers;
};

constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
// wgmma exists on sm_90a only. Compiled for anything else the kernel is empty, and its launch bound tells the
// host so.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TIGON_NO_WGMMA
constexpr int kBound = 32;
#else
constexpr int kBound = kThreads;
#endif

template <class Mainloop, class Epilogue, class Scheduler>
__global__ void __launch_bounds__(kBound, 1)
    matmul_kernel(const __grid_constant__ KernelParams<Mainloop, Epilogue, Scheduler> p) {
#ifndef TIGON_NO_WGMMA
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  auto& smem = *reinterpret_cast<SharedStorage<Mainloop, Epilogue>*>(dynamic_smem);
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroup, 0);
  const unsigned rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (const CUtensorMap& map : p.mainloop.a) prefetch_tensormap(&map);
    for (const CUtensorMap& map : p.mainloop.b) prefetch_tensormap(&map);
    smem.barriers.init();
  }
  cluster_arrive();
  cluster_wait();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  typename Mainloop::PipelineState state;
  Scheduler scheduler(int(blockIdx.x) / kCluster, int(gridDim.x) / kCluster, rank);
  Tile tile;
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    if (threadIdx.x < Mainloop::kLoaders)
      while (scheduler.next(p.scheduler, tile))
        if constexpr (Mainloop::kLoaders == 1)
          Mainloop::load(p.mainloop, smem.mainloop, smem.barriers, state, int(rank), tile);
        else
          Mainloop::gather(p.mainloop, smem.mainloop, smem.barriers, state, int(rank), tile);
  } else {
    setmaxnreg_inc<232>();
    float acc[kAccumulators];
    while (scheduler.next(p.scheduler, tile)) {
      Epilogue epilogue(p.epilogue, tile, warpgroup - 1);
      Mainloop::mma(p.mainloop, tile.k_blocks, smem.mainloop, smem.barriers, state, warpgroup - 1, acc);
      epilogue.run(p.epilogue, smem.epilogue, warpgroup - 1, acc);
    }
    Epilogue::finish();
  }
  __syncwarp();
  // A CTA stays while others of its cluster may still write to its shared memory.
  cluster_arrive();
  cluster_wait();
#endif
}

}  // namespace tigon::cuda::matmul
