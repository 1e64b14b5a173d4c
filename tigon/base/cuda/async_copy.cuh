// Copies from global to shared memory that a thread starts and waits for later (sm_80 on). What a thread has copied, that thread
// may read after its wait without a barrier.
#pragma once

#include <cstdint>

namespace tigon::cuda {

// 16 bytes, of which the first `bytes` are read and the others 0; both addresses at boundaries of 16.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes)
               : "memory");
}
// The copies since the last commit are a group.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when all groups but the last `Pending` have arrived.
template <int Pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace tigon::cuda
