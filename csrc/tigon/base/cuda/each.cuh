// Runs a functor once for each of n indices, one thread each.
#pragma once

#include "tigon/base/cuda/launch.cuh"

namespace tigon::cuda {
namespace {

constexpr int kEachThreads = 256;

template <class Fn>
__global__ __launch_bounds__(kEachThreads) void each_kernel(const __grid_constant__ Fn fn, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * kEachThreads + threadIdx.x;
  if (i < n) fn(i);
}

template <class Fn>
void for_each(const char* op, Context& ctx, int64_t n, const Fn& fn) {
  const int64_t blocks = (n + kEachThreads - 1) / kEachThreads;
  launch(op, ctx, each_kernel<Fn>, {.blocks = blocks, .threads = kEachThreads}, fn, n);
}

}  // namespace
}  // namespace tigon::cuda
