#include <utility>

#include "tigon/ops/rope/rope_fields.h"

namespace tigon {
namespace {

void check_dtypes(const char* op, const char* name, DType narrow, DType wide, DType table) {
  require_float(op, name, narrow);
  require_or_f32(op, "cos", table, narrow);
  if (wide != narrow) require_dtype(op, name, wide, promote(narrow, table));
}

void check_heads(const char* op, const char* name, const Rope& a, const RopeHeads& x, const RopeHeads& y,
                 bool backward) {
  if (x.empty() && y.empty()) return;
  check_dtypes(op, name, backward ? y.dtype : x.dtype, backward ? x.dtype : y.dtype, a.cos.dtype);
  check_rope_sizes(op, "result of ", name, y, x);
  check_rope_tables(op, a, x);
  bool same = x.dtype == y.dtype && x.batch_stride == y.batch_stride && x.head_stride == y.head_stride &&
              x.token_stride == y.token_stride && a.form.in == a.form.out;
  TIGON_CHECK(op, x.data != y.data || same, "result of ", name,
              " must have the strides, dtype and pairs of its input when it is its input");
}

}  // namespace

void check_rope_sizes(const char* op, const char* of, const char* name, const RopeHeads& y,
                      const RopeHeads& x) {
  TIGON_CHECK(op, y.batch == x.batch && y.heads == x.heads && y.tokens == x.tokens && y.cols == x.cols, of,
              name, " must be [", x.batch, ", ", x.heads, ", ", x.tokens, ", ", x.cols, "], got [", y.batch,
              ", ", y.heads, ", ", y.tokens, ", ", y.cols, "]");
}

void check_rope_heads(const char* op, const char* name, const RopeHeads& k, const RopeHeads& x) {
  TIGON_CHECK(op, k.batch == x.batch && k.tokens == x.tokens && k.cols == x.cols, name, " must be [", x.batch,
              ", H, ", x.tokens, ", ", x.cols, "], got [", k.batch, ", ", k.heads, ", ", k.tokens, ", ",
              k.cols, "]");
  require_dtype(op, name, k.dtype, x.dtype);
}

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
        int64_t row = p.position(axis, b, t);
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
    // q is present if anything is.
    std::swap(some.q, some.k), std::swap(some.q_out, some.k_out);
  if (some.q.empty()) return check_rope_tables(op, a, some.q);
  if (some.k.empty()) {
    some.k = some.k_out = {};
  } else {
    check_rope_heads(op, "k", a.k, a.q);
    require_dtype(op, "result of k", a.k_out.dtype, a.q_out.dtype);
  }
  check_rope_positions(op, ctx, some, some.q);
  on_device(op, ctx, [&] { cpu::rope(ctx, some, backward); }, TIGON_ON_CUDA(cuda::rope(ctx, some, backward)));
}

}  // namespace

void rope_fwd(Context& ctx, const Rope& a) { run("rope", ctx, a, false); }
void rope_bwd(Context& ctx, const Rope& a) { run("rope_bwd", ctx, a, true); }

RopeHeads RopeFields::heads(const char* op, const Strided& t) const {
  if (!t) return {};
  const int64_t d = t.dims, token_dim = 2 * d - 5 - head_dim;
  TIGON_CHECK(op, head_dim == d - 3 || head_dim == d - 2, "head_dim must be ", d - 3, " or ", d - 2, ", got ",
              head_dim);
  return {.data = t.data,
          .dtype = t.dtype,
          .batch = d == 4 ? t.sizes[0] : 1,
          .heads = t.sizes[head_dim],
          .tokens = t.sizes[token_dim],
          .cols = t.sizes[d - 1],
          .batch_stride = d == 4 ? t.strides[0] : 0,
          .head_stride = t.strides[head_dim],
          .token_stride = t.strides[token_dim]};
}

Rope RopeFields::rope(const char* op) const {
  TIGON_CHECK(op, 0 <= pairs && pairs <= 2, "pairs must be 0, 1 or 2, got ", pairs);
  TIGON_CHECK(op, sin || complex(), "sin must be given where cos is not complex");
  // `rest` dimensions follow those of tokens.
  auto table = [](const Strided& t, bool axes, int64_t rest) -> RopeTable {
    const int64_t d = t.dims - rest;
    const bool batched = d > 1 + axes;
    return {.data = t.data,
            .dtype = t.dtype,
            .axes = axes ? t.sizes[0] : 1,
            .batch = batched ? t.sizes[d - 2] : 1,
            .tokens = t.sizes[d - 1],
            .cols = rest > 0 ? t.sizes[d] : 1,
            .axis_stride = axes ? t.strides[0] : 0,
            .batch_stride = batched ? t.strides[d - 2] : 0,
            .token_stride = t.strides[d - 1]};
  };
  const bool axes = form.sections.given();
  Rope a{.q = heads(op, q),
         .k = heads(op, k),
         .q_out = heads(op, q_out ? q_out : q),
         .k_out = heads(op, k_out ? k_out : k),
         .form = form};
  a.form.in = pairs == 0 ? RopePairs::halves : RopePairs::neighbours;
  a.form.out = pairs == 1 ? RopePairs::neighbours : RopePairs::halves;
  if (positions) a.positions = table(positions, axes, 0);
  a.cos = table(cos, axes && !positions, 1 + complex());
  if (!complex()) return a.sin = table(sin, axes && !positions, 1), a;
  a.cos.col_stride = 2, a.sin = a.cos;
  a.sin.data = static_cast<const char*>(a.cos.data) + size_of(a.cos.dtype);
  return a;
}

namespace {

constexpr const char* kOp = "rope";

struct RopeForwardFields : RopeFields {
  void fields(Fields& f) {
    heads(f), tables(f), options(f);
    results(f, promote(q.dtype, cos.dtype));
  }
  static void run(Context& ctx, const RopeForwardFields& a) { rope_fwd(ctx, a.rope(kOp)); }
};

struct InPlace : RopeFields {
  void fields(Fields& f) {
    f.strided("q", q, 3, 0, Role::rows, true), f.strided("k", k, 3, 0, Role::optional, true);
    tables(f), options(f);
  }
  static void run(Context& ctx, const InPlace& a) {
    for (auto [name, t] : {std::pair{"q", &a.q}, {"k", &a.k}}) {
      const int64_t last = t->dims - 1;
      TIGON_CHECK(kOp, !*t || t->sizes[last] <= 1 || t->strides[last] == 1, name,
                  " must have dense rows to be rotated in place, got stride ", t->strides[last]);
    }
    rope_fwd(ctx, a.rope(kOp));
  }
};

// Rotates the gradients q and k back.
struct RopeBackwardFields : RopeFields {
  int64_t dtype = 0;  // dtype of the results
  bool q_swapped = false, k_swapped = false;

  void fields(Fields& f) {
    heads(f, Role::optional, "dq_out", "dk_out"), tables(f, Role::rows), options(f);
    f.option("dtype", dtype), f.option("q_swapped", q_swapped), f.option("k_swapped", k_swapped);
    f.result_if(true, "dq", q_out, q, DType(dtype), q_swapped);
    f.result_if(true, "dk", k_out, k, DType(dtype), k_swapped);
  }
  static void run(Context& ctx, const RopeBackwardFields& a) {
    TIGON_CHECK(kOp, a.dtype >= 0 && a.dtype <= int64_t(DType::f16), "dtype must be 0, 1 or 2, got ",
                a.dtype);
    rope_bwd(ctx, a.rope(kOp));
  }
};

TIGON_CALL(RopeForwardFields, kOp, forward)
TIGON_CALL(InPlace, "rope_in_place", none)
TIGON_CALL(RopeBackwardFields, kOp, backward)

}  // namespace

}  // namespace tigon
