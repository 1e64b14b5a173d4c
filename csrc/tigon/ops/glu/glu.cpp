#include "tigon/ops/glu/glu.h"

#include <string>

#include "tigon/base/op.h"

namespace tigon {
namespace {

// Returns the op's name in messages.
std::string name_of(const GluOptions& o, const char* direction) {
  TIGON_CHECK("glu", is_kind(o.kind), "kind must be one of 0 to ", kGluKinds - 1, ", got ", int(o.kind));
  return std::string(name_of(o.kind)) + direction;
}

// Replaces a matrix of both by its halves.
void split(Matrix& gate, Matrix& up) {
  gate.cols /= 2;
  up = gate;
  if (gate.data) up.data = static_cast<char*>(gate.data) + gate.cols * int64_t(size_of(gate.dtype));
}
// Calls a backend's entry, which takes halves.
template <class Entry>
auto with_halves(const Entry& entry) {
  return [entry](Context& ctx, auto a) {
    if (a.up.data == nullptr && a.options.kind != GluKind::swiglu_oai) {
      split(a.gate, a.up);
      if constexpr (std::is_same_v<decltype(a), GluBwd>) split(a.dgate, a.dup);
    }
    entry(ctx, a);
  };
}

}  // namespace

int64_t glu_inputs(Fields& f, Matrix& gate, Matrix& up, GluOptions& o) {
  const bool interleaved = o.kind == GluKind::swiglu_oai;
  const char* name = interleaved ? "gate_up" : "gate";  // the name in messages
  if (is_kind(o.kind)) f.rename(name_of(o.kind));
  f.rows(name, gate, 0);
  f.optional("up", up, gate);
  f.option("kind", o.kind);
  f.option("gate_multiplier", o.gate_multiplier);
  f.option("down_multiplier", o.down_multiplier);
  f.option("alpha", o.alpha);
  f.option("limit", o.limit);
  f.require(!is_clamped(o.kind) || o.limit > 0.0f, "limit must be > 0, got ", o.limit);
  if (up.data) {
    f.require(!interleaved, "up must be None (interleaved with gate), got a tensor");
    return gate.cols;
  }
  f.require(gate.cols % 2 == 0, name, " must have an even number of columns",
            interleaved ? ", got " : " without up, got ", gate.cols);
  // dup, which is absent too, takes its dtype from up.
  up.dtype = gate.dtype;
  return gate.cols / 2;
}

void glu_fwd(Context& ctx, const GluFwd& a) {
  run_op(name_of(a.options, "").c_str(), ctx, a, with_halves(&cpu::glu_fwd),
         with_halves(TIGON_CUDA_ENTRY(glu_fwd)));
}
void glu_bwd(Context& ctx, const GluBwd& a) {
  run_op(name_of(a.options, "_bwd").c_str(), ctx, a, with_halves(&cpu::glu_bwd),
         with_halves(TIGON_CUDA_ENTRY(glu_bwd)));
}
TIGON_OPERATOR(glu_fwd, GluFwd, "glu", forward)
TIGON_OPERATOR(glu_bwd, GluBwd, "glu", backward)

}  // namespace tigon
