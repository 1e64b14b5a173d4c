#include "tigon/base/op.h"

namespace tigon {

void FieldChecks::field(const Field& f) {
  if (f.vector != nullptr) return vector(f);
  // The op checks a tensor of several dimensions by itself.
  if (f.strided != nullptr) return;
  const Matrix& m = *f.matrix;
  const Expected& e = f.expected;
  const bool given = m.data != nullptr;
  if (!e.wanted && !given) return;
  if (f.role == Role::result || ((f.role == Role::gradient || e.updated) && given))
    work_ = work_ || m.rows * m.cols > 0;
  if (f.role == Role::rows) {
    require_float(op_, f.name, m.dtype);
    TIGON_CHECK(op_, m.cols >= e.cols, f.name, " must have at least one column, got ", m.cols);
  } else if (given || (f.role != Role::optional && f.role != Role::gradient)) {
    if (e.or_f32) require_or_f32(op_, f.name, m.dtype, e.dtype);
    require_matrix(op_, f.name, m, e.rows, e.cols, e.or_f32 ? m.dtype : e.dtype);
  }
}

void FieldChecks::vector(const Field& f) {
  const Vector& v = *f.vector;
  const Expected& e = f.expected;
  TIGON_CHECK(op_, !e.scalar || v || f.role != Role::input, f.name,
              " must be a tensor of one element, got none");
  const bool result = f.role == Role::result || f.role == Role::gradient;
  if (!e.wanted && !v) return;
  if (!v && f.role != Role::input && f.role != Role::result) return;
  TIGON_CHECK(op_, v.size == e.cols, f.name, " must be [", e.cols, "], got [", v.size, "]");
  if (e.or_f32)
    require_or_f32(op_, f.name, v.dtype, e.dtype);
  else
    require_dtype(op_, f.name, v.dtype, e.dtype);
  if (e.like != nullptr && *e.like) require_dtype(op_, f.name, v.dtype, e.like->dtype);
  if (result) work_ = work_ || v.size > 0;
}

void FieldChecks::statistics(const char*, std::initializer_list<Statistic> list, int64_t size, Role role) {
  bool wanted = role == Role::saved;
  for (const Statistic& s : list) wanted = wanted || s.vector || s.vector.size != 0;
  if (!wanted) return;
  for (const Statistic& s : list) require_vector(op_, s.name, s.vector, size, DType::f32);
}

void FieldChecks::result_over(const char* name, Matrix& m, const char*, const Matrix& input, Role role,
                              const char*) {
  field({name, role, m, {.rows = input.rows, .cols = input.cols, .dtype = input.dtype}});
}

void FieldChecks::list(const char* name, std::span<const Vector>& list, const Listed& each) {
  for (const Vector& v : list) {
    require_float(op_, name, v.dtype);
    if (each.size >= 0) require_vector(op_, name, v, each.size, list[0].dtype);
    work_ = work_ || (each.updated && v.size > 0);
  }
}

std::vector<Operator>& operators() {
  static std::vector<Operator> all;
  return all;
}

}  // namespace tigon
