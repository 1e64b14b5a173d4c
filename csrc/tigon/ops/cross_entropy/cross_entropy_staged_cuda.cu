// The CUDA backend of cross_entropy for rows with a softcap keeps a row in shared memory until its sums are
// known. These rows have neither bias nor smoothing. It moves 2b bytes per element with the gradient, and b
// without (b = element size). A CTA, or a cluster of up to 16 (sm_90), copies a row to shared memory, each
// thread the vectors that it uses, and takes one row: while one CTA of an SM waits for memory, another
// computes. Two fit an SM. z is computed anew for the sum and for the gradient, by the polynomial if all of a
// vector's logits are near (softcap.h). Other vectors, and that of the label, take a loop over their
// elements.
#include <algorithm>

#include "tigon/ops/cross_entropy/cross_entropy_rows.cuh"

namespace tigon::cuda {
namespace {

using Z = Capped;
// Counts the threads of a CTA, and the vectors of a thread until there are that many threads.
constexpr int kThreads = 512, kVecsPerThread = 8;

// Names the forms of the loop over gradients: with or without the terms of entropies, and what vectors reach.
template <bool kEntropy, int kReach>
struct Form {};
template <class Fn>
__device__ __forceinline__ void with_form(bool entropy, bool close, Fn&& fn) {
  if (!entropy && close) return fn(Form<false, kClose>{});
  if (!entropy) return fn(Form<false, kNear>{});
  fn(Form<true, kNear>{});
}

template <class T, class D, class Gradient>
__device__ __forceinline__ uint4 gradient_of_any(const uint4& words, const Gradient& gradient) {
  uint4 r = {};
  for_pairs<T>(words, [&](int, float a, float b) {
    shift_in<D>(r, gradient.template of<kAny>(a), gradient.template of<kAny>(b));
  });
  return r;
}

// `top` holds words of the largest elements of a thread's vectors. Bit k of `slow` says that its vector k
// takes the loop over elements, as the one with the label does (own_tile, or -1). `close` says whether all
// other vectors of the warp are close.
struct Reach {
  uint32_t top, slow;
  bool close;
};
template <class T, class ForVecs>
__device__ __forceinline__ Reach reach_of(const Z& z, ForVecs&& for_vecs, const uint4* vecs, int own_tile) {
  uint32_t top = kMinusInf<T>, slow = 0, bit = 1, others = 0;
  for_vecs(0, [&](int i, bool) {
    const uint32_t most = max_words<T>(vecs[i]), absolute = extent<T>(most, min_words<T>(vecs[i]));
    const bool near = z.template reaches<T, kNear>(absolute);
    top = max_words<T>(top, most);
    slow |= near ? 0 : bit;
    others = near ? max_words<T>(others, absolute) : others;
    bit <<= 1;
  });
  if (own_tile >= 0) slow |= 1u << own_tile;
  return {top, slow, bool(__all_sync(~0u, z.template reaches<T, kClose>(others)))};
}

// As in register_kernel, the reduction orders all reads of a row before all writes to it, and all
// CTAs of a cluster reach its barriers or none does.
template <class T, class D>
__global__ __launch_bounds__(kThreads, 2) void staged_kernel(const __grid_constant__ CrossEntropyParams<T> p,
                                                             int64_t first_row) {
  constexpr int N = AlignedRow<T>::N;
  extern __shared__ uint4 vecs[];
  __shared__ ReduceStorage<EntropySums<T, Z>> storage;
  __shared__ TieStorage<true> ties;
  const int tid = int(threadIdx.x), threads = int(blockDim.x);
  const unsigned blocks = cluster_size(), rank = cluster_rank();
  const int64_t r = first_row + blockIdx.x / blocks;
  // The CTA has the columns [first, first + n) of the row.
  const int first = int(rank) * p.slice, n = min(p.slice, p.cols - first);
  D* out = static_cast<D*>(p.dlogits) + r * p.dlogits_stride + first;
  const int label = label_of(p, p.target[r]);
  const bool writes = tid == 0 && rank == 0;
  if (label == kSkipped) {
    if (p.dlogits != nullptr) clear(out, n);
    if (writes) finish_skipped(p, r);
    return;
  }
  if (blocks > 1) {
    storage.init(), ties.init();
    cluster_arrive();
  }
  const PeeledRow<const T> peeled(p.logits + r * p.stride + first, n);
  // Calls fn(i, is_slow) for the thread's vectors.
  auto for_vecs = [&](uint32_t slow, auto&& fn) {
#pragma unroll 1
    for (int i = tid; i < peeled.vecs; i += threads, slow >>= 1) fn(i, (slow & 1) != 0);
  };
  for_vecs(0, [&](int i, bool) { cp_async(&vecs[i], peeled.vec(i)); });
  cp_async_commit_group();
  // The load is issued before the value is needed.
  const float scale = p.scale != nullptr ? p.scale[r * p.scale_step] : 1.0f;
  const int c = peeled.edge_column(n);
  // The label's column within the part is outside all parts but one, or outside all.
  const int label_column = label - first;
  const ElementCoord own(peeled, label_column, threads);
  const bool edge_is_label = c >= 0 && c == label_column;
  const Z of(p);
  const float y = label >= 0 ? widen(peeled.x[label_column]) : -INFINITY;
  const float edge = c >= 0 ? widen(peeled.x[c]) : -INFINITY;
  const int own_vec = own.tile >= 0 ? own.vecs_before : -1;
  cp_async_wait_group<0>();
  const auto [top, slow, close] = reach_of<T>(of, for_vecs, vecs, own.tile);
  // The label's logit is part of the maximum, so it has been read before any thread may overwrite it.
  EntropySums<T, Z> a = EntropySums<T, Z>::identity();
  a.m = of.z(fmaxf(fmaxf(edge, y), max_of_word<T>(top)));
  const float from = Z::reference(a.m);
  if (c >= 0 && !edge_is_label) {
    const float d = of.template z_minus<kAny>(edge, from);
    a.s = exp_of_distance<Z>(d), a.heat = a.s * Z::finite(d);
  }
  // The terms of an entropy are added up whether it is wanted or not, so that the sum of a row is bitwise
  // equal.
  auto sum = [&]<int kReach>(std::integral_constant<int, kReach>) {
    for_vecs(slow, [&](int i, bool is_slow) {
      a.s += is_slow ? sum_of_any<T>(vecs[i], of, from, i == own_vec ? own.element : -1, a.heat)
                     : sum_of<T, kReach>(vecs[i], of, from, &a.heat);
    });
  };
  if (close)
    sum(std::integral_constant<int, kClose>{});
  else
    sum(std::integral_constant<int, kNear>{});
  // The loop above leaves a warp diverged.
  __syncwarp();
  // All CTAs have started.
  if (blocks > 1) cluster_wait();
  a = all_reduce_row<0, true>(a, storage, 0);
  const float z = label >= 0 ? of.z(y) : -INFINITY;
  const LabelZ of_label{z * Z::kUnit, of.template z_minus<kAny>(y, a.m) * Z::kUnit};
  const Gradient g =
      finish<true>(p, r, label, Sums<T>{a.m * Z::kUnit, a.s}, of_label, scale, writes, a.heat * Z::kUnit);
  if (p.predicted != nullptr)
    write_predicted<true>(p, r, label, Sums<T>{a.m, a.s}, z, ties, writes, [&] {
      float earlier = c < label_column ? edge : -INFINITY;
      for_vecs(0, [&](int i, bool) {
        if (i < own.vecs_before) earlier = fmaxf(earlier, max_of_word<T>(max_words<T>(vecs[i])));
        if (i == own.vecs_before) earlier = fmaxf(earlier, max_before<T>(vecs[i], own.element));
      });
      __syncwarp();
      return label > 0 ? of.z(earlier) : -INFINITY;
    });
  if (p.dlogits == nullptr) return;
  if (label == kIgnored) return clear(out, n);
  D* to = out + peeled.head;
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
  auto write = [&]<bool kEntropy, int kReach>(Form<kEntropy, kReach>) {
    const LogitGradient<Z, kEntropy> gradient{of, a.m, g.each + g.lift, g.tilt * Z::kUnit};
    if (c >= 0) out[c] = narrow<D>(gradient.template of<kAny>(edge));
    for_vecs(slow, [&](int i, bool is_slow) {
      uint4 words = vecs[i];
      if (is_slow)
        words = gradient_of_any<T, D>(words, gradient);
      else
        words = gradient_of<T, D>(words, [&](float x) { return gradient.template of<kReach>(x); });
      store_words<T>(to + int64_t(i) * N, words, aligned);
    });
  };
  with_form(p.entropy_scale != nullptr, close, write);
  // The thread that has stored the label's neighbours stores the label's column.
  if (edge_is_label || own.tile >= 0)
    out[label_column] = narrow<D>(of.template times_slope<kAny>(y, g.of_label<true>(of_label.below)));
}

}  // namespace

template <class T, class D>
bool cross_entropy_staged(Context& ctx, const CrossEntropyParams<T>& all) {
  static OncePerDevice prepared;
  static OccupancyCache occupancy;
  constexpr int N = AlignedRow<T>::N, kMostVecs = 32 * kThreads;
  // The system and the kernel's own variables take this much shared memory per CTA.
  constexpr int kSystem = 1024,
                kStatic = int(sizeof(ReduceStorage<EntropySums<T, Z>>) + sizeof(TieStorage<true>));
  auto kernel = &staged_kernel<T, D>;
  const DeviceFacts& facts = device_facts();
  const bool clusters = facts.capability >= 90;
  // Without clusters a row may take all of an SM.
  const int64_t shared = (facts.shared_per_block + kSystem) / (clusters ? 2 : 1) - kSystem - kStatic - 128;
  const int64_t most = std::min<int64_t>(shared / 16, kMostVecs) / 64 * 64, row_vecs = all.cols / N;
  const int blocks = int(std::max<int64_t>(1, ceil_div(row_vecs, most)));
  if (blocks > (clusters ? kMaxCluster : 1)) return false;
  CrossEntropyParams<T> p = all;
  // The slice is a multiple of 128 bytes, so that all parts of a row start at the same offset within 16
  // bytes.
  p.slice = blocks > 1 ? int(ceil_div(ceil_div(p.cols, blocks), 64) * 64) : p.cols;
  const int64_t vecs = p.slice / N;
  if (vecs > most || int64_t(blocks - 1) * p.slice >= p.cols) return false;
  const int threads =
      int(std::clamp<int64_t>(ceil_div(vecs, kVecsPerThread * 32) * 32, 32, int64_t(kThreads)));
  prepared.run(kOp, [&] {
    TIGON_CUDA_CHECK(kOp, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                               cudaSharedmemCarveoutMaxShared));
  });
  const size_t bytes = size_t(std::max<int64_t>(vecs, 1)) * 16;
  if (occupancy.max_active(kOp, kernel, blocks, threads, bytes) == 0) return false;
  launch_rows(ctx, kernel, {.threads = threads, .shared = bytes, .cluster = blocks}, p);
  return true;
}

template bool cross_entropy_staged<float, float>(Context&, const CrossEntropyParams<float>&);
template bool cross_entropy_staged<float, __nv_bfloat16>(Context&, const CrossEntropyParams<float>&);
template bool cross_entropy_staged<float, __half>(Context&, const CrossEntropyParams<float>&);
template bool cross_entropy_staged<__nv_bfloat16, __nv_bfloat16>(Context&,
                                                                 const CrossEntropyParams<__nv_bfloat16>&);
template bool cross_entropy_staged<__half, __half>(Context&, const CrossEntropyParams<__half>&);

}  // namespace tigon::cuda
