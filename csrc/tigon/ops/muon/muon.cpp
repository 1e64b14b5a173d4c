#include "tigon/ops/muon/muon.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {

constexpr const char* kOp = "muon";

void require_list(const char* name, std::span<const Vector> list, int64_t size) {
  require_float(kOp, name, list[0].dtype);
  for (const Vector& v : list) require_vector(kOp, name, v, size, list[0].dtype);
}
// False where there is nothing to do.
bool require_lists(const char* name, std::span<const Vector> list, const char* other,
                   std::span<const Vector> others) {
  TIGON_CHECK(kOp, list.size() == others.size(), other, " must have ", list.size(), " tensors as ", name,
              ", got ", others.size());
  if (list.empty()) return false;
  require_list(name, list, list[0].size);
  require_list(other, others, list[0].size);
  return list[0].size > 0;
}

}  // namespace

void muon_momentum(Context& ctx, const MuonMomentum& a) {
  TIGON_CHECK(kOp, a.momentum >= 0.0, "momentum must be >= 0, got ", a.momentum);
  if (!require_lists("momenta", a.momenta, "grads", a.grads)) return;
  const int64_t size = a.grads[0].size, matrices = int64_t(a.grads.size()) * a.matrices;
  TIGON_CHECK(kOp, a.matrices > 0 && size % a.matrices == 0, "matrices must divide ", size,
              " elements of a tensor, got ", a.matrices);
  if (a.updates) require_list("updates", {&a.updates, 1}, int64_t(a.grads.size()) * size);
  require_optional(kOp, "factors", a.factors, matrices);
  require_optional(kOp, "squares", a.squares, matrices * muon_chunks(size / a.matrices), DType::f64);
  TIGON_RUN(kOp, ctx, muon_momentum, a);
}

void muon_update(Context& ctx, const MuonUpdate& a) {
  if (require_lists("params", a.params, "updates", a.updates)) TIGON_RUN(kOp, ctx, muon_update, a);
}

}  // namespace tigon
