// Copies from global to shared memory that a thread starts and waits for later (sm_80 on). What a thread has copied, that thread
// may read after its wait without a barrier.
#pragma once

#include <cstdint>

namespace tigon::cuda {

// 16 bytes, or zeros where `bytes` is 0; both addresses at boundaries of 16. `to` as shared memory counts, or a pointer.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes = 16) {
  copy_async(uint32_t(__cvta_generic_to_shared(to)), from, bytes);
}
// 16 bytes, or nothing; without a branch.
__device__ __forceinline__ void copy_async_where(bool wanted, uint32_t to, const void* from) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
      "l"(from), "r"(unsigned(wanted))
      : "memory");
}
// The first `bytes` (an even number, 16 at most count) and nothing behind them: a copy of 16 bytes is one access of 16, however few
// of them it is told to take. A last half word has no such copy and is here at once.
__device__ __forceinline__ void copy_async_upto(uint32_t to, const void* from, int bytes) {
  if (bytes >= 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; i += 4)
    if (i + 4 <= bytes)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + i),
                   "l"(static_cast<const char*>(from) + i)
                   : "memory");
  if (bytes % 4 != 0) {
    const uint16_t last = *(static_cast<const uint16_t*>(from) + bytes / 2 - 1);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + bytes - 2), "h"(last) : "memory");
  }
}
// The copies since the last commit are a group.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when all groups but the last `Pending` have arrived.
template <int Pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Whole words of 16 bytes in one go, by one thread, that announce themselves on a barrier in shared memory (cluster.cuh; sm_90 on).
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, const uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(uint32_t(__cvta_generic_to_shared(barrier)))
      : "memory");
#endif
}

// Before such copies go where threads have written, by the thread that asks for them and knows of the writes.
__device__ __forceinline__ void copy_bulk_after_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The same with a number, of which those past 8 wait for 8.
__device__ __forceinline__ void copies_wait(int pending) {
  switch (pending) {
    case 0: return copies_wait<0>();
    case 1: return copies_wait<1>();
    case 2: return copies_wait<2>();
    case 3: return copies_wait<3>();
    case 4: return copies_wait<4>();
    case 5: return copies_wait<5>();
    case 6: return copies_wait<6>();
    case 7: return copies_wait<7>();
    default: return copies_wait<8>();
  }
}

}  // namespace tigon::cuda
