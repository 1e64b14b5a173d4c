#include "tigon/base/op.h"
#include "tigon/ops/muon/muon_pass.h"

namespace tigon::cpu {
namespace {

using namespace muon_detail;

template <class Args>
using Walk = double (*)(const Entry& e, const Part& part, bool updates, float factor, const Args& args);
struct MuonTable {
  Walk<MuonMomentum> momentum;
  Walk<MuonUpdate> update;
};

template <class Args>
void run(Context& ctx, const Args& a, Walk<Args> walk) {
  const Pass pass = pass_of(a);
  parallel(ctx, pass.parts(), [&](int64_t task) {
    const Part part(pass, task);
    const double sum = walk(entry_at(a, part.tensor), part, pass.updates,
                            pass.factors != nullptr ? pass.factors[part.matrix] : 1.0f, a);
    if (pass.squares != nullptr) pass.squares[task] = sum;
  });
}

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/muon/muon_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void muon_momentum(Context& ctx, const MuonMomentum& a) { run(ctx, a, TIGON_SELECT(muon_table).momentum); }
void muon_update(Context& ctx, const MuonUpdate& a) { run(ctx, a, TIGON_SELECT(muon_table).update); }

}  // namespace tigon::cpu

namespace tigon {
TIGON_DEFINE_ENTRY(muon_momentum, MuonMomentum, "muon_momentum_", "muon", none)
TIGON_DEFINE_ENTRY(muon_update, MuonUpdate, "muon_update_", "muon", none)
}  // namespace tigon
