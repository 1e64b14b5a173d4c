// The CUDA kernels of hyper-connections share these functions.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/hyper_connection/hyper_connection.h"

namespace tigon::cuda::hyper_connection {

constexpr const char* kOp = "hyper_connection";
constexpr int kThreads = 256;

// Calls fn<T>() for the dtype of x.
template <class Fn>
void by_type(const Matrix& x, const Fn& fn) {
  dispatch_float(kOp, "x", x.dtype, [&](auto type) {
    fn.template operator()<typename DeviceType<typename decltype(type)::type>::type>();
  });
}

// True if every stream of every row of m, `columns` each, consists of aligned vectors of N elements.
template <int N>
bool vectors(const Matrix& m, int64_t columns) {
  if (m.data == nullptr) return true;
  return reinterpret_cast<uintptr_t>(m.data) % std::min<size_t>(16, N * size_of(m.dtype)) == 0 &&
         m.stride % N == 0 && columns % N == 0;
}

}  // namespace tigon::cuda::hyper_connection
