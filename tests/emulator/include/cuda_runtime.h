// The part of CUDA's runtime, types and intrinsics that the kernels use.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "emulator.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(8) int2 {
  int x, y;
};
struct int3 {
  int x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Their x is read where they are used.
template <unsigned (*X)()>
struct EmulatedBuiltin {
  struct {
    operator unsigned() const { return X(); }
  } x;
};
inline constexpr EmulatedBuiltin<[] { return unsigned(emulator::cta.thread->index); }> threadIdx{};
inline constexpr EmulatedBuiltin<[] { return emulator::cta.block; }> blockIdx{};
inline constexpr EmulatedBuiltin<[] { return emulator::cta.threads; }> blockDim{};
inline constexpr EmulatedBuiltin<[] { return emulator::cta.blocks; }> gridDim{};

// --- runtime ---

#define CUDART_VERSION 13000
enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorInsufficientDriver,
  cudaErrorNoKernelImageForDevice
};
using cudaStream_t = struct EmulatedStream*;
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
struct cudaFuncAttributes {
  size_t sharedSizeBytes = 0;
  int ptxVersion = 90, numRegs = 64, maxThreadsPerBlock = 1024;
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

const char* cudaGetErrorString(cudaError_t status);
namespace emulator {
inline int device = 0;
inline cudaError_t last_error = cudaSuccess;
}  // namespace emulator
inline cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
inline cudaError_t cudaGetDevice(int* device) { return *device = emulator::device, cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
namespace emulator {
// Allows launches of a kernel with more than 48 KiB of dynamic shared memory.
void allow_shared(const void* entry, int bytes);
}  // namespace emulator
template <class K>
cudaError_t cudaFuncSetAttribute(K entry, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize)
    emulator::allow_shared(reinterpret_cast<const void*>(entry), value);
  return cudaSuccess;
}
template <class K>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, K) {
  return *a = {}, cudaSuccess;
}
int emulated_occupancy(int threads, size_t shared, int cluster);
template <class K>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, K, int threads, size_t shared) {
  return *n = emulated_occupancy(threads, shared, 1), cudaSuccess;
}
template <class K>
cudaError_t cudaOccupancyMaxActiveClusters(int* n, K, const cudaLaunchConfig_t* c) {
  return *n = emulated_occupancy(int(c->blockDim.x), c->dynamicSmemBytes, int(c->attrs[0].val.clusterDim.x)),
         cudaSuccess;
}
namespace emulator {
// A kernel with its arguments copied, of the addresses of its parameters.
using Bind = std::function<void()> (*)(const void* entry, void** params);
void add_kernel(const void* entry, Bind bind);
template <class... P>
const void* entry_of(void (*kernel)(P...)) {
  const void* entry = reinterpret_cast<const void*>(kernel);
  add_kernel(entry, [](const void* entry, void** params) -> std::function<void()> {
    const auto kernel = reinterpret_cast<void (*)(P...)>(const_cast<void*>(entry));
    return [&]<size_t... i>(std::index_sequence<i...>) {
      const std::tuple<std::decay_t<P>...> values(*static_cast<const std::decay_t<P>*>(params[i])...);
      return [=] { std::apply(kernel, values); };
    }(std::index_sequence_for<P...>());
  });
  return entry;
}
}  // namespace emulator
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* entry, void** params);
template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... args) {
  std::tuple<std::decay_t<P>...> values(std::forward<A>(args)...);
  return std::apply(
      [&](auto&... value) {
        void* params[] = {&value...};
        return cudaLaunchKernelExC(config, emulator::entry_of(kernel), params);
      },
      values);
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t) {
  return memset(p, value, n), cudaSuccess;
}
inline cudaError_t cudaMemset2DAsync(void* p, size_t pitch, int value, size_t width, size_t height,
                                     cudaStream_t) {
  for (size_t i = 0; i < height; ++i) memset(static_cast<char*>(p) + i * pitch, value, width);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t) {
  return memcpy(to, from, n), cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t i = 0; i < height; ++i)
    memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
  return cudaSuccess;
}
inline cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) {
  return *p = aligned_alloc(512, (n + 511) / 512 * 512), cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return free(p), cudaSuccess; }

// --- synchronization and warps ---

inline void __syncthreads() { emulator::sync_threads(); }
inline int __syncthreads_or(int vote) { return emulator::sync_threads_or(vote != 0); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::exchange(mask, 0); }
inline int emulated_lane() { return emulator::cta.thread->index % 32; }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulator::of_bits<T>(emulator::exchange(mask, emulator::bits_of(value))[lane & 31]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, emulated_lane() ^ lanes);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes) {
  return __shfl_sync(mask, value,
                     emulated_lane() < int(lanes) ? emulated_lane() : emulated_lane() - int(lanes));
}
template <class T, class Fn>
T emulated_reduce(unsigned mask, T value, Fn&& fn) {
  const uint64_t* all = emulator::exchange(mask, emulator::bits_of(value));
  T result{};
  bool first = true;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) {
      const T x = emulator::of_bits<T>(all[i]);
      result = first ? x : fn(result, x), first = false;
    }
  return result;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  return emulated_reduce(mask, value, [](T a, T b) { return T(a + b); });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  return emulated_reduce(mask, value, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  return emulated_reduce(mask, value, [](T a, T b) { return std::min(a, b); });
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  const uint64_t* all = emulator::exchange(mask, vote != 0);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1 && all[i]) result |= 1u << i;
  return result;
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t* all = emulator::exchange(mask, emulator::bits_of(value));
  unsigned result = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1 && all[i] == emulator::bits_of(value)) result |= 1u << i;
  return result;
}
template <class T>
T atomicAdd(T* p, T x) {
  return std::atomic_ref<T>(*p).fetch_add(x);
}
template <class T>
T atomicMax(T* p, T x) {
  std::atomic_ref<T> at(*p);
  T seen = at;
  while (seen < x && !at.compare_exchange_weak(seen, x)) continue;
  return seen;
}

// --- intrinsics ---

template <class T>
T __ldg(const T* p) {
  return *p;
}
inline size_t __cvta_generic_to_shared(const void* p) { return emulator::shared_address(p); }
inline size_t __cvta_generic_to_global(const void* p) { return size_t(p); }
inline bool __isGlobal(const void*) { return true; }
#define __builtin_assume(x) ((void)0)
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(both >> ((s >> 4 * i & 7) * 8) & 0xff) << 8 * i;
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline int __float2int_rn(float x) {
  return x == x ? int(std::nearbyint(double(std::fmin(std::fmax(x, -2147483648.0f), 2147483520.0f)))) : 0;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
using std::isfinite, std::isinf, std::isnan, std::max, std::min;
