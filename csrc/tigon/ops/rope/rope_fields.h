// PyTorch's operators of rope and qk_norm_rope share these fields.
#pragma once

#include "tigon/base/op.h"
#include "tigon/ops/rope/rope.h"

namespace tigon {

struct RopeFields {
  // The sizes are [B, H, T, D], [B, T, H, D], [H, T, D] or [T, H, D].
  Strided q, k;
  Strided cos, sin,
      // The sizes are [T, ...], [B, T, ...], or with axes [A, T, ...], [A, B, T, ...]. Without sin, cos holds
      // complex numbers as [..., R/2, 2].
      positions;
  // If absent, the results are q and k.
  Strided q_out, k_out;
  // The dimension of q and k that holds the heads.
  int64_t head_dim = 0;
  // 0 means halves, 1 neighbours, 2 neighbours in and halves out.
  int64_t pairs = 0;
  RopeForm form;
  bool keep_dtype = false;

  void heads(Fields& f, Role role = Role::rows, const char* q_name = "q", const char* k_name = "k") {
    f.strided(q_name, q, 3, 1, role), f.strided(k_name, k, 3, 1, Role::optional);
  }
  void tables(Fields& f, Role role = Role::input) {
    const int64_t axes = form.sections.given(), least = axes && !positions ? 3 : 2;
    f.strided("cos", cos, least + complex(), 1 + complex(), role);
    f.strided("sin", sin, least, 1, Role::optional);
    f.strided("positions", positions, 1 + axes, 0, Role::optional);
  }
  void options(Fields& f) {
    f.option("head_dim", head_dim), f.option("pairs", pairs), f.option("shared", form.shared);
    f.option("tail", form.tail), f.option("keep_dtype", keep_dtype);
    f.option("time", form.sections.time), f.option("height", form.sections.height);
    f.option("width", form.sections.width), f.option("mixed", form.sections.mixed);
  }
  // `wide` is the dtype of the results unless q's is kept.
  void results(Fields& f, DType wide) {
    f.result_if(true, "q_out", q_out, q, keep_dtype ? q.dtype : wide, q.swapped);
    f.result_if(true, "k_out", k_out, k, keep_dtype ? q.dtype : wide, k.swapped);
  }
  bool complex() const { return !sin && form.shared && cos && cos.sizes[cos.dims - 1] == 2; }
  RopeHeads heads(const char* op, const Strided& t) const;
  Rope rope(const char* op) const;
};

}  // namespace tigon
