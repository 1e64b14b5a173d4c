#include "tigon/base/elementwise.h"
#include "tigon/ops/muon/muon.h"

namespace tigon::cpu {
namespace {

struct MuonTable {
  double (*momentum)(const Vector& m, const Vector& g, const Vector& u, float factor, const MuonMomentum& a);
  void (*update)(const Vector& p, const Vector& u, double lr, const MuonUpdate& a);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/muon/muon_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void muon_momentum(Context& ctx, const MuonMomentum& a) {
  const int64_t tensor = a.grads[0].size, size = tensor / a.matrices, chunks = muon_chunks(size);
  const auto span = TIGON_SELECT(muon_table).momentum;
  parallel(ctx, int64_t(a.grads.size()) * a.matrices * chunks, [&](int64_t task) {
    const int64_t matrix = task / chunks, first = task % chunks * kMuonChunk;
    const int64_t i = matrix / a.matrices, begin = matrix % a.matrices * size + first;
    auto part = [&](const Vector& v, int64_t at) {
      return Vector{element_at(v, at), v.dtype, std::min(kMuonChunk, size - first)};
    };
    const double sum = span(part(a.momenta[size_t(i)], begin), part(a.grads[size_t(i)], begin),
                            part(a.updates, i * tensor + begin),
                            a.factors ? a.factors.as<float>()[matrix] : 1.0f, a);
    if (a.squares) a.squares.as<double>()[task] = sum;
  });
}

void muon_update(Context& ctx, const MuonUpdate& a) {
  const double lr = a.lr_on_device != nullptr ? double(*a.lr_on_device) : a.lr;
  const auto span = TIGON_SELECT(muon_table).update;
  const VectorChunks params(ctx, a.params, kMuonChunk), updates(ctx, a.updates, kMuonChunk);
  parallel(ctx, params.count(), [&](int64_t task) { span(params[task], updates[task], lr, a); });
}

}  // namespace tigon::cpu
