#include "tigon/ops/rope/qk_norm_rope.h"

#include <tuple>

#include "tigon/ops/rope/rope_fields.h"

namespace tigon {
namespace {

void check_same(const char* op, const char* name, const RopeHeads& y, const RopeHeads& x, DType dtype) {
  check_rope_sizes(op, "", name, y, x);
  require_dtype(op, name, y.dtype, dtype);
}

void check_weight(const char* op, const char* name, const Vector& w, const QkNorm& norm, const RopeHeads& x) {
  if (!w) return;
  require_parameter(op, name, w, {.dtype = x.dtype, .cols = x.cols});
  require_dtype(op, name, w.dtype, norm.any_weight().dtype);
}

// Checks the tensors: `x` and `other` are q and k; `y` and `other_y` have the same sizes in the results'
// dtype.
void check(const char* op, Context& ctx, const Rope& rope, const QkNorm& norm, const RopeHeads& q,
           const RopeHeads& q_y, const RopeHeads& k, const RopeHeads& k_y) {
  const RopeHeads& x = q.empty() ? k : q;
  require_float(op, "q", x.dtype);
  TIGON_CHECK(op, x.cols >= 1 && x.cols <= 1024, "q must have 1 to 1024 columns, got ", x.cols);
  require_eps(op, norm.eps);
  TIGON_CHECK(op, rope.form.in == rope.form.out, "results must have the pairs of q");
  DType table = rope.cos.dtype, wide = promote(norm.result(x.dtype), table);
  require_or_f32(op, "cos", table, x.dtype);
  const RopeHeads& y = q.empty() ? k_y : q_y;
  DType result = y.dtype == x.dtype ? x.dtype : wide;
  for (auto [name, a, b] : {std::tuple{"q", &q, &q_y}, {"k", &k, &k_y}}) {
    if (a->empty()) continue;
    check_rope_heads(op, name, *a, x);
    check_same(op, name, *b, *a, result);
    check_rope_tables(op, rope, *a);
  }
  check_weight(op, "q_weight", norm.q_weight, norm, x);
  check_weight(op, "k_weight", norm.k_weight, norm, x);
  check_rope_positions(op, ctx, rope, x);
}

}  // namespace

void qk_norm_rope_fwd(Context& ctx, const QkNormRopeFwd& a) {
  const char* op = "qk_norm_rope";
  if (a.rope.q.empty() && a.rope.k.empty()) return check_rope_tables(op, a.rope, a.rope.q);
  check(op, ctx, a.rope, a.norm, a.rope.q, a.rope.q_out, a.rope.k, a.rope.k_out);
  TIGON_RUN(op, ctx, qk_norm_rope_fwd, a);
}

void qk_norm_rope_bwd(Context& ctx, const QkNormRopeBwd& a) {
  const char* op = "qk_norm_rope_bwd";
  bool nothing = a.q.empty() && a.k.empty();
  if (!nothing) {
    check(op, ctx, a.rope, a.norm, a.q, a.rope.q, a.k, a.rope.k);
    if (!a.q.empty()) check_same(op, "dq", a.rope.q_out, a.q, a.q.dtype);
    if (!a.k.empty()) check_same(op, "dk", a.rope.k_out, a.k, a.k.dtype);
  }
  if (a.dweight.data != nullptr) {
    TIGON_CHECK(op, bool(a.norm.any_weight()), "dweight must be absent when weights are, got [2, ",
                a.dweight.cols, "]");
    require_matrix(op, "dweight", a.dweight, 2, a.norm.any_weight().size, a.norm.any_weight().dtype);
    TIGON_CHECK(op, a.dweight.stride == a.dweight.cols, "dweight must be dense, got stride ",
                a.dweight.stride);
  } else if (nothing) {
    return;
  }
  TIGON_RUN(op, ctx, qk_norm_rope_bwd, a);
}

namespace {

constexpr const char* kOp = "qk_norm_rope";

struct QkNormRopeFields : RopeFields {
  QkNorm norm;

  void inputs(Fields& f) {
    heads(f), f.optional("q_weight", norm.q_weight), f.optional("k_weight", norm.k_weight), tables(f);
    f.option("eps", norm.eps), f.option("offset", norm.offset), f.option("rounding", norm.rounding);
    options(f);
  }
};

struct QkNormRopeForwardFields : QkNormRopeFields {
  void fields(Fields& f) { inputs(f), results(f, promote(norm.result(q.dtype), cos.dtype)); }
  static void run(Context& ctx, const QkNormRopeForwardFields& a) {
    qk_norm_rope_fwd(ctx, {.rope = a.rope(kOp), .norm = a.norm});
  }
};

// An absent dy leaves its tensor out.
struct QkNormRopeBackwardFields : QkNormRopeFields {
  Strided dq_out, dk_out;
  Matrix dweight;
  bool need_dweight = false;

  void fields(Fields& f) {
    f.strided("dq_out", dq_out, 3, 1, Role::optional), f.strided("dk_out", dk_out, 3, 1, Role::optional);
    inputs(f), f.option("need_dweight", need_dweight);
    f.result_if(bool(dq_out), "dq", q_out, q, q.dtype, q.swapped);
    f.result_if(bool(dk_out), "dk", k_out, k, q.dtype, k.swapped);
    const Vector& w = norm.any_weight();
    f.result_if(need_dweight, "dweight", dweight, 2, w.size, need_dweight ? w.dtype : q.dtype);
  }
  static void run(Context& ctx, const QkNormRopeBackwardFields& call) {
    QkNormRopeBwd a{.rope = call.rope(kOp), .norm = call.norm, .dweight = call.dweight};
    auto upstream = [&](const Strided& dy, RopeHeads& y, RopeHeads& x, RopeHeads& dx) {
      if (dy && y.data != nullptr)
        x = y, y = call.heads(kOp, dy);
      else
        y = dx = {};
    };
    upstream(call.dq_out, a.rope.q, a.q, a.rope.q_out), upstream(call.dk_out, a.rope.k, a.k, a.rope.k_out);
    qk_norm_rope_bwd(ctx, a);
  }
};

TIGON_CALL(QkNormRopeForwardFields, kOp, forward)
TIGON_CALL(QkNormRopeBackwardFields, kOp, backward)

}  // namespace

}  // namespace tigon
