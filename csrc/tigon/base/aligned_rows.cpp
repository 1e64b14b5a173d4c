#include "tigon/base/aligned_rows.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {

void copy(Context& ctx, [[maybe_unused]] const Matrix& from, [[maybe_unused]] const Matrix& to) {
  on_device("copy", ctx, [] {}, TIGON_ON_CUDA(cuda::copy_rows(ctx, from, to)));
}

}  // namespace

void AlignedRows::align(Matrix& m, bool read) {
  // Integers are never added, so their alignment does not matter.
  if (!ctx_.deterministic || ctx_.device() == Device::cpu || m.data == nullptr || m.rows * m.cols == 0 ||
      rows_are_aligned(m) || !is_kernel_float(m.dtype))
    return;
  const Matrix given = m;
  m.stride = aligned_stride(m);
  m.data = nullptr;
  for (const auto& [from, to] : copies_)
    // A result that is written over its input goes into the input's copy.
    if (from.data == given.data && to.stride == m.stride) m.data = to.data;
  if (m.data == nullptr) m.data = ctx_.scratch(size_t(m.rows * m.stride) * size_of(m.dtype));
  if (read) copy(ctx_, given, m), copies_.emplace_back(given, m);
  if (!read) written_.emplace_back(given, m);
}

void AlignedRows::finish() {
  for (const auto& [to, from] : written_) copy(ctx_, from, to);
}

}  // namespace tigon
