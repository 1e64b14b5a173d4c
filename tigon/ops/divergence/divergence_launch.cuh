// Launches of blocks that take rows in turn: as many as run together.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/ops/divergence/divergence_sums.cuh"

namespace tigon::cuda {
namespace {

// Columns of a block of a cluster: where they begin does not change the position in 16 bytes.
int slice_of(int64_t cols, int cluster) { return int(ceil_div(ceil_div(cols, cluster), 64) * 64); }

// Clusters (blocks, where they are alone) of a kernel that run together, by device and log2 of their size; 0 not asked yet, -1 none.
using Room = std::array<std::array<std::atomic<int>, 5>, 64>;

// False when the device has no room for such a cluster.
template <class... Parameters, class... Arguments>
bool launch_together(Context& ctx, Room& known, void (*kernel)(Parameters...), int threads, size_t shared,
                     int cluster, int64_t rows, const Arguments&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(cluster));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(ctx.stream());
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  int device = 0, size = 0;
  TIGON_CUDA_CHECK(kOp, cudaGetDevice(&device));
  while (1 << size < cluster) ++size;
  std::atomic<int>& slot = known[size_t(device) % known.size()][size_t(size)];
  int room = slot.load(std::memory_order_relaxed);
  if (room == 0) {
    TIGON_CUDA_CHECK(kOp,
                     cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    if (cluster > 1) {
      if (cluster > 8)
        TIGON_CUDA_CHECK(kOp,
                         cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
      if (cudaOccupancyMaxActiveClusters(&room, kernel, &config) != cudaSuccess || room <= 0) {
        cudaGetLastError();
        room = -1;
      }
    } else {
      TIGON_CUDA_CHECK(kOp, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&room, kernel, threads, shared));
      room = room > 0 ? room * device_facts().sms : -1;
    }
    slot.store(room, std::memory_order_relaxed);
  }
  if (room < 0) return false;
  config.gridDim = dim3(unsigned(std::min<int64_t>(rows, room) * cluster));
  cudaError_t status = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  TIGON_CHECK(kOp, status == cudaSuccess, "kernel launch failed: ", cudaGetErrorString(status));
  return true;
}

}  // namespace
}  // namespace tigon::cuda
