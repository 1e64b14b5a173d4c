// Checked launches and the few facts about the device that launchers need. No allocation, no synchronisation.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "tigon/base/context.h"
#include "tigon/base/error.h"

#define TIGON_CUDA_CHECK(op, expr)                                                            \
  do {                                                                                        \
    cudaError_t status_ = (expr);                                                             \
    TIGON_CHECK(op, status_ == cudaSuccess, #expr, " failed: ", cudaGetErrorString(status_)); \
  } while (0)

namespace tigon::cuda {

struct DeviceFacts {
  int sms = 0;
  int shared_per_block = 0;  // opt-in limit, bytes
  int capability = 0;        // 90 for sm_90
};
constexpr int kMostDevices = 64;
// Facts of the current device, read once per device.
const DeviceFacts& device_facts();

struct Grid {
  int64_t blocks = 1;
  int threads = 1;
  size_t shared = 0;
  bool early = false;  // may start before the kernel ahead has ended; calls wait_for_kernel_ahead() first
  int cluster = 1;     // blocks that run together (sm_90 on)
};

// In a kernel that its successor in the stream may be launched alongside (Grid::early), and in that successor before it touches
// memory: returns when the kernel ahead has ended and its writes are visible. Nothing before sm_90.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_kernel_ahead() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Registers that one group of four warps leaves to another, of a kernel whose blocks are alone on a multiprocessor: a thread has
// Count from here on. Nothing but on sm_90a, where the compiler is told of it.
template <int Count>
__device__ __forceinline__ void leave_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}
template <int Count>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}

// For rows that `takers` blocks (or clusters of them) draw, or null where they may as well take every so many: few a taker.
inline int* row_counter(const char* op, Context& ctx, int64_t rows, int64_t takers) {
  if (rows <= 8 * takers || rows > INT32_MAX / 2) return nullptr;
  int* counter = ctx.scratch_of<int>(1);
  TIGON_CUDA_CHECK(op, cudaMemsetAsync(counter, 0, sizeof(int), static_cast<cudaStream_t>(ctx.stream())));
  return counter;
}

template <class... Params, class... Args>
void launch(const char* op, Context& ctx, void (*kernel)(Params...), Grid grid, Args&&... args) {
  if (grid.blocks <= 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(grid.blocks));
  config.blockDim = dim3(unsigned(grid.threads));
  config.dynamicSmemBytes = grid.shared;
  config.stream = static_cast<cudaStream_t>(ctx.stream());
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (grid.early && device_facts().capability >= 90) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {unsigned(grid.cluster), 1, 1};
  }
  cudaError_t status = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  TIGON_CHECK(op, status == cudaSuccess, "kernel launch failed (", grid.blocks, " blocks of ", grid.threads,
              " threads): ", cudaGetErrorString(status));
}

// What is done once for each device: settings of a kernel. Twice, where threads meet.
class OncePerDevice {
 public:
  template <class Fn>
  void run(const char* op, Fn&& fn) {
    int device = 0;
    TIGON_CUDA_CHECK(op, cudaGetDevice(&device));
    std::atomic<bool>& done = done_[size_t(device)];
    if (done.load(std::memory_order_acquire)) return;
    fn();
    done.store(true, std::memory_order_release);
  }

 private:
  std::array<std::atomic<bool>, kMostDevices> done_{};
};

// How many clusters of a kernel the device runs at a time, with so much dynamic shared memory a block (or blocks, where they are
// alone); 0 where it has no room for one. One of these belongs to each kernel and remembers the answers, until two of them fall on the
// same place.
class ClusterRoom {
 public:
  template <class Kernel>
  int of(const char* op, Kernel kernel, int blocks, int threads, size_t shared = 0) {
    if ((blocks > 1 && device_facts().capability < 90) || blocks > kMost) return 0;
    int device = 0;
    TIGON_CUDA_CHECK(op, cudaGetDevice(&device));
    const uint64_t asked = ((uint64_t(shared) * kMostDevices + uint64_t(device)) << 5 | uint64_t(blocks))
                               << 11 |
                           uint64_t(threads);
    std::atomic<uint64_t>& known = known_[asked * 0x9e3779b97f4a7c15u >> (64 - kPlaces)];
    const uint64_t seen = known.load(std::memory_order_relaxed);
    if (seen >> 16 == asked) return int(seen & 0xffff);
    const int room = std::min(ask(op, kernel, blocks, threads, shared), 0xffff);
    known.store(asked << 16 | uint64_t(room), std::memory_order_relaxed);
    return room;
  }

 private:
  static constexpr int kPortable = 8, kMost = 16, kPlaces = 6;
  std::array<std::atomic<uint64_t>, 1 << kPlaces> known_{};

  template <class Kernel>
  int ask(const char* op, Kernel kernel, int blocks, int threads, size_t shared) {
    if (shared > 0) {  // as much as there is besides the kernel's own
      cudaFuncAttributes own;
      TIGON_CUDA_CHECK(op, cudaFuncGetAttributes(&own, kernel));
      TIGON_CUDA_CHECK(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                device_facts().shared_per_block - int(own.sharedSizeBytes)));
    }
    if (blocks > kPortable)
      TIGON_CUDA_CHECK(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(blocks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = shared;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int room = 0;
    const cudaError_t status =
        blocks > 1 ? cudaOccupancyMaxActiveClusters(&room, kernel, &config)
                   : cudaOccupancyMaxActiveBlocksPerMultiprocessor(&room, kernel, threads, shared);
    if (status != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return blocks == 1 ? room * device_facts().sms : room;
  }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace tigon::cuda
