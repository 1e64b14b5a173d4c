#include "tigon/base/op.h"
#include "tigon/ops/contrastive/contrastive_cosine.h"

namespace tigon {
namespace cpu {
void contrastive_cosine_fwd(Context&, const ContrastiveCosineFwd&) {
  detail::fail("contrastive_cosine", {"q must be on a GPU of sm_90, got one on the CPU"});
}
void contrastive_cosine_bwd(Context&, const ContrastiveCosineBwd&) {
  detail::fail("contrastive_cosine", {"q must be on a GPU of sm_90, got one on the CPU"});
}
}  // namespace cpu
TIGON_OP(contrastive_cosine, ContrastiveCosine)
}  // namespace tigon
