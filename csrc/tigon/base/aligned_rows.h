// Copies rows to memory where each begins at a 16-byte boundary. The alignment of a row decides which
// elements a CUDA thread adds, so a deterministic context works on copies of all rows that begin elsewhere.
#pragma once

#include <utility>
#include <vector>

#include "tigon/base/fields.h"

namespace tigon {
namespace cuda {

// context_cuda.cu defines it.
void copy_rows(Context& ctx, const Matrix& from, const Matrix& to);

}  // namespace cuda

// rows_are_aligned() tells whether every row begins at a 16-byte boundary; aligned_stride() is the smallest
// stride with which they do.
inline bool rows_are_aligned(const Matrix& m) {
  return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride * int64_t(size_of(m.dtype)) % 16 == 0;
}
inline int64_t aligned_stride(const Matrix& m) {
  const int64_t vector = 16 / int64_t(size_of(m.dtype));
  return (m.cols + vector - 1) / vector * vector;
}

class AlignedRows final : public Fields {
 public:
  explicit AlignedRows(Context& ctx) : ctx_(ctx) {}
  void read(Matrix& m) { align(m, true); }
  void write(Matrix& m) { align(m, false); }
  // Copies the results back to the caller's memory.
  void finish();

  void statistics(const char*, std::initializer_list<Statistic>, int64_t, Role) override {}
  void result_over(const char*, Matrix& m, const char*, const Matrix&, Role, const char*) override {
    write(m);
  }
  void list(const char*, std::span<const Vector>&, const Listed&) override {}

 protected:
  void field(const Field& f) override {
    if (f.matrix != nullptr && !f.expected.updated)
      align(*f.matrix, f.role != Role::result && f.role != Role::gradient);
  }

 private:
  void align(Matrix& m, bool read);
  Context& ctx_;
  // Each pair holds the matrix of the call and its aligned copy.
  std::vector<std::pair<Matrix, Matrix>> copies_, written_;
};

}  // namespace tigon
