// Computes RMSNorm with a gate, in two orders: Qwen3-Next normalizes and then gates; Mamba2 (Dao & Gu 2024,
// "Transformers are SSMs", section 7.1) gates and then normalizes by group. RMSNorm: Zhang & Sennrich 2019,
// eq. 4.
// Formula     a = act(gate),  act = silu or sigmoid,  rms = (mean over a group of v^2, + eps)^-1/2
//             norm first: h = x * rms(x),         y = h * (offset + weight) * a
//             gate first: v = x * a, h = v * rms(v), y = h * (offset + weight)
// Gradients   norm first: d = dy * a; dx as rms_norm with d for dy;
//             dgate = dy * h * (offset + weight) * act'(gate)
//             gate first: dv as rms_norm; dx = dv * a; dgate = dv * x * act'(gate);
//             dweight = sum over rows of h times dy or d
// Shapes      x, gate, y, dy, dx, dgate [rows, cols], any row stride; a row is cols / group groups, each
//             normalized by itself; weight, dweight [cols]; rstd [rows * cols / group]
// Dtypes      x, gate f32 | bf16 | f16, one for both; weight of that dtype or f32; rstd f32; accumulation
//             f32. y in x's dtype, but gate first with rounding llama in promote(x, weight)
// Rounding    llama: h is rounded to x's dtype before the weight; norm first rounds h * weight too, to
//             promote(x, weight), before the gate (Hugging Face Qwen3-Next, Mamba2, Zamba2, ...). gemma:
//             once, at the end (Kimi Linear, Falcon-H1).
// Saved       x, gate, weight, rstd (4 bytes a group)
// Aliasing    y may not overlap x or gate; dx and dgate may be dy or the input they belong to, but not both
// Determinism bitwise: fixed trees inside a group, fixed order over rows
// Traffic     forward 2 reads + 1 write; backward 3 reads + 2 writes
// Refused     group that does not divide cols, eps < 0, sizes or dtypes that do not fit: tigon::Error before
//             anything is written
#pragma once

#include "tigon/ops/rms_norm/rms_norm.h"

namespace tigon {

enum class GateAct : int { silu = 0, sigmoid = 1 };

// Forward and backward share these.
struct GatedRmsNorm {
  int64_t group = 0;  // columns normalized together; 0 for all
  bool norm_first = true;
  GateAct act = GateAct::silu;
  float offset = 0.0f;
  Rounding rounding = Rounding::llama;  // llama or gemma

  int64_t groups(const Matrix& x) const { return group > 0 ? x.cols / group : group == 0 ? 1 : 0; }
  // Returns the dtype of y.
  DType result(const Matrix& x, const Vector& weight) const {
    return norm_first ? x.dtype : rms_norm_result(x, weight, rounding);
  }
  void fields(Fields& f, const Matrix& x) {
    f.option("group", group);
    f.option("norm_first", norm_first);
    f.option("act", act);
    f.option("offset", offset);
    f.option("rounding", rounding);
    if (group == 0) group = x.cols;
    f.require(group > 0 && x.cols % group == 0, "group_size must divide ", x.cols, ", got ", group);
    f.require(rounding != Rounding::none, "rounding must be llama or gemma, got none");
  }
};

struct GatedRmsNormFwd {
  Matrix x;
  Matrix gate;
  Vector weight;  // empty if absent
  Matrix y;
  Vector rstd;  // empty if no backward follows
  float eps = 1e-6f;
  GatedRmsNorm options;

  void fields(Fields& f) {
    f.rows("x", x);
    f.input("gate", gate, x);
    f.parameter("weight", weight, x);
    f.eps(eps);
    options.fields(f, x);
    f.result("y", y, x, options.result(x, weight));
    f.statistics("rstd", {{"rstd", rstd}}, x.rows * options.groups(x));
  }
};

struct GatedRmsNormBwd {
  Matrix dy;
  Matrix x;
  Matrix gate;
  Vector weight;
  Vector rstd;
  Matrix dx, dgate;  // empty if not wanted
  Vector dweight;    // empty if not wanted
  GatedRmsNorm options;

  void fields(Fields& f) {
    f.input("dy", dy, x, options.result(x, weight));
    f.rows("x", x);
    f.input("gate", gate, x);
    f.parameter("weight", weight, x);
    f.saved("rstd", {{"rstd", rstd}}, x.rows * options.groups(x));
    options.fields(f, x);
    f.gradient("dx", dx, x);
    f.gradient("dgate", dgate, x);
    f.gradient("dweight", dweight, "weight", weight);
  }
};

TIGON_API_OP(gated_rms_norm, GatedRmsNorm)

}  // namespace tigon
