#include "tigon/base/elementwise.h"
#include "tigon/ops/muon/muon.h"

namespace tigon::cpu {
namespace {

struct MuonTable {
  double (*momentum)(const Vector& m, const Vector& g, const Vector& u, float weight, float momentum,
                     bool nesterov);
  void (*update)(const Vector& p, const Vector& u, float decay, float rate);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/muon/muon_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

constexpr int64_t kChunk = 16384;

Vector part(const Vector& v, int64_t begin, int64_t size) {
  return {.data = element_at(v, begin), .dtype = v.dtype, .size = size};
}

// fn(tensor, begin, n) of every chunk of matrices of `size` elements, `matrices` a tensor.
template <class Fn>
void for_each_chunk(Context& ctx, size_t tensors, int64_t matrices, int64_t size, const Fn& fn) {
  const int64_t chunks = muon_chunks(size);
  parallel(ctx, int64_t(tensors) * matrices * chunks, [&](int64_t task) {
    const int64_t matrix = task / chunks, first = task % chunks * kChunk;
    fn(task, size_t(matrix / matrices), matrix % matrices * size + first, std::min(kChunk, size - first));
  });
}

}  // namespace

void muon_momentum(Context& ctx, const MuonMomentum& a) {
  const auto& table = TIGON_SELECT(muon_table);
  const int64_t size = a.grads[0].size;
  for_each_chunk(ctx, a.grads.size(), a.matrices, size / a.matrices,
                 [&](int64_t task, size_t i, int64_t begin, int64_t n) {
                   a.squares.as<double>()[task] = table.momentum(
                       part(a.momenta[i], begin, n), part(a.grads[i], begin, n),
                       part(a.updates, int64_t(i) * size + begin, n), float(1.0 - a.momentum),
                       float(a.momentum), a.nesterov);
                 });
}

void muon_update(Context& ctx, const MuonUpdate& a) {
  const auto& table = TIGON_SELECT(muon_table);
  const double lr = a.lr_on_device != nullptr ? double(*a.lr_on_device) : a.lr;
  for_each_chunk(ctx, a.params.size(), 1, a.params[0].size,
                 [&](int64_t, size_t i, int64_t begin, int64_t n) {
                   table.update(part(a.params[i], begin, n), part(a.updates[i], begin, n),
                                float(-lr * a.weight_decay), float(-lr * a.ratio));
                 });
}

}  // namespace tigon::cpu
