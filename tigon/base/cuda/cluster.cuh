// Thread-block clusters (sm_90 on): blocks that run together and write into each other's shared memory. On older machines a
// block is alone and nothing here does anything.
#pragma once

#include <cstdint>

namespace tigon::cuda {

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned r = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
  return r;
}
__device__ __forceinline__ unsigned cluster_size() {
  unsigned n = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
  return n;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// *local = value in the shared memory of the block of that rank.
__device__ __forceinline__ void put_remote(float* local, unsigned rank, float value) {
#if __CUDA_ARCH__ >= 900
  uint32_t address = uint32_t(__cvta_generic_to_shared(local)), remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#endif
}

}  // namespace tigon::cuda
