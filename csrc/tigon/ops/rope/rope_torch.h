// What the adaptors of rope and qk_norm_rope share: tensors of heads and tables as views of the core.
#pragma once

#include "tigon/ops/rope/rope.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {

struct RopeTables {
  Tensor cos;
  OptionalTensor sin, positions;
  static constexpr const char* kNames[] = {"cos", "sin", "positions"};
};
struct RopeOptions {
  int64_t head_dim;  // the dimension of q and k that holds the heads
  int64_t pairs;     // 0 halves, 1 neighbours, 2 neighbours in and halves out
  bool shared, tail, keep_dtype;
  int64_t time, height, width;
  bool mixed;
  static constexpr const char* kNames[] = {"head_dim", "pairs",  "shared", "tail", "keep_dtype",
                                           "time",     "height", "width",  "mixed"};

  RopeForm form() const {
    return {.in = pairs == 0 ? RopePairs::halves : RopePairs::neighbours,
            .out = pairs == 1 ? RopePairs::neighbours : RopePairs::halves,
            .shared = shared,
            .tail = tail,
            .sections = {.time = time, .height = height, .width = width, .mixed = mixed}};
  }
};

// [B, H, T, D], [B, T, H, D], [H, T, D] or [T, H, D]; replaces `t` by a copy when its rows are not dense.
RopeHeads heads_of(const char* op, const char* name, Tensor& t, int64_t head_dim);
// The dimensions of heads and tokens lie in memory in the other order than in the tensor.
bool heads_swapped(const Tensor& x);
// Dense, sizes of x; `swapped`: see heads_swapped.
Tensor make_heads(const Tensor& x, DType dtype, bool swapped);
// Tables and form of a call whose tensors are on the device of `like`; tables are replaced by copies where their rows are not
// dense. Without sin, cos holds complex numbers as [..., R/2, 2].
Rope rope_of(const char* op, RopeTables& tables, const RopeOptions& options, const Tensor& like);

}  // namespace tigon::torch_shim
