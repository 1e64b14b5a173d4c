// Whether contexts are deterministic: as tigon.deterministic says, else as PyTorch's deterministic algorithms are.
#include <atomic>

#include "tigon/torch/context.h"

// No part of the stable interface; null where a PyTorch is without it.
namespace at {
class Context {
 public:
  [[gnu::weak]] bool deterministicAlgorithms() const;
};
[[gnu::weak]] Context& globalContext();
}  // namespace at

namespace {

std::atomic<int> said = -1;  // 0, 1, or -1: as PyTorch

}  // namespace

namespace tigon::torch_shim {

bool deterministic() {
  const int mode = said.load(std::memory_order_relaxed);
  return mode >= 0 ? mode : at::globalContext != nullptr && at::globalContext().deterministicAlgorithms();
}

}  // namespace tigon::torch_shim

// Returns what was said before.
extern "C" TIGON_API int tigon_set_deterministic(int mode) { return said.exchange(mode); }
extern "C" TIGON_API int tigon_deterministic() { return tigon::torch_shim::deterministic(); }
