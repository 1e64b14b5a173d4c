// Walks over a list for both passes, on host and device.
#pragma once

#include "tigon/ops/muon/muon.h"

namespace tigon::muon_detail {

// Computes x = f.next(x, y) and w = factor * f.direction(x, y). Streams without data are not wanted.
struct Entry {
  Vector x, y, w;
};
struct Pass {
  int64_t tensors, size, matrices;  // size and matrices are those of a tensor
  bool updates;                     // x is updated
  const float* factors;
  double* squares;  // of directions

  constexpr int64_t chunks() const { return muon_chunks(size / matrices); }
  constexpr int64_t parts() const { return tensors * matrices * chunks(); }
};
// A task, or CTA, takes elements [begin, begin + size) of a tensor.
struct Part {
  int64_t matrix, tensor, begin, size = 0;
  constexpr Part(const Pass& p, int64_t i)
      : matrix(i / p.chunks()), tensor(matrix / p.matrices), begin(i % p.chunks() * kMuonChunk) {
    const int64_t matrix_size = p.size / p.matrices, left = matrix_size - begin;
    size = left < kMuonChunk ? left : kMuonChunk;
    begin += matrix % p.matrices * matrix_size;
  }
};

inline Pass pass_of(const MuonMomentum& a) {
  return {int64_t(a.grads.size()), a.grads[0].size,       a.matrices, a.adds,
          a.factors.as<float>(),   a.squares.as<double>()};
}
inline Pass pass_of(const MuonUpdate& a) {
  return {int64_t(a.params.size()), a.params[0].size, 1, true, nullptr, nullptr};
}
inline Entry entry_at(const MuonMomentum& a, int64_t i) {
  const int64_t size = a.grads[0].size;
  Vector w = a.updates;
  if (w) w.data = w.as<char>() + i * size * int64_t(size_of(w.dtype));
  return {a.momenta[size_t(i)], a.grads[size_t(i)], w};
}
inline Entry entry_at(const MuonUpdate& a, int64_t i) {
  return {a.params[size_t(i)], a.updates[size_t(i)], {}};
}

}  // namespace tigon::muon_detail
