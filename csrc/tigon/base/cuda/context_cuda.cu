// Implements the standalone CUDA context, and what all CUDA contexts share: device facts, launches,
// occupancy.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "tigon/base/cuda/gemm_cublaslt.h"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/make_context.h"

namespace tigon {
namespace cuda {

namespace {

// This kernel is asked for the architecture that this file, and so every kernel of the library, was compiled
// for.
__global__ void probe() {}

// With TIGON_CUDA_CAPABILITY=80 (86, 90, 120 ...) launchers choose as on such a device, but never more than
// this one has.
void lower_facts(DeviceFacts& f) {
  const char* wish = std::getenv("TIGON_CUDA_CAPABILITY");
  if (wish == nullptr || *wish == 0) return;
  const int capability = std::atoi(wish);
  TIGON_CHECK("device", capability >= 80,
              "TIGON_CUDA_CAPABILITY must be 80 or more, such as 80 or 120, got '", wish, "'");
  const int family = capability / 10 * 10;
  const int shared = capability == 80 || capability == 87 ? 163
                     : family == 80 || family == 120      ? 99
                                                          : 227;  // KiB
  f.shared_per_block = std::min(f.shared_per_block, shared * 1024);
  f.capability = std::min(f.capability, capability);
}

}  // namespace

bool has_matmul_kernels(int capability) {
#ifdef TIGON_SM90A
  DeviceFacts f = {.capability = capability};
  lower_facts(f);
  return capability / 10 == 9 && f.capability >= 90;
#else
  return capability < 0;
#endif
}

const char* error_text(cudaError_t status) {
  switch (status) {
    case cudaErrorInsufficientDriver:
      return "the NVIDIA driver is older than the CUDA toolkit of this build: update the driver, or build "
             "with its toolkit";
    case cudaErrorNoKernelImageForDevice:
      return "this build has no kernels for this GPU: build on its machine, or name it in TIGON_CUDA_ARCHS "
             "(sm_80 or newer)";
    default: return cudaGetErrorString(status);
  }
}

int current_device(const char* op) {
  int device = 0;
  TIGON_CUDA_CHECK(op, cudaGetDevice(&device));
  TIGON_CHECK(op, device < kMaxDevices, "device index must be below ", kMaxDevices, ", got ", device);
  return device;
}

const DeviceFacts& device_facts() {
  static std::array<DeviceFacts, kMaxDevices> facts;
  static std::array<std::once_flag, kMaxDevices> known;
  const int device = current_device("device");
  std::call_once(known[size_t(device)], [device] {
    DeviceFacts f;
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&f.sms, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&f.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    f.capability = major * 10 + minor;
    // Kernels of PTX for an older architecture lack what launchers count on from sm_90 on.
    cudaFuncAttributes compiled = {};
    TIGON_CUDA_SUCCESS("device", cudaFuncGetAttributes(&compiled, probe), "looking for CUDA kernels for sm_",
                       f.capability, " in this build (TIGON_CUDA_ARCHS)");
    f.capability = std::min(f.capability, compiled.ptxVersion);
    lower_facts(f);
    facts[size_t(device)] = f;
  });
  return facts[size_t(device)];
}

void copy_rows(Context& ctx, const Matrix& from, const Matrix& to) {
  const size_t size = size_of(from.dtype);
  TIGON_CUDA_CHECK("copy",
                   cudaMemcpy2DAsync(to.data, size_t(to.stride) * size, from.data, size_t(from.stride) * size,
                                     size_t(from.cols) * size, size_t(from.rows), cudaMemcpyDeviceToDevice,
                                     static_cast<cudaStream_t>(ctx.stream())));
}

void launch_entry(const char* op, Context& ctx, const void* entry, const LaunchConfig& grid, void** params) {
  if (grid.blocks <= 0) return;
  TIGON_CHECK(op, grid.blocks <= INT32_MAX, "a launch must have at most 2^31 - 1 blocks, got ", grid.blocks);
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
  TIGON_CUDA_SUCCESS(op, cudaLaunchKernelExC(&config, entry, params), "kernel launch (", grid.blocks,
                     " blocks of ", grid.threads, " threads)");
}

namespace {

int query_occupancy(const char* op, const void* entry, int blocks, int threads, size_t shared) {
  constexpr int kPortableClusterSize = 8;
  // The limit is raised to everything the kernel's static shared memory leaves.
  if (shared > 0) {
    cudaFuncAttributes own;
    TIGON_CUDA_CHECK(op, cudaFuncGetAttributes(&own, entry));
    TIGON_CUDA_CHECK(op, cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              device_facts().shared_per_block - int(own.sharedSizeBytes)));
  }
  if (blocks > kPortableClusterSize)
    TIGON_CUDA_CHECK(op, cudaFuncSetAttribute(entry, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
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
      blocks > 1 ? cudaOccupancyMaxActiveClusters(&resident, entry, &config)
                 : cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, entry, threads, shared);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return blocks == 1 ? resident * device_facts().sms : resident;
}

}  // namespace

int OccupancyCache::max_active(const char* op, const void* entry, int blocks, int threads, size_t shared) {
  if ((blocks > 1 && device_facts().capability < 90) || blocks > kMaxCluster) return 0;
  const uint64_t device = uint64_t(current_device(op));
  const uint64_t key =
      ((uint64_t(shared) * kMaxDevices + device) << 5 | uint64_t(blocks)) << 11 | uint64_t(threads);
  const std::atomic_ref<uint64_t> cached(cache_[key * 0x9e3779b97f4a7c15u >> (64 - kLog2Entries)]);
  const uint64_t value = cached.load(std::memory_order_relaxed);
  if (value >> 16 == key) return int(value & 0xffff);
  const int resident = std::min(query_occupancy(op, entry, blocks, threads, shared), 0xffff);
  cached.store(key << 16 | uint64_t(resident), std::memory_order_relaxed);
  return resident;
}

namespace {

class CudaContext final : public Context {
 public:
  explicit CudaContext(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}
  ~CudaContext() override {
    for (void* p : blocks_) cudaFreeAsync(p, stream_);
  }
  Device device() const override { return Device::cuda; }
  void* stream() const override { return stream_; }
  Executor& executor() override { return executor_; }
  void* scratch(size_t bytes) override {
    void* p = nullptr;
    TIGON_CUDA_CHECK("context", cudaMallocAsync(&p, bytes > 0 ? bytes : 1, stream_));
    blocks_.push_back(p);
    return p;
  }
  void gemm(const Gemm& g) override { cublaslt_gemm(*this, g, current_device("gemm"), gemm_workspace_); }

 private:
  cudaStream_t stream_;
  InlineExecutor executor_;
  std::vector<void*> blocks_;
  GemmWorkspace gemm_workspace_;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Context> make_cuda_context(void* stream) {
  return std::make_unique<cuda::CudaContext>(stream);
}
bool built_with_cuda() { return true; }

}  // namespace tigon
