// Computes what Muon needs in addition to its GEMMs, over lists of tensors of one size (Jordan et al. 2024,
// "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, arXiv:2502.16982). A list is
// one launch, of any alignment. A list that does not fit the parameters of a kernel takes a few tiny launches
// more.
// Formula     muon_momentum: m += (1 - momentum) * (g - m) if it adds;  u = m, or g + momentum * (m - g) with
//             nesterov
//             updates = factor * u;  squares: sums of u^2
//             muon_update: p -= lr * weight_decay * p;  p -= lr * ratio * u
// Shapes      all tensors of a list have one size, of muon_momentum `matrices` matrices each; updates: all of
//             them, adjacent; factors [tensors * matrices]; squares [tensors * matrices, muon_chunks(elements
//             of a matrix)]
// Dtypes      each list and updates f32 | bf16 | f16; factors f32; squares f64; arithmetic f32
// Rounding    to nearest even: m and p on store; u, which follows from that m, to grads' dtype; updates on
//             store. Sums of at most 64 squares f32, above f64
// Saved       nothing; m and p are updated in place
// Aliasing    one list may serve as momenta and grads, and as updates too if its elements have that size;
//             else none
// Determinism bitwise: every element by itself, whatever the list, the device or its instruction set; squares
//             on one device, of a matrix wherever it is in the list
// Traffic     every tensor once, m twice if it adds: in 16 bits 6 bytes an element to add, to form updates,
//             and of muon_update
// Refused     other sizes or dtypes: tigon::Error before anything is written
#pragma once

#include <span>

#include "tigon/base/fields.h"

namespace tigon {

// Each part of a matrix of this size has a sum of squares.
constexpr int64_t kMuonChunk = 16384;
constexpr int64_t muon_chunks(int64_t size) { return (size + kMuonChunk - 1) / kMuonChunk; }

// Names two lists of one length, the first of which is updated. Returns the elements of a tensor.
inline int64_t muon_lists(Fields& f, const char* name, std::span<const Vector>& list, const char* other,
                          std::span<const Vector>& others) {
  auto size = [&] { return list.empty() ? 0 : list[0].size; };
  f.list(name, list, {.updated = true, .size = size()});
  f.list(other, others, {.size = size()});
  f.require(list.size() == others.size(), other, " must have ", list.size(), " tensors as ", name, ", got ",
            others.size());
  return size();
}

struct MuonMomentum {
  std::span<const Vector> momenta, grads;
  Vector updates, factors, squares;  // each may be absent
  int64_t matrices = 1;              // matrices in a tensor
  double momentum = 0.95;
  bool nesterov = true, adds = true;

  void fields(Fields& f) {
    const int64_t size = muon_lists(f, "momenta", momenta, "grads", grads);
    f.option("momentum", momentum);
    f.option("nesterov", nesterov);
    f.option("adds", adds);
    f.require(momentum >= 0.0, "momentum must be >= 0, got ", momentum);
    f.flat("updates", updates, int64_t(grads.size()) * size, updates.dtype, true);
    f.require(!updates || is_kernel_float(updates.dtype),
              "updates must be float32, bfloat16 or float16, got ", name_of(updates.dtype));
    const int64_t count = int64_t(grads.size()) * matrices, matrix = matrices > 0 ? size / matrices : 0;
    f.flat("factors", factors, count, DType::f32);
    f.flat("squares", squares, count * muon_chunks(matrix), DType::f64, true);
    f.option("matrices", matrices);
    // A process that has no rows of the matrices has size 0.
    f.require(size == 0 || (matrices > 0 && size % matrices == 0), "matrices must divide ", size,
              " elements of a tensor, got ", matrices);
  }
};

struct MuonUpdate {
  std::span<const Vector> params, updates;
  double lr = 1e-3;
  // If given, this element on the context's device is used instead of lr.
  Vector lr_on_device;
  double ratio = 1.0;
  double weight_decay = 0.1;

  void fields(Fields& f) {
    muon_lists(f, "params", params, "updates", updates);
    f.option("lr", lr);
    f.scalar("lr_on_device", lr_on_device, DType::f32, Role::optional);
    f.option("ratio", ratio);
    f.option("weight_decay", weight_decay);
  }
};

TIGON_API_ENTRY(muon_momentum, MuonMomentum)
TIGON_API_ENTRY(muon_update, MuonUpdate)

}  // namespace tigon
