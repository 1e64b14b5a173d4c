#include "tigon/ops/rope/rope.h"

#include <utility>

#include "tigon/base/require.h"

namespace tigon {
namespace {

int64_t position_at(const RopeTable& p, int64_t axis, int64_t b, int64_t t) {
  int64_t i = p.offset(axis, b, t);
  return p.dtype == DType::i64 ? static_cast<const int64_t*>(p.data)[i]
                               : static_cast<const int32_t*>(p.data)[i];
}

void check_dtypes(const char* op, const char* name, DType narrow, DType wide, DType table) {
  require_float(op, name, narrow);
  require_or_f32(op, "cos", table, narrow);
  if (wide != narrow) require_dtype(op, name, wide, promote(narrow, table));
}

void check_heads(const char* op, const char* name, const Rope& a, const RopeHeads& x, const RopeHeads& y,
                 bool backward) {
  if (x.empty() && y.empty()) return;
  check_dtypes(op, name, backward ? y.dtype : x.dtype, backward ? x.dtype : y.dtype, a.cos.dtype);
  TIGON_CHECK(op, y.batch == x.batch && y.heads == x.heads && y.tokens == x.tokens && y.cols == x.cols,
              "result of ", name, " must be [", x.batch, ", ", x.heads, ", ", x.tokens, ", ", x.cols,
              "], got [", y.batch, ", ", y.heads, ", ", y.tokens, ", ", y.cols, "]");
  check_rope_tables(op, a, x);
  bool same = x.dtype == y.dtype && x.batch_stride == y.batch_stride && x.head_stride == y.head_stride &&
              x.token_stride == y.token_stride && a.form.in == a.form.out;
  TIGON_CHECK(op, x.data != y.data || same, "result of ", name,
              " must have the strides, dtype and pairs of its input when it is its input");
}

}  // namespace

void check_rope_tables(const char* op, const Rope& a, const RopeHeads& x) {
  const RopeTable &cos = a.cos, &sin = a.sin;
  const RopeSections& s = a.form.sections;
  require_float(op, "cos", cos.dtype);
  require_dtype(op, "sin", sin.dtype, cos.dtype);
  TIGON_CHECK(op,
              sin.axes == cos.axes && sin.batch == cos.batch && sin.tokens == cos.tokens &&
                  sin.cols == cos.cols && sin.col_stride == cos.col_stride,
              "sin must be [", cos.axes, ", ", cos.batch, ", ", cos.tokens, ", ", cos.cols, "], got [",
              sin.axes, ", ", sin.batch, ", ", sin.tokens, ", ", sin.cols, "]");
  TIGON_CHECK(op, cos.col_stride == 1 || (cos.col_stride == 2 && cos.dtype == DType::f32 && a.form.shared),
              "cos must have dense columns, or be the real parts of complex64, got column stride ",
              cos.col_stride);
  TIGON_CHECK(op, a.rotated() % 2 == 0, "cos must have an even number of columns, got ", cos.cols);
  TIGON_CHECK(op, !s.given() || s.time + s.height + s.width == a.rotated() / 2, "sections must add up to ",
              a.rotated() / 2, ", got ", s.time, " + ", s.height, " + ", s.width);
  if (x.empty()) return;
  TIGON_CHECK(op, a.rotated() <= x.cols, "cos must have at most ", x.cols / (a.form.shared ? 2 : 1),
              " columns, got ", cos.cols);
  if (a.positions.data != nullptr) return;
  int64_t axes = s.given() ? 3 : 1;
  TIGON_CHECK(op, cos.axes == axes && (cos.batch == 1 || cos.batch == x.batch) && cos.tokens == x.tokens,
              "cos must be [", axes, ", 1 or ", x.batch, ", ", x.tokens, ", R], got [", cos.axes, ", ",
              cos.batch, ", ", cos.tokens, ", ", cos.cols, "]");
}

void check_rope_positions(const char* op, const Context& ctx, const Rope& a, const RopeHeads& x) {
  const RopeTable& p = a.positions;
  if (p.data == nullptr) return;
  TIGON_CHECK(op, p.dtype == DType::i64 || p.dtype == DType::i32, "positions must be int64 or int32, got ",
              name_of(p.dtype));
  int64_t axes = a.form.sections.given() ? 3 : 1;
  TIGON_CHECK(op, p.axes == axes && (p.batch == 1 || p.batch == x.batch) && p.tokens == x.tokens,
              "positions must be [", axes, ", 1 or ", x.batch, ", ", x.tokens, "], got [", p.axes, ", ",
              p.batch, ", ", p.tokens, "]");
  TIGON_CHECK(op, a.cos.axes == 1 && a.cos.batch == 1, "cos must be [P, R] beside positions, got [",
              a.cos.axes, ", ", a.cos.batch, ", ", a.cos.tokens, ", ", a.cos.cols, "]");
  if (ctx.device() != Device::cpu) return;
  for (int64_t axis = 0; axis < axes; ++axis)
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t t = 0; t < p.tokens; ++t) {
        int64_t row = position_at(p, axis, b, t);
        TIGON_CHECK(op, 0 <= row && row < a.cos.tokens, "positions must be in [0, ", a.cos.tokens, "), got ",
                    row);
      }
}

namespace {

void run(const char* op, Context& ctx, const Rope& a, bool backward) {
  check_heads(op, "q", a, a.q, a.q_out, backward);
  check_heads(op, "k", a, a.k, a.k_out, backward);
  Rope some = a;
  if (a.q.empty())
    std::swap(some.q, some.k), std::swap(some.q_out, some.k_out);  // q is there when anything is
  if (some.q.empty()) return check_rope_tables(op, a, some.q);
  if (some.k.empty()) {
    some.k = some.k_out = {};
  } else {
    TIGON_CHECK(op, a.k.batch == a.q.batch && a.k.tokens == a.q.tokens && a.k.cols == a.q.cols, "k must be [",
                a.q.batch, ", H, ", a.q.tokens, ", ", a.q.cols, "], got [", a.k.batch, ", ", a.k.heads, ", ",
                a.k.tokens, ", ", a.k.cols, "]");
    require_dtype(op, "k", a.k.dtype, a.q.dtype);
    require_dtype(op, "result of k", a.k_out.dtype, a.q_out.dtype);
  }
  check_rope_positions(op, ctx, some, some.q);
  on_device(op, ctx, [&] { cpu::rope(ctx, some, backward); }, TIGON_ON_CUDA(cuda::rope(ctx, some, backward)));
}

}  // namespace

void rope_fwd(Context& ctx, const Rope& a) { run("rope", ctx, a, false); }
void rope_bwd(Context& ctx, const Rope& a) { run("rope_bwd", ctx, a, true); }

}  // namespace tigon
