// This epilogue finishes an expert's first GEMM: it computes the gated unit of the columns, and stores the
// columns themselves if they are kept.
#pragma once

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/matmul/epilogue_store.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/gated_unit.h"

namespace tigon::cuda::matmul {

#include "tigon/base/gated_unit.inc"

// True for the kinds whose only function is a sigmoid.
constexpr bool has_gate_epilogue(GluKind kind) { return kind == GluKind::swiglu || is_clamped(kind); }

// Serves groups of rows. A tile has 128 columns of gate and as many of up, which a lane has at the same
// places. The unit reads them rounded to T, as a kernel would read them from memory.
template <class T>
struct GateEpilogue {
  static constexpr int kRows = 64, kColumns = 64, kValues = kColumns / 2;
  struct Params {
    CUtensorMap act, gate, up;
    bool keeps;  // gate and up are stored
    GluOptions unit;
  };
  using Tensors = typename StoreEpilogue<T, Groups::rows>::Tensors;

  const Tile& tile;
  __device__ GateEpilogue(const Params&, const Tile& tile, int) : tile(tile) {}

  // Must not write the accumulators: the wait for their next MMAs would then be in a branch.
  __device__ __forceinline__ void run(const Params& p, Tensors& smem, int consumer,
                                      const float (&acc)[kAccumulators]) const {
    if (tile.m + consumer * kRows >= tile.end) return;
    int buffer = 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int x = tile.n / 2 + c * kColumns;
      auto store = [&](const CUtensorMap& map, const float* values, uint32_t (&w)[kValues / 2]) {
#pragma unroll
        for (int i = 0; i < kValues / 2; ++i) w[i] = pack<T>(values + 2 * i);
        if (&map == &p.act || p.keeps)
          store_block<View::ragged>(map, smem.d[consumer][buffer ^= 1], consumer, x, tile, w);
      };
      uint32_t gate[kValues / 2], up[kValues / 2], w[kValues / 2];
      store(p.gate, &acc[c * kValues], gate);
      store(p.up, &acc[kAccumulators / 2 + c * kValues], up);
      float act[kValues];
      auto apply = [&]<GluKind kKind>() {
#pragma unroll
        for (int k = 0; k < kValues; ++k) {
          const Approx g = reinterpret_cast<const Vec<T, 2>&>(gate[k / 2])[k % 2],
                       u = reinterpret_cast<const Vec<T, 2>&>(up[k / 2])[k % 2];
          act[k] = glu_y<kKind>(g, u, p.unit);
        }
      };
      if (p.unit.kind == GluKind::swiglu)
        apply.template operator()<GluKind::swiglu>();
      else if (p.unit.kind == GluKind::swiglu_oai)
        apply.template operator()<GluKind::swiglu_oai>();
      else
        apply.template operator()<GluKind::swiglu_clamped>();
      store(p.act, act, w);
    }
  }

  __device__ static __forceinline__ void finish() { cp_async_bulk_wait_group_read<0>(); }
};

}  // namespace tigon::cuda::matmul
