#include "tigon/ops/muon/muon.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {

constexpr const char* kOp = "muon";

void require_list(const char* name, std::span<const Vector> list, const Vector& like) {
  require_float(kOp, name, like.dtype);
  for (const Vector& v : list) require_vector(kOp, name, v, like.size, like.dtype);
}
void require_lists(const char* name, std::span<const Vector> list, const char* other,
                   std::span<const Vector> others) {
  TIGON_CHECK(kOp, list.size() == others.size(), other, " must have ", list.size(), " tensors as ", name,
              ", got ", others.size());
  if (list.empty()) return;
  require_list(name, list, list[0]);
  require_list(other, others, {.dtype = others[0].dtype, .size = list[0].size});
}

}  // namespace

void muon_momentum(Context& ctx, const MuonMomentum& a) {
  require_lists("momenta", a.momenta, "grads", a.grads);
  TIGON_CHECK(kOp, a.momentum >= 0.0, "momentum must be >= 0, got ", a.momentum);
  if (a.grads.empty() || a.grads[0].size == 0) return;
  const int64_t size = a.grads[0].size, count = int64_t(a.grads.size());
  TIGON_CHECK(kOp, a.matrices > 0 && size % a.matrices == 0, "matrices must divide ", size,
              " elements of a tensor, got ", a.matrices);
  require_optional(kOp, "updates", a.updates, count * size, a.updates.dtype);
  if (a.updates) require_float(kOp, "updates", a.updates.dtype);
  require_optional(kOp, "factors", a.factors, count * a.matrices);
  require_optional(kOp, "squares", a.squares, count * a.matrices * muon_chunks(size / a.matrices), DType::f64);
  TIGON_RUN(kOp, ctx, muon_momentum, a);
}

void muon_update(Context& ctx, const MuonUpdate& a) {
  require_lists("params", a.params, "updates", a.updates);
  if (a.params.empty() || a.params[0].size == 0) return;
  TIGON_RUN(kOp, ctx, muon_update, a);
}

}  // namespace tigon
