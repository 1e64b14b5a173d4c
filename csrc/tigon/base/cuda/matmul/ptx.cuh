// Wraps the PTX of GEMM on sm_90a under PTX's names: copies by tensor maps, barriers of a cluster, wgmma.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "tigon/base/cuda/ptx.cuh"

namespace tigon::cuda::matmul {

// --- tensor maps: copies of boxes by one thread --------------------------------------------------

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copies the box at (x, y), where y holds the coordinates of two dimensions or three, with zeros outside the
// tensor, to the same place in every CTA of `mask`. There it completes on the same barrier.
template <bool kMulticast>
__device__ __forceinline__ void cp_async_bulk_tensor_load(uint32_t to, const CUtensorMap* map, int x, int2 y,
                                                          uint64_t* barrier, uint16_t mask) {
  if constexpr (kMulticast)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(x), "r"(y.x), "r"(y.y), "r"(cast_smem_ptr_to_uint(barrier)), "h"(mask)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(x), "r"(y.x), "r"(y.y), "r"(cast_smem_ptr_to_uint(barrier))
        : "memory");
}
template <bool kMulticast>
__device__ __forceinline__ void cp_async_bulk_tensor_load(uint32_t to, const CUtensorMap* map, int x, int3 y,
                                                          uint64_t* barrier, uint16_t mask) {
  if constexpr (kMulticast)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(map), "r"(x), "r"(y.x), "r"(y.y), "r"(y.z), "r"(cast_smem_ptr_to_uint(barrier)), "h"(mask)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(x), "r"(y.x), "r"(y.y), "r"(y.z), "r"(cast_smem_ptr_to_uint(barrier))
        : "memory");
}
// Stores the part of the box at (x, y) that is inside the tensor.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap* map, uint32_t from, int x,
                                                           int2 y) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y.x), "r"(y.y)
      : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap* map, uint32_t from, int x,
                                                           int3 y) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y.x), "r"(y.y), "r"(y.z)
      : "memory");
}
// Copies `bytes` (a multiple of 16) from shared to global memory, by one thread.
__device__ __forceinline__ void cp_async_bulk_store(void* to, uint32_t from, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Returns when at most the thread's last `Pending` groups still read shared memory.
template <int Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// --- barriers ------------------------------------------------------------------------------------

// Arrives at the barrier at the same place in the CTA of that rank. It publishes no stores of the caller to
// that CTA: a release at cluster scope would wait for all of them.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t* barrier, unsigned rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(cast_smem_ptr_to_uint(barrier)),
      "r"(rank)
      : "memory");
}
// Arrives once the thread's copies by cp.async have landed. This is one of the arrivals that the barrier was
// initialised with.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cast_smem_ptr_to_uint(barrier))
               : "memory");
}
// Uses barrier `id` (1 to 15) of `threads` threads of the CTA. An arrival does not wait.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Loads or stores four 8 x 8 matrices of 16-bit values: lane 8 i + r gives the address of row r of matrix i,
// or of its transpose.
template <bool kTrans = false>
__device__ __forceinline__ void stmatrix_x4(uint32_t to, const uint32_t (&w)[4]) {
  if constexpr (kTrans)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]),
                 "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}

// --- wgmma ---------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Waits for all groups; the compiler reads the accumulators after it.
template <int kSize>
__device__ __forceinline__ void wgmma_wait(float (&d)[kSize]) {
  wgmma_wait_group<0>();
#pragma unroll
  for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}

#define TIGON_ACC8(d, i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TIGON_ACC64(d, i)                                                               \
  TIGON_ACC8(d, i), TIGON_ACC8(d, i + 8), TIGON_ACC8(d, i + 16), TIGON_ACC8(d, i + 24), \
      TIGON_ACC8(d, i + 32), TIGON_ACC8(d, i + 40), TIGON_ACC8(d, i + 48), TIGON_ACC8(d, i + 56)
#define TIGON_WGMMA_M64N256K16(type)                                                                      \
  asm volatile(                                                                                           \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                       \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                        \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "   \
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "   \
      "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "   \
      "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "   \
      "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "     \
      "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "       \
      "%128, %129, p, 1, 1, %131, %132;\n}"                                                               \
      : TIGON_ACC64(d, 0), TIGON_ACC64(d, 64)                                                             \
      : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransA)), "n"(int(kTransB)))

// Computes d = a b, or d += a b, with a [64, 16] and b [16, 256] in shared memory, described by matrix
// descriptors. kTrans: the operand is contiguous along M or N. In lane 4 t + q of warp w, d[4 j + 2 h + i] is
// row 16 w + 8 h + t, column 8 j + 2 q + i.
template <class T, bool kTransA, bool kTransB>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __half>)
    TIGON_WGMMA_M64N256K16("f16");
  else
    TIGON_WGMMA_M64N256K16("bf16");
}

#undef TIGON_WGMMA_M64N256K16
#undef TIGON_ACC64
#undef TIGON_ACC8

}  // namespace tigon::cuda::matmul
