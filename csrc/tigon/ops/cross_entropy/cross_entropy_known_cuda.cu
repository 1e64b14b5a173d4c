// The CUDA backend of cross_entropy's gradient for rows whose statistics are known, which reads the logits
// once and reduces nothing: p = e^(z - known_max - known_log_sum + log_mass). It takes rows without bias,
// softcap, label smoothing and entropies. A CTA has up to 1024 vectors of one row, as in an elementwise
// kernel. Rows run from the last to the first, since the pass of the statistics has left the last ones in L2.
#include <algorithm>

#include "tigon/ops/cross_entropy/cross_entropy_rows.cuh"

namespace tigon::cuda {
namespace {

constexpr int kThreads = 256, kVecsPerThread = 4, kBlocksPerSm = 6;

// Holds the gradient of a row: factor * e^(z - m + shift), and in the label's column of_label.
struct KnownGradient {
  float scale, m, shift, factor, of_label;
  __device__ __forceinline__ float of(float x) const {
    return factor * exp2_approx(fma(fma(x, scale, -m), kLog2e, shift));
  }
};

template <class T>
__device__ __forceinline__ KnownGradient known_gradient(const CrossEntropyParams<T>& p, int64_t r,
                                                        int label) {
  const float m = p.known_max[r], log_sum = p.known_log_sum[r], log_mass = p.log_mass[r];
  const bool nothing = log_mass == -INFINITY;  // all columns are at -inf, and p = 0
  float weight = 1.0f, z_loss_slope = 0.0f, factor = p.gain;
  if (p.class_weight != nullptr && (label >= 0 || label == kElsewhere))
    weight = __ldg(p.class_weight + (p.target[r] - p.first_class));
  if (p.scale != nullptr) factor *= p.scale[r * p.scale_step];
  if (label == kOutOfRange) factor = NAN;
  if (p.z_loss != 0.0f && !nothing) z_loss_slope = 2.0f * p.z_loss * (m + log_sum - log_mass);
  KnownGradient g{p.logit_scale, finite_max(m), 0.0f, factor * (weight + z_loss_slope), 0.0f};
  if (!nothing) g.shift = (log_mass - log_sum) * kLog2e;
  if (label >= 0) {
    const float log_prob = p.all_log_prob[r];
    g.of_label = factor * (weight * expm1f(log_prob) + z_loss_slope * expf(log_prob));
  }
  return g;
}

// A row has `tiles` CTAs, each with p.slice vectors; the first one has the columns at the row's ends too.
template <class T>
__global__ __launch_bounds__(kThreads,
                             kBlocksPerSm) void known_kernel(const __grid_constant__ CrossEntropyParams<T> p,
                                                             int tiles) {
  constexpr int N = AlignedRow<T>::N;
  const int tid = int(threadIdx.x);
  for (int64_t i = blockIdx.x; i < p.rows * tiles; i += gridDim.x) {
    const int64_t r = p.rows - 1 - i / tiles;
    const int tile = int(i % tiles);
    const PeeledRow<const T> row(p.logits + r * p.stride, p.cols);
    T* out = static_cast<T*>(p.dlogits) + r * p.dlogits_stride;
    const int first = tile * p.slice, end = min(first + p.slice, row.vecs);
    auto vec = [&](int k) { return first + k * kThreads + tid; };
    uint4 q[kVecsPerThread];
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) q[k] = load_or_minus_inf<T, true>(vec(k) < end, row.vec(vec(k)));
    const int edge = tile == 0 ? row.edge_column(p.cols) : -1, label = label_of(p, p.target[r]);
    KnownGradient g{};
    if (label != kSkipped) g = known_gradient(p, r, label);
    auto of = [&](float x) { return label == kSkipped ? 0.0f : g.of(x); };
    if (edge >= 0) out[edge] = narrow<T>(edge == label ? g.of_label : of(widen(row.x[edge])));
    T* to = out + row.head;
    const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      if (vec(k) >= end) continue;
      store_words<T>(to + int64_t(vec(k)) * N, gradient_of<T, T>(q[k], of), aligned);
      // The thread that has stored the label's neighbours stores the label's column.
      const int at = label - row.head;
      if (at >= 0 && at / N == vec(k)) out[label] = narrow<T>(g.of_label);
    }
  }
}

}  // namespace

template <class T>
void cross_entropy_known(Context& ctx, CrossEntropyParams<T> p) {
  const int64_t vecs = ceil_div(p.cols, AlignedRow<T>::N);
  const int64_t tiles = ceil_div(vecs, kThreads * kVecsPerThread);
  p.slice = int(ceil_div(ceil_div(vecs, tiles), 32) * 32);
  const int64_t blocks = std::min<int64_t>(p.rows * tiles, INT32_MAX);
  launch(kOp, ctx, known_kernel<T>, {.blocks = blocks, .threads = kThreads}, p, int(tiles));
}

template void cross_entropy_known(Context&, CrossEntropyParams<float>);
template void cross_entropy_known(Context&, CrossEntropyParams<__nv_bfloat16>);
template void cross_entropy_known(Context&, CrossEntropyParams<__half>);

}  // namespace tigon::cuda
