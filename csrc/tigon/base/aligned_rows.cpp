#include "tigon/base/aligned_rows.h"

#include "tigon/base/require.h"

namespace tigon {
namespace cuda {

void copy_rows(Context& ctx, const Matrix& from, const Matrix& to);  // context_cuda.cu

}  // namespace cuda

namespace {

void copy(Context& ctx, [[maybe_unused]] const Matrix& from, [[maybe_unused]] const Matrix& to) {
  on_device("copy", ctx, [] {}, TIGON_ON_CUDA(cuda::copy_rows(ctx, from, to)));
}

}  // namespace

void AlignedRows::align(Matrix& m, bool read) {
  const int64_t size = int64_t(size_of(m.dtype)), vector = 16 / size;
  const bool aligned = reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride % vector == 0;
  if (!ctx_.deterministic || ctx_.device() == Device::cpu || m.data == nullptr || m.rows * m.cols == 0 ||
      aligned || !is_kernel_float(m.dtype))  // integers are not added
    return;
  const Matrix given = m;
  m.stride = (m.cols + vector - 1) / vector * vector;
  m.data = nullptr;
  for (const auto& [from, to] : copies_)
    if (from.data == given.data && to.stride == m.stride) m.data = to.data;  // in place
  if (m.data == nullptr) m.data = ctx_.scratch(size_t(m.rows * m.stride * size));
  if (read) copy(ctx_, given, m), copies_.emplace_back(given, m);
  if (!read) written_.emplace_back(given, m);
}

void AlignedRows::finish() {
  for (const auto& [to, from] : written_) copy(ctx_, from, to);
}

}  // namespace tigon
