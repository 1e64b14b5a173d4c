#include "tigon/ops/rope/rope.h"

#include <utility>

#include "tigon/base/require.h"

namespace tigon {
namespace {

void check_tables(const char* op, const Rope& a) {
  const RopeTable &cos = a.cos, &sin = a.sin;
  require_float(op, "cos", cos.dtype);
  require_dtype(op, "sin", sin.dtype, cos.dtype);
  TIGON_CHECK(op, sin.batch == cos.batch && sin.tokens == cos.tokens && sin.cols == cos.cols, "sin must be [",
              cos.batch, ", ", cos.tokens, ", ", cos.cols, "], got [", sin.batch, ", ", sin.tokens, ", ",
              sin.cols, "]");
  TIGON_CHECK(op, cos.cols % 2 == 0, "cos must have an even number of columns, got ", cos.cols);
}

void check_heads(const char* op, const char* name, const RopeHeads& x, const RopeHeads& y,
                 const RopeTable& cos, bool backward) {
  if (x.empty() && y.empty()) return;
  DType narrow = backward ? y.dtype : x.dtype, wide = backward ? x.dtype : y.dtype;
  require_float(op, name, narrow);
  TIGON_CHECK(op, cos.dtype == narrow || cos.dtype == DType::f32, "cos must be ", name_of(narrow),
              " or float32, got ", name_of(cos.dtype));
  require_dtype(op, name, wide, promote(narrow, cos.dtype));
  TIGON_CHECK(op, (cos.batch == 1 || cos.batch == x.batch) && cos.tokens == x.tokens, "cos must be [1 or ",
              x.batch, ", ", x.tokens, ", R], got [", cos.batch, ", ", cos.tokens, ", ", cos.cols, "]");
  TIGON_CHECK(op, cos.cols <= x.cols, "cos must have at most ", x.cols, " columns, got ", cos.cols);
  TIGON_CHECK(op, y.batch == x.batch && y.heads == x.heads && y.tokens == x.tokens && y.cols == x.cols,
              "result of ", name, " must be [", x.batch, ", ", x.heads, ", ", x.tokens, ", ", x.cols,
              "], got [", y.batch, ", ", y.heads, ", ", y.tokens, ", ", y.cols, "]");
}

void run(const char* op, Context& ctx, const Rope& a, bool backward) {
  check_tables(op, a);
  check_heads(op, "q", a.q, a.q_out, a.cos, backward);
  check_heads(op, "k", a.k, a.k_out, a.cos, backward);
  Rope some = a;
  if (a.q.empty())
    std::swap(some.q, some.k), std::swap(some.q_out, some.k_out);  // q is there when anything is
  if (some.q.empty()) return;
  if (some.k.empty()) {
    some.k = some.k_out = {};
  } else {
    TIGON_CHECK(op, a.k.batch == a.q.batch && a.k.tokens == a.q.tokens && a.k.cols == a.q.cols, "k must be [",
                a.q.batch, ", H, ", a.q.tokens, ", ", a.q.cols, "], got [", a.k.batch, ", ", a.k.heads, ", ",
                a.k.tokens, ", ", a.k.cols, "]");
    require_dtype(op, "k", a.k.dtype, a.q.dtype);
    require_dtype(op, "result of k", a.k_out.dtype, a.q_out.dtype);
  }
  on_device(op, ctx, [&] { cpu::rope(ctx, some, backward); }, TIGON_ON_CUDA(cuda::rope(ctx, some, backward)));
}

}  // namespace

void rope_fwd(Context& ctx, const Rope& a) { run("rope", ctx, a, false); }
void rope_bwd(Context& ctx, const Rope& a) { run("rope_bwd", ctx, a, true); }

}  // namespace tigon
