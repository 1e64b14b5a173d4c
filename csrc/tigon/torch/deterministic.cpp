// Contexts are deterministic if tigon.deterministic says so, else if PyTorch uses deterministic algorithms.
#include <atomic>

#include "tigon/torch/context.h"

// This function is not part of the stable interface. It is null if this PyTorch does not have it.
namespace at {
class Context {
 public:
  [[gnu::weak]] bool deterministicAlgorithms() const;
};
[[gnu::weak]] Context& globalContext();
}  // namespace at

namespace {

std::atomic<int> said = -1;  // 0, 1, or -1 to follow PyTorch

}  // namespace

namespace tigon::torch_shim {

bool deterministic() {
  const int mode = said.load(std::memory_order_relaxed);
  return mode >= 0 ? mode : at::globalContext != nullptr && at::globalContext().deterministicAlgorithms();
}

}  // namespace tigon::torch_shim

// Returns the previous mode.
extern "C" TIGON_API int tigon_set_deterministic(int mode) { return said.exchange(mode); }
extern "C" TIGON_API int tigon_deterministic() { return tigon::torch_shim::deterministic(); }
