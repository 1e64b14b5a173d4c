// Makes the checks of every op's entry, in the same words for every op, and the one dispatch on the device.
#pragma once

#include "tigon/base/check.h"
#include "tigon/base/context.h"

namespace tigon {

inline void require_float(const char* op, const char* name, DType t) {
  TIGON_CHECK(op, is_kernel_float(t), name, " must be float32, bfloat16 or float16, got ", name_of(t));
}

inline void require_dtype(const char* op, const char* name, DType given, DType expected) {
  TIGON_CHECK(op, given == expected, name, " must be ", name_of(expected), ", got ", name_of(given));
}

// The dtype must be the expected one or float32.
inline void require_or_f32(const char* op, const char* name, DType given, DType expected) {
  TIGON_CHECK(op, given == expected || given == DType::f32, name, " must be ", name_of(expected),
              " or float32, got ", name_of(given));
}

inline void require_matrix(const char* op, const char* name, const Matrix& m, int64_t rows, int64_t cols,
                           DType dtype) {
  TIGON_CHECK(op, m.rows == rows && m.cols == cols, name, " must be [", rows, ", ", cols, "], got [", m.rows,
              ", ", m.cols, "]");
  require_dtype(op, name, m.dtype, dtype);
}

inline void require_vector(const char* op, const char* name, const Vector& v, int64_t size, DType dtype) {
  TIGON_CHECK(op, v.size == size, name, " must be [", size, "], got [", v.size, "]");
  require_dtype(op, name, v.dtype, dtype);
}

// Checks the vector if it is present.
inline void require_optional(const char* op, const char* name, const Vector& v, int64_t size,
                             DType dtype = DType::f32) {
  if (v) require_vector(op, name, v, size, dtype);
}
// Labels are i64, a mask is u8.
inline void require_labels(const char* op, const char* name, const Vector& v, int64_t size) {
  require_optional(op, name, v, size, v.dtype == DType::u8 ? DType::u8 : DType::i64);
}
// The scale is one factor for all rows, or one per row.
inline void require_scale(const char* op, const Vector& v, int64_t rows) {
  if (!v) return;
  TIGON_CHECK(op, v.size == 1 || v.size == rows, "scale must be [1] or [", rows, "], got [", v.size, "]");
  require_dtype(op, "scale", v.dtype, DType::f32);
}

inline void require_eps(const char* op, float eps) {
  TIGON_CHECK(op, eps >= 0.0f, "eps must be >= 0, got ", eps);
}
// Checks a result if it is wanted.
inline void require_result(const char* op, const char* name, const Matrix& m, const Matrix& like) {
  if (m.data != nullptr) require_matrix(op, name, m, like.rows, like.cols, like.dtype);
}

// Checks a result that may be written over `input`, in its dtype.
inline void require_rows_apart(const char* op, const char* name, const Matrix& m, const char* input,
                               const Matrix& from) {
  TIGON_CHECK(op, m.data != from.data || m.stride == from.stride, name, " in place must have ", input,
              " row stride ", from.stride, ", got ", m.stride);
  TIGON_CHECK(op, m.rows <= 1 || m.stride >= m.cols, name,
              " must have rows that do not overlap (stride >= ", m.cols, "), got stride ", m.stride);
}

// A parameter, if present, has an element per column of x, in x's dtype or float32.
inline void require_parameter(const char* op, const char* name, const Vector& v, const Matrix& x) {
  if (!v) return;
  TIGON_CHECK(op, v.size == x.cols, name, " must be [", x.cols, "], got [", v.size, "]");
  require_or_f32(op, name, v.dtype, x.dtype);
}

// Runs the backend of the context's device. `on_cuda` is TIGON_ON_CUDA(call), which is empty in builds
// without CUDA.
template <class OnCpu, class OnCuda>
void on_device(const char* op, Context& ctx, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  if (ctx.device() == Device::cpu) return on_cpu();
  TIGON_CHECK(op, built_with_cuda(), "this build of Tigon has no CUDA backend");
  on_cuda();
}

}  // namespace tigon

#if TIGON_WITH_CUDA
#define TIGON_ON_CUDA(...) [&] { __VA_ARGS__; }
#else
#define TIGON_ON_CUDA(...) [] {}
#endif
// Runs the backend's entry of the same name.
#define TIGON_RUN(op, ctx, entry, a) \
  on_device(op, ctx, [&] { cpu::entry(ctx, a); }, TIGON_ON_CUDA(cuda::entry(ctx, a)))
