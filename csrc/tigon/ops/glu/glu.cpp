#include "tigon/ops/glu/glu.h"

#include <string>

#include "tigon/base/require.h"

namespace tigon {
namespace {

// The op's name in messages.
std::string checked_name(const GluOptions& o, const char* direction) {
  TIGON_CHECK("glu", int(o.kind) >= 0 && int(o.kind) < kGluKinds, "kind must be one of 0 to ", kGluKinds - 1,
              ", got ", int(o.kind));
  std::string op = std::string(name_of(o.kind)) + direction;
  if (is_clamped(o.kind)) TIGON_CHECK(op.c_str(), o.limit > 0.0f, "limit must be > 0, got ", o.limit);
  return op;
}

// As require_pointwise, for an interleaved matrix of twice as many columns as `narrow` has.
bool require_interleaved(const char* op, NamedMatrix wide, NamedMatrix narrow) {
  const Matrix &w = wide.matrix, &n = narrow.matrix;
  require_float(op, wide.name, w.dtype);
  TIGON_CHECK(op, w.cols % 2 == 0, wide.name, " must have an even number of columns, got ", w.cols);
  require_matrix(op, narrow.name, n, w.rows, w.cols / 2, w.dtype);
  return n.rows != 0 && n.cols != 0;
}

}  // namespace

void glu_fwd(Context& ctx, const GluFwd& a) {
  std::string name = checked_name(a.options, "");
  const char* op = name.c_str();
  bool work = a.options.kind == GluKind::swiglu_oai
                  ? require_interleaved(op, {"gate_up", a.gate}, {"y", a.y})
                  : require_pointwise(op, {"gate", a.gate}, {{"up", a.up}, {"y", a.y}});
  if (work) TIGON_RUN(op, ctx, glu_fwd, a);
}

void glu_bwd(Context& ctx, const GluBwd& a) {
  std::string name = checked_name(a.options, "_bwd");
  const char* op = name.c_str();
  bool work;
  if (a.options.kind == GluKind::swiglu_oai) {
    work = require_interleaved(op, {"gate_up", a.gate}, {"dy", a.dy});
    if (a.dgate.data != nullptr)
      require_matrix(op, "dgate_up", a.dgate, a.gate.rows, a.gate.cols, a.gate.dtype);
  } else {
    work = require_pointwise(op, {"gate", a.gate},
                             {{"up", a.up}, {"dy", a.dy}, {"dgate", a.dgate, true}, {"dup", a.dup, true}});
  }
  bool wanted = a.dgate.data != nullptr || a.dup.data != nullptr;
  if (work && wanted) TIGON_RUN(op, ctx, glu_bwd, a);
}

}  // namespace tigon
