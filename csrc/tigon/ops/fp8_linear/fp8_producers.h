// Ops that write a result and its rows in float8, for the linear that reads them next: in one pass where
// their kernels can, else by fp8_quantize. Bytes, scales and results are those of the op and of that cast.
#pragma once

#include "tigon/ops/add_rms_norm/add_rms_norm.h"
#include "tigon/ops/fp8_linear/fp8_quantize.h"
#include "tigon/ops/glu/glu.h"
#include "tigon/ops/rms_norm/rms_norm.h"

namespace tigon {

// A forward of Op, whose first result is y.
template <class Op>
struct Fp8Forward : Op {
  void fields(Fields& f) {
    Op::fields(f);
    f.result("q", this->bytes.q, this->y.rows, this->y.cols, DType::e4m3);
    f.result("scales", this->bytes.scales, this->y.rows, DType::f32);
  }
};
using RmsNormFp8 = Fp8Forward<RmsNormFwd>;
using AddRmsNormFp8 = Fp8Forward<AddRmsNormFwd>;
using GluFp8 = Fp8Forward<GluFwd>;

// Both gradients, and their rows in float8 with factors by column.
struct GluBwdFp8 : GluBwd {
  void fields(Fields& f) {
    GluBwd::fields(f);
    f.require(up.data && dgate.data && dup.data, "up and both gradients must be there");
    f.input("gate_factors", gate_bytes.factors, gate.cols, DType::f32);
    f.input("up_factors", up_bytes.factors, gate.cols, DType::f32);
    f.result("gate_q", gate_bytes.q, gate.rows, gate.cols, DType::e4m3);
    f.result("gate_scales", gate_bytes.scales, gate.rows, DType::f32);
    f.result("up_q", up_bytes.q, gate.rows, gate.cols, DType::e4m3);
    f.result("up_scales", up_bytes.scales, gate.rows, DType::f32);
  }
};

TIGON_API void rms_norm_fp8(Context& ctx, const RmsNormFp8& a);
TIGON_API void add_rms_norm_fp8(Context& ctx, const AddRmsNormFp8& a);
TIGON_API void glu_fp8(Context& ctx, const GluFp8& a);
TIGON_API void glu_bwd_fp8(Context& ctx, const GluBwdFp8& a);

}  // namespace tigon
