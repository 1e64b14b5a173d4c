// Thread-block clusters (sm_90 on): blocks that run together and write into each other's shared memory. On older machines a
// block is alone and nothing here does anything.
#pragma once

#include <cstdint>
#include <cstring>

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

// Values that announce themselves: a barrier in shared memory counts the bytes that arrive. One phase: one thread expects,
// the blocks put, everyone waits with the phase's parity (0, 1, 0, ...). Or, within a block, `count` threads arrive. One thread sets the barrier up before the cluster
// meets for the first time.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void arrival_init(uint64_t* barrier, int count = 1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrival_expect(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void arrival_arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
// Far: what other blocks have put is to be read; such a wait empties the first-level cache.
template <bool Far = true>
__device__ __forceinline__ void arrival_wait(const uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done;
  do {
    if constexpr (Far)
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(shared_address(barrier)), "r"(parity)
          : "memory");
    else
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(shared_address(barrier)), "r"(parity)
          : "memory");
  } while (done == 0);
#endif
}
// *local = value in the shared memory of the block of that rank, its 8 or 16 bytes on that block's barrier.
template <class T>
__device__ __forceinline__ void put_arriving(T* local, unsigned rank, const T& value, uint64_t* barrier) {
  static_assert(sizeof(T) == alignof(T) && (sizeof(T) == 8 || sizeof(T) == 16));
#if __CUDA_ARCH__ >= 900
  uint32_t to, to_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(local)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to_barrier) : "r"(shared_address(barrier)), "r"(rank));
  if constexpr (sizeof(T) == 8) {
    uint64_t v;
    memcpy(&v, &value, sizeof v);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
                 "l"(v), "r"(to_barrier)
                 : "memory");
  } else {
    uint4 v;
    memcpy(&v, &value, sizeof v);
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(to_barrier)
        : "memory");
  }
#endif
}

}  // namespace tigon::cuda
