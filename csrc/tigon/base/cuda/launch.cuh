// Checked kernel launches and the device properties that launchers need. Nothing here allocates or
// synchronises.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "tigon/base/context.h"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/row_config.h"
#include "tigon/base/error.h"

#define TIGON_CUDA_CHECK(op, expr)                                                            \
  do {                                                                                        \
    cudaError_t status_ = (expr);                                                             \
    TIGON_CHECK(op, status_ == cudaSuccess, #expr, " failed: ", cudaGetErrorString(status_)); \
  } while (0)

namespace tigon::cuda {

struct DeviceFacts {
  int sms = 0;
  // Opt-in limit of dynamic shared memory, in bytes.
  int shared_per_block = 0;
  // 90 for sm_90: the device's, or that of the architecture the kernels were compiled for if less.
  int capability = 0;
};
constexpr int kMaxDevices = 64;
// Facts of the current device, read once per device.
const DeviceFacts& device_facts();

struct LaunchConfig {
  int64_t blocks = 1;
  int threads = 1;
  size_t shared = 0;
  // Programmatic dependent launch: the kernel may start before the previous one has ended, and
  // calls griddepcontrol_wait() before it touches memory.
  bool pdl = false;
  // CTAs of a cluster; more than 1 needs sm_90.
  int cluster = 1;
};

// A zeroed counter from which `workers` CTAs or clusters draw rows dynamically. Null where rows are
// few or too many to count: workers then take every `workers`-th row.
inline int* make_row_counter(const char* op, Context& ctx, int64_t rows, int64_t workers) {
  if (rows <= 8 * workers || rows > INT32_MAX / 2) return nullptr;
  int* counter = ctx.scratch_of<int>(1);
  TIGON_CUDA_CHECK(op, cudaMemsetAsync(counter, 0, sizeof(int), static_cast<cudaStream_t>(ctx.stream())));
  return counter;
}

template <class... Params, class... Args>
void launch(const char* op, Context& ctx, void (*kernel)(Params...), LaunchConfig grid, Args&&... args) {
  if (grid.blocks <= 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(grid.blocks));
  config.blockDim = dim3(unsigned(grid.threads));
  config.dynamicSmemBytes = grid.shared;
  config.stream = static_cast<cudaStream_t>(ctx.stream());
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (grid.pdl && device_facts().capability >= 90) {
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

// Runs a setup function, such as cudaFuncSetAttribute, once per device. Concurrent first calls may
// run it twice, so it must be idempotent.
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
  std::array<std::atomic<bool>, kMaxDevices> done_{};
};

// The number of clusters (CTAs, for a cluster size of 1) of a kernel that are resident on the
// device at a time; 0 where none fits. Each kernel has its own cache. Two queries that hash to the
// same entry evict each other.
class OccupancyCache {
 public:
  template <class Kernel>
  int max_active(const char* op, Kernel kernel, int blocks, int threads, size_t shared = 0) {
    if ((blocks > 1 && device_facts().capability < 90) || blocks > kMaxCluster) return 0;
    int device = 0;
    TIGON_CUDA_CHECK(op, cudaGetDevice(&device));
    const uint64_t key = ((uint64_t(shared) * kMaxDevices + uint64_t(device)) << 5 | uint64_t(blocks)) << 11 |
                         uint64_t(threads);
    std::atomic<uint64_t>& entry = cache_[key * 0x9e3779b97f4a7c15u >> (64 - kLog2Entries)];
    const uint64_t value = entry.load(std::memory_order_relaxed);
    if (value >> 16 == key) return int(value & 0xffff);
    const int resident = std::min(query(op, kernel, blocks, threads, shared), 0xffff);
    entry.store(key << 16 | uint64_t(resident), std::memory_order_relaxed);
    return resident;
  }

 private:
  static constexpr int kPortableClusterSize = 8, kLog2Entries = 6;
  std::array<std::atomic<uint64_t>, 1 << kLog2Entries> cache_{};

  template <class Kernel>
  int query(const char* op, Kernel kernel, int blocks, int threads, size_t shared) {
    // The limit is raised to everything the kernel's static shared memory leaves.
    if (shared > 0) {
      cudaFuncAttributes own;
      TIGON_CUDA_CHECK(op, cudaFuncGetAttributes(&own, kernel));
      TIGON_CUDA_CHECK(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                device_facts().shared_per_block - int(own.sharedSizeBytes)));
    }
    if (blocks > kPortableClusterSize)
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
    int resident = 0;
    const cudaError_t status =
        blocks > 1 ? cudaOccupancyMaxActiveClusters(&resident, kernel, &config)
                   : cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared);
    if (status != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return blocks == 1 ? resident * device_facts().sms : resident;
  }
};

}  // namespace tigon::cuda
