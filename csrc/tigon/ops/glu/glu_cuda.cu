// The CUDA backend of the gated linear units moves 3 elements per point forward and 5 backward. At the speed
// of memory in bf16 an H200 has about 40 and 65 instructions per point; exact GELU, the most expensive, takes
// about 30 and 40.
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/pointwise_rows.cuh"
#include "tigon/ops/glu/glu.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/glu/glu_math.inc"

// Maps gate, up -> y and dy, gate, up -> dgate, dup for any kind, for single elements.
struct AnyForward {
  static constexpr int kIn = 2, kOut = 1;
  GluOptions options;
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    with_kind(options.kind, [&]<GluKind K>() { out[0] = glu_y<K>(in[0], in[1], options); });
  }
};
struct AnyBackward {
  static constexpr int kIn = 3, kOut = 2;
  GluOptions options;
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    with_kind(options.kind,
              [&]<GluKind K>() { glu_gradients<K>(in[0], in[1], in[2], options, out[0], out[1]); });
  }
};

template <GluKind K>
struct GluForward {
  static constexpr int kIn = 2, kOut = 1;
  static constexpr bool is_long() { return K == GluKind::geglu; }
  GluOptions options;
  AnyForward single() const { return {options}; }
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    out[0] = glu_y<K>(in[0], in[1], options);
  }
};
template <GluKind K>
struct GluBackward {
  static constexpr int kIn = 3, kOut = 2;
  GluOptions options;
  AnyBackward single() const { return {options}; }
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    glu_gradients<K>(in[0], in[1], in[2], options, out[0], out[1]);
  }
};

// Gate and up, and their gradients, are interleaved in one matrix.
template <GluKind K>
struct InterleavedForward : GluForward<K> {
  void single() const = delete;
  static constexpr bool is_long() { return true; }
  static constexpr int in_width(int) { return 2; }
};
template <GluKind K>
struct InterleavedBackward : GluBackward<K> {
  void single() const = delete;
  static constexpr bool is_long() { return true; }
  static constexpr int in_width(int i) { return i == 0 ? 1 : 2; }
  static constexpr int out_width(int) { return 2; }
};

template <GluKind K>
void forward(Context& ctx, const GluFwd& a) {
  if constexpr (K == GluKind::swiglu_oai)
    pointwise(name_of(K), ctx, Pointwise<InterleavedForward<K>>{{a.options}, {a.gate}, {a.y}});
  else
    pointwise(name_of(K), ctx, Pointwise<GluForward<K>>{{a.options}, {a.gate, a.up}, {a.y}});
}

template <GluKind K>
void backward(Context& ctx, const GluBwd& a) {
  if constexpr (K == GluKind::swiglu_oai) {
    pointwise(name_of(K), ctx, Pointwise<InterleavedBackward<K>>{{a.options}, {a.dy, a.gate}, {a.dgate}});
  } else {
    // dup by itself does not depend on up, unless it is clamped.
    const Matrix& up = a.dgate.data != nullptr || is_clamped(K) ? a.up : a.gate;
    pointwise(name_of(K), ctx, Pointwise<GluBackward<K>>{{a.options}, {a.dy, a.gate, up}, {a.dgate, a.dup}});
  }
}

// Calls fn.operator()<kind>() for the kinds whose kernels write bytes too.
template <class Fn>
bool with_bytes(GluKind kind, Fn&& fn) {
  if (kind == GluKind::swiglu) return fn.template operator()<GluKind::swiglu>();
  return kind == GluKind::geglu_tanh && fn.template operator()<GluKind::geglu_tanh>();
}

}  // namespace

void glu_fwd(Context& ctx, const GluFwd& a) {
  if (a.bytes.q.data != nullptr && with_bytes(a.options.kind, [&]<GluKind K>() {
        return pointwise_rows(name_of(K), ctx,
                              PointwiseRows<GluForward<K>>{{{a.options}, {a.gate, a.up}, {a.y}}, {a.bytes}});
      }))
    return;
  dispatch_kind(a.options.kind, [&]<GluKind K>() { forward<K>(ctx, a); });
}
void glu_bwd(Context& ctx, const GluBwd& a) {
  if (a.gate_bytes.q.data != nullptr && with_bytes(a.options.kind, [&]<GluKind K>() {
        return pointwise_rows(
            name_of(K), ctx,
            PointwiseRows<GluBackward<K>>{{{a.options}, {a.dy, a.gate, a.up}, {a.dgate, a.dup}},
                                          {a.gate_bytes, a.up_bytes}});
      }))
    return;
  dispatch_kind(a.options.kind, [&]<GluKind K>() { backward<K>(ctx, a); });
}

}  // namespace tigon::cuda
