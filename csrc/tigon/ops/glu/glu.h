// Computes gated linear units (Shazeer 2020, "GLU Variants Improve Transformer", section 2, without the
// projections): SwiGLU, GeGLU, ReGLU, and the clamped SwiGLUs of OpenAI's gpt-oss and of DeepSeek-V4.
// Formula     y = down_multiplier * act(gate_multiplier * gate) * up  (the multipliers: Falcon-H1;
//             swiglu only)
//             swiglu      act(x) = x * s(x),  s(x) = 1 / (1 + e^-x)
//             geglu       act(x) = x * Phi(x), Phi the normal distribution (Hendrycks & Gimpel 2016,
//                         arXiv:1606.08415)
//             geglu_tanh  act(x) = x * s(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3): 0.5 x (1 + tanh u),
//                         ibid.
//             reglu       act(x) = max(x, 0)
//             relu_squared  act(x) = max(x, 0)^2
//             swiglu_oai  y = (clamp(up, -limit, limit) + 1) * g * s(alpha * g),  g = min(gate, limit)
//             swiglu_clamped  y = clamp(up, -limit, limit) * g * s(g),  g = min(gate, limit)
// Gradients   dup = dy * act(gate);  dgate = dy * up * act'(gate), with the multipliers that the formula has
//             swiglu      act'(x) = s * (1 + x * (1 - s))
//             geglu       act'(x) = Phi(x) + x * Phi'(x)
//             geglu_tanh  act'(x) = s + x * s * (1 - s) * 2 u',  u' = sqrt(2 / pi) * (1 + 3 * 0.044715 x^2)
//             reglu       dgate = dy * up if gate > 0, else 0 whatever dy * up is
//             relu_squared  act'(x) = 2 max(x, 0)
//             swiglu_oai  dgate = dy * (u + 1) * s * (1 + alpha * g * (1 - s)) if gate <= limit, else 0;
//                         dup = dy * g * s if -limit <= up <= limit, else 0 (as in clamp: 0 for NaN too)
//             swiglu_clamped  the same with u instead of u + 1 and alpha = 1
// Shapes      all [rows, cols], any row stride. Without `up`, `gate` [rows, 2 * cols] and `dgate` hold both:
//             gate in the left half, up in the right one; swiglu_oai, which takes no other form, has them in
//             even and odd columns
// Dtypes      f32 | bf16 | f16, one for all; arithmetic f32
// Rounding    once, on store. Hugging Face rounds the activation to 16 bits before the product; this is more
//             accurate.
// Saved       gate, up
// Aliasing    y (but not of an interleaved input), dgate and dup may be any of the inputs (same address and
//             stride) but overlap none in part
// Determinism bitwise: every element by itself
// Traffic     forward 2 reads + 1 write; backward 3 reads + 2 writes (dgate only: 3 + 1; dup only: 2 + 1, 3 +
//             1 clamped)
// Refused     sizes, dtypes or a limit that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"
#include "tigon/base/gated_unit.h"
#include "tigon/base/row_bytes.h"

namespace tigon {

// Names the fields of both directions. Returns the columns of y.
int64_t glu_inputs(Fields& f, Matrix& gate, Matrix& up, GluOptions& o);

struct GluFwd {
  Matrix gate;
  Matrix up;
  Matrix y;
  GluOptions options;
  RowBytes bytes;  // of y

  void fields(Fields& f) {
    const int64_t cols = glu_inputs(f, gate, up, options);
    f.result("y", y, gate, gate.rows, cols);
  }
};

struct GluBwd {
  Matrix dy;
  Matrix gate;
  Matrix up;
  Matrix dgate;  // empty if not wanted
  Matrix dup;    // empty if not wanted
  GluOptions options;
  RowBytes gate_bytes, up_bytes;  // of both gradients, or of none

  void fields(Fields& f) {
    f.input("dy", dy, gate.rows, up.data ? gate.cols : gate.cols / 2, gate.dtype);
    glu_inputs(f, gate, up, options);
    f.result_over(options.kind == GluKind::swiglu_oai ? "dgate_up" : "dgate", dgate, "gate", gate,
                  Role::gradient);
    f.result_over("dup", dup, "up", up, Role::gradient);
  }
};

TIGON_API_OP(glu, Glu)

}  // namespace tigon
