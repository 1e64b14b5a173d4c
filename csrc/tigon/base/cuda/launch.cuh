// Makes checked kernel launches, and asks for the device properties that launchers need. Nothing here
// allocates or synchronises.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "tigon/base/check.h"
#include "tigon/base/context.h"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/row_config.h"

// Throws the error and clears it from the runtime, so that the next check of another library does not find
// it.
#define TIGON_CUDA_SUCCESS(op, expr, ...)                                                                  \
  do {                                                                                                     \
    const cudaError_t status_ = (expr);                                                                    \
    if (status_ != cudaSuccess) [[unlikely]]                                                               \
      cudaGetLastError();                                                                                  \
    TIGON_CHECK(op, status_ == cudaSuccess, __VA_ARGS__, " failed: ", ::tigon::cuda::error_text(status_)); \
  } while (0)
#define TIGON_CUDA_CHECK(op, expr) TIGON_CUDA_SUCCESS(op, expr, #expr)

namespace tigon::cuda {

// Returns what CUDA says of an error, or what to do about it.
const char* error_text(cudaError_t status);

struct DeviceFacts {
  int sms = 0;
  // A block may opt in to this much dynamic shared memory, in bytes.
  int shared_per_block = 0;
  // 90 stands for sm_90. It is the device's, or that of the architecture the kernels were compiled for if
  // that is less.
  int capability = 0;
};
constexpr int kMaxDevices = 64;
// Returns the index of the current device. An index from kMaxDevices on is an error.
int current_device(const char* op);
// Returns the facts of the current device, read once per device.
const DeviceFacts& device_facts();

struct LaunchConfig {
  int64_t blocks = 1;
  int threads = 1;
  size_t shared = 0;
  // With programmatic dependent launch the kernel may start before the previous one has ended. It calls
  // griddepcontrol_wait() before it touches memory.
  bool pdl = false;
  // Counts the CTAs of a cluster; more than 1 needs sm_90.
  int cluster = 1;
};

// Returns a zeroed counter from which `workers` CTAs or clusters draw rows dynamically. It is null if rows
// are few or too many to count: workers then take every `workers`-th row.
inline int* make_row_counter(const char* op, Context& ctx, int64_t rows, int64_t workers) {
  if (rows <= 8 * workers || rows > INT32_MAX / 2) return nullptr;
  int* counter = ctx.scratch_of<int>(1);
  TIGON_CUDA_CHECK(op, cudaMemsetAsync(counter, 0, sizeof(int), static_cast<cudaStream_t>(ctx.stream())));
  return counter;
}

// Returns the host's handle of a kernel, whatever its parameters.
template <class... Params>
const void* entry_of(void (*kernel)(Params...)) {
  return reinterpret_cast<const void*>(kernel);
}
// `params` holds the address of each parameter of the kernel.
void launch_entry(const char* op, Context& ctx, const void* entry, const LaunchConfig& grid, void** params);

template <class... Params, class... Args>
void launch(const char* op, Context& ctx, void (*kernel)(Params...), const LaunchConfig& grid,
            const Args&... args) {
  [&](const Params&... params) {
    void* addresses[] = {const_cast<void*>(static_cast<const void*>(&params))...};
    launch_entry(op, ctx, entry_of(kernel), grid, addresses);
  }(Params(args)...);
}

// Runs a setup function, such as cudaFuncSetAttribute, once per device, and again if it depends on a `value`
// (not 0) that changes. Concurrent first calls may run it twice, so it must be idempotent.
class OncePerDevice {
 public:
  template <class Fn>
  void run(const char* op, Fn&& fn, int64_t value = 1) {
    int64_t& done = done_[size_t(current_device(op))];
    if (__atomic_load_n(&done, __ATOMIC_ACQUIRE) == value) return;
    fn();
    __atomic_store_n(&done, value, __ATOMIC_RELEASE);
  }

 private:
  int64_t done_[kMaxDevices] = {};
};

// Returns the number of clusters (CTAs, for a cluster size of 1) of a kernel that are resident on the device
// at a time; 0 if none fits. Each kernel has its own cache. Two queries that hash to the same entry evict
// each other.
class OccupancyCache {
 public:
  int max_active(const char* op, const void* entry, int blocks, int threads, size_t shared = 0);
  template <class... Params>
  int max_active(const char* op, void (*kernel)(Params...), int blocks, int threads, size_t shared = 0) {
    return max_active(op, entry_of(kernel), blocks, threads, shared);
  }

 private:
  static constexpr int kLog2Entries = 6;
  // The entries are read and written atomically.
  uint64_t cache_[1 << kLog2Entries] = {};
};

}  // namespace tigon::cuda
