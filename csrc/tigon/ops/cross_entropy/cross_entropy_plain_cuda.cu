// The CUDA backend of cross_entropy for rows without options: z is the logit times a positive number, and
// class weights and z-loss apply to whole rows. It also computes entropies, and whether the label is the
// first argmax. It moves 2b bytes per element with the gradient, and b without (b = element size). An element
// takes about 11 instructions with the gradient, two of them ex2; the memory-bound budget is 28. The first
// variant that fits runs. Column counts are for 16 bits on an H100 or H200; of 32 bits they are half as many.
//   sweep      has no gradient, and entropies or more than 16384 columns: one pass of online softmax, with
//              eight loads in flight per thread. Deterministic contexts take the others.
//   registers  holds a row in the registers of a CTA of up to 512 threads, 8 vectors per thread (up to 32768
//              columns), or 7 and the others in shared memory (up to 86016, if two CTAs fit an SM), with all
//              loads in flight together and one barrier per row. A CTA takes one row and exits: one CTA of an
//              SM loads while another stores.
//   cluster    does the same by a cluster of 2 to 8 CTAs (sm_90), each with a part of at most 69632 columns
//              (up to 557056).
//   large CTA  does the same by a CTA of 1024 threads that has an SM to itself, on GPUs without clusters or
//              with less shared memory.
// Longer rows take the variants of cross_entropy_cuda.cu. A row may start at any element: the first threads
// take the columns before the first full vector and after the last, one each.
#include <algorithm>

#include "tigon/ops/cross_entropy/cross_entropy_rows.cuh"

namespace tigon::cuda {
namespace {

// Counts the vectors of a thread in registers, and the threads per SM.
constexpr int kVecsPerThread = 8, kThreadsPerSm = 1024;
constexpr int kSweepThreads = 256, kSweepVecs = 8, kSweepBlocks = 4;

// Returns the threads of a register_kernel CTA; 0 if they are known only at run time, which takes more
// registers.
constexpr int most_threads(int threads) { return threads ? threads : kThreadsPerSm / 2; }

// Returns the vectors of a thread in registers: a loop over shared memory takes the registers of the last
// one.
constexpr int vecs_in_registers(bool smem) { return smem ? kVecsPerThread - 1 : kVecsPerThread; }

template <class T, bool kEntropy>
using RowSums = std::conditional_t<kEntropy, EntropySums<T, Linear>, Sums<T>>;

// kSmem: the vectors of a row that its registers have no room for are in shared memory. A thread uses only
// vectors that it copied itself, so no barrier is needed.
// kCluster: a row's columns are divided among the CTAs of a cluster. The reduction orders all reads of a row
// before all writes to it: a CTA contributes when it has read its part and the label's logit, and continues
// when all have contributed. A CTA exits when it has received all contributions, so nothing is written to a
// CTA that has exited. All CTAs of a cluster find the same label, so all of them reach the cluster's barriers
// or none does.
// kEntropy: the kernel also has the sum for an entropy and its gradient; all other results are bitwise equal.
template <class T, class D, int Threads, bool kSmem, bool kCluster, bool kEntropy>
__global__ __launch_bounds__(
    most_threads(Threads),
    kThreadsPerSm /
        most_threads(Threads)) void register_kernel(const __grid_constant__ CrossEntropyParams<T> p,
                                                    int64_t first_row) {
  constexpr int N = AlignedRow<T>::N, kVecs = vecs_in_registers(kSmem);
  using Statistics = RowSums<T, kEntropy>;
  extern __shared__ uint4 smem_vecs[];
  __shared__ ReduceStorage<Statistics> storage;
  __shared__ TieStorage<kCluster> ties;
  const int tid = int(threadIdx.x), threads = Threads ? Threads : int(blockDim.x);
  const unsigned blocks = kCluster ? cluster_size() : 1, rank = kCluster ? cluster_rank() : 0;
  // The gradient of a shard begins with the rows that the pass of its statistics has left in L2.
  const int64_t at = first_row + blockIdx.x / blocks, r = p.log_mass != nullptr ? p.rows - 1 - at : at;
  // The CTA has the columns [first, first + n) of the row.
  const int first = kCluster ? int(rank) * p.slice : 0, n = kCluster ? min(p.slice, p.cols - first) : p.cols;
  D* out = static_cast<D*>(p.dlogits) + r * p.dlogits_stride + first;
  const int label = label_of(p, p.target[r]);
  if (label == kSkipped) {
    if (p.dlogits != nullptr) clear(out, n);
    if (tid == 0 && rank == 0) finish_skipped(p, r);
    return;
  }
  if constexpr (kCluster) {
    storage.init(), ties.init();
    cluster_arrive();
  }
  const PeeledRow<const T> peeled(p.logits + r * p.stride + first, n);
  // Parts of kSmem have at least kVecs full tiles.
  auto has = [&](int k) { return (kSmem && k < kVecs) || k * threads + tid < peeled.vecs; };
  auto smem_vec = [&](int k) -> uint4& { return smem_vecs[(k - kVecs) * threads + tid]; };
  auto for_smem_tiles = [&](auto&& fn) {
    if constexpr (kSmem)
#pragma unroll 1
      for (int k = kVecs; has(k); ++k) fn(k);
  };
  for_smem_tiles([&](int k) { cp_async(&smem_vec(k), peeled.vec(k * threads + tid)); });
  if constexpr (kSmem) cp_async_commit_group();
  uint4 q[kVecs];
#pragma unroll
  for (int k = 0; k < kVecs; ++k)
    q[k] = load_or_minus_inf<T, (kSmem || Threads == 0)>(has(k), peeled.vec(k * threads + tid));
  // The load is issued before the value is needed.
  const float scale = p.scale != nullptr ? p.scale[r * p.scale_step] : 1.0f;
  const int c = peeled.edge_column(n);
  // The label's column within the part is outside all parts but one, or outside all.
  const int label_column = label - first;
  const ElementCoord own(peeled, label_column, threads);
  const bool edge_is_label = c >= 0 && c == label_column;
  const Linear linear(p);
  const float z = label >= 0 ? linear.z(widen(peeled.x[label_column])) : -INFINITY;
  float edge = c >= 0 ? widen(peeled.x[c]) : -INFINITY;
  // z is part of the maximum, so it has been read before any thread may overwrite it.
  float m = fmaxf(linear.z(fmaxf(edge, max_of<T>(q))), z);
  if (edge_is_label) edge = -INFINITY;
#pragma unroll
  for (int k = 0; k < kVecs; ++k)
    if (k == own.tile) q[k] = mask_element<T>(q[k], own.element);
  uint32_t top = kMinusInf<T>;
  for_smem_tiles([&](int k) {
    // The wait is inside the loop, since the compiler would move it in front of the loads into registers.
    cp_async_wait_group<0>();
    if (k == own.tile) smem_vec(k) = mask_element<T>(smem_vec(k), own.element);
    top = max_words<T>(top, max_words<T>(smem_vec(k)));
  });
  if constexpr (kSmem) m = fmaxf(m, linear.z(max_of_word<T>(top)));
  const float from = finite_max(m), below = linear.template z_minus<kAny>(edge, from);
  Statistics a = {m, exp_of_distance<Linear>(below)};
  float* heat = nullptr;
  if constexpr (kEntropy) a.heat = a.s * Linear::finite(below), heat = &a.heat;
#pragma unroll
  for (int k = 0; k < kVecs; ++k) a.s += sum_of<T>(q[k], linear, from, heat);
  for_smem_tiles([&](int k) { a.s += sum_of<T>(smem_vec(k), linear, from, heat); });
  if constexpr (kCluster) {
    // All CTAs have started. The loop above leaves a warp diverged.
    __syncwarp();
    cluster_wait();
  }
  a = all_reduce_row<0, kCluster>(a, storage, 0);
  const Sums<T> sums = {a.m, a.s};
  const Gradient g =
      finish<kEntropy>(p, r, label, sums, {z, z - a.m}, scale, tid == 0 && rank == 0, heat ? *heat : 0.0f);
  if (p.predicted != nullptr)
    write_predicted<kCluster>(p, r, label, sums, z, ties, tid == 0 && rank == 0, [&] {
      float top = c < label_column ? edge : -INFINITY;
      auto look = [&](int k, const uint4& words) {
        if (k * threads + tid < own.vecs_before) top = fmaxf(top, max_of_word<T>(max_words<T>(words)));
        if (k == own.tile) top = fmaxf(top, max_before<T>(words, own.element));
      };
#pragma unroll
      for (int k = 0; k < kVecs; ++k) look(k, q[k]);
      for_smem_tiles([&](int k) { look(k, smem_vec(k)); });
      return linear.z(top);
    });
  if (p.dlogits == nullptr) return;
  if (label == kIgnored) return clear(out, n);
  const LogitGradient<Linear, kEntropy> gradient{linear, g.m, g.each + g.lift, g.tilt};
  auto of = [&](float x) { return gradient.of(x); };
  if (c >= 0) out[c] = narrow<D>(of(edge));
  D* to = out + peeled.head + N * tid;
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
  auto put = [&](int k, const uint4& words) {
    store_words<T>(to + k * threads * N, gradient_of<T, D>(words, of), aligned);
  };
#pragma unroll
  for (int k = 0; k < kVecs; ++k)
    if (has(k)) put(k, q[k]);
  for_smem_tiles([&](int k) { put(k, smem_vec(k)); });
  // The thread that has stored the label's neighbours stores the label's column.
  if (edge_is_label || own.tile >= 0) out[label_column] = narrow<D>(g.of_label<kEntropy>(z - a.m));
}

// Adds a thread's vectors of tiles `first_tile` and following, to the sums from `from`.
template <class T>
__device__ __forceinline__ void add_capped(uint4 (&q)[kSweepVecs], const Capped& of, float from,
                                           int first_tile, const ElementCoord& own, int vecs,
                                           EntropySums<T, Capped>& a) {
  uint32_t top = max_words<T>(q[0]), bottom = min_words<T>(q[0]);
#pragma unroll
  for (int k = 1; k < kSweepVecs; ++k)
    top = max_words<T>(top, max_words<T>(q[k])), bottom = min_words<T>(bottom, min_words<T>(q[k]));
  const bool has_label = own.tile >= first_tile && own.tile < first_tile + kSweepVecs;
  // Absent vectors are never within reach.
  if (!has_label && of.template reaches<T, kClose>(extent<T>(top, bottom))) {
#pragma unroll
    for (int k = 0; k < kSweepVecs; ++k) a.s += sum_of<T, kClose>(q[k], of, from, &a.heat);
    return;
  }
#pragma unroll 1
  for (int tile = first_tile; tile < first_tile + kSweepVecs; ++tile) {
    const int skipped = tile == own.tile ? own.element : -1;
    if (skipped < 0 && of.template reaches<T, kNear>(extent<T>(max_words<T>(q[0]), min_words<T>(q[0]))))
      a.s += sum_of<T, kNear>(q[0], of, from, &a.heat);
    else if (tile * kSweepThreads + int(threadIdx.x) < vecs)
      a.s += sum_of_any<T>(q[0], of, from, skipped, a.heat);
#pragma unroll
    for (int k = 1; k < kSweepVecs; ++k) q[k - 1] = q[k];
  }
}

// kMore: the kernel also computes entropies, or whether the label is the first argmax.
template <class T, bool kMore, class Z>
__global__ __launch_bounds__(kSweepThreads, kSweepBlocks) void sweep_kernel(
    const __grid_constant__ CrossEntropyParams<T> p) {
  static_assert(kMore || !Z::kCapped);
  using Statistics = std::conditional_t<kMore, EntropySums<T, Z>, Sums<T>>;
  __shared__ ReduceStorage<Statistics> storage;
  TieStorage<false> ties;
  const int tid = int(threadIdx.x);
  const Z of(p);
  int phase = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const int label = label_of(p, p.target[r]);
    if (label == kSkipped) {
      if (tid == 0) finish_skipped(p, r);
      continue;
    }
    const PeeledRow<const T> peeled(p.logits + r * p.stride, p.cols);
    const float y = label >= 0 ? widen(peeled.x[label]) : -INFINITY;
    const int c = peeled.edge_column(p.cols);
    const ElementCoord own(peeled, label, kSweepThreads);
    float edge = c >= 0 ? widen(peeled.x[c]) : -INFINITY;
    // This is the logit of the maximum.
    float x_max = fmaxf(edge, y);
    Statistics a = Statistics::identity();
    a.m = of.z(x_max);
    const bool counts = c >= 0 && c != label;
    if (!counts) edge = -INFINITY;
    float earlier = c < label ? edge : -INFINITY;
    const float below = of.template z_minus<kAny>(edge, Z::reference(a.m));
    a.s = counts ? exp_of_distance<Z>(below) : 0.0f;
    if constexpr (kMore) a.heat = a.s * Z::finite(below);
    for (int base = 0; base < peeled.vecs; base += kSweepThreads * kSweepVecs) {
      uint4 q[kSweepVecs];
#pragma unroll
      for (int k = 0; k < kSweepVecs; ++k) {
        const int i = base + k * kSweepThreads + tid;
        q[k] = load_or_minus_inf<T, true>(i < peeled.vecs, peeled.vec(i));
      }
#pragma unroll
      for (int k = 0; k < kSweepVecs; ++k)
        if (!Z::kCapped && base / kSweepThreads + k == own.tile) q[k] = mask_element<T>(q[k], own.element);
      if (kMore && p.predicted != nullptr && base <= own.vecs_before)
#pragma unroll
        for (int k = 0; k < kSweepVecs; ++k) {
          const int i = base + k * kSweepThreads + tid;
          const float top = i < own.vecs_before    ? max_of_word<T>(max_words<T>(q[k]))
                            : i == own.vecs_before ? max_before<T>(q[k], own.element)
                                                   : -INFINITY;
          earlier = fmaxf(earlier, top);
        }
      const float top = max_of<T>(q);
      if (Z::kCapped ? top > x_max : of.z(top) > a.m) {
        x_max = top;
        const float m = of.z(top);
        if constexpr (kMore)
          a.rescale(m);
        else
          a.s *= exp2_approx((a.m - m) * kLog2e), a.m = m;
      }
      const float from = Z::reference(a.m);
      if constexpr (Z::kCapped) {
        add_capped<T>(q, of, from, base / kSweepThreads, own, peeled.vecs, a);
      } else {
#pragma unroll
        for (int k = 0; k < kSweepVecs; ++k) {
          if constexpr (kMore)
            a.s += sum_of<T>(q[k], of, from, &a.heat);
          else
            a.s += sum_of<T>(q[k], of, from);
        }
      }
    }
    a = all_reduce_row<0, false>(a, storage, phase++);
    const float z = label >= 0 ? of.z(y) : -INFINITY;
    if (kMore && p.predicted != nullptr)
      write_predicted<false>(p, r, label, Sums<T>{a.m, a.s}, z, ties, tid == 0,
                             [&] { return label > 0 ? of.z(earlier) : -INFINITY; });
    if (tid != 0) continue;
    const Sums<T> sums{a.m * Z::kUnit, a.s};
    const LabelZ of_label{z * Z::kUnit, of.template z_minus<kAny>(y, a.m) * Z::kUnit};
    if constexpr (kMore)
      finish(p, r, label, sums, of_label, 1.0f, true, a.heat * Z::kUnit);
    else
      finish(p, r, label, sums, of_label, 1.0f, true);
  }
}

// Limits shared memory to what the resident CTAs need: the rest is L1, which buffers loads in
// flight.
template <class Kernel>
void prefer_l1(Kernel kernel, int blocks, int shared) {
  // The system reserves this much per CTA.
  constexpr int kSystem = 1024;
  int percent = int(ceil_div(100 * int64_t(blocks) * (kSystem + shared), device_facts().shared_per_block));
  TIGON_CUDA_CHECK(kOp, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             std::min(percent, 100)));
}

// Launches a CTA of `Threads` threads per row, or with 0 as many as the row needs. Returns false if the row
// does not fit or a tenth of the threads would be idle.
template <class T, class D, int Threads, bool kEntropy>
bool launch_registers(Context& ctx, const CrossEntropyParams<T>& p) {
  static OncePerDevice prepared;
  constexpr int kMost = most_threads(Threads);
  auto kernel = &register_kernel<T, D, Threads, false, false, kEntropy>;
  const int64_t needed = ceil_div(ceil_div(p.cols, AlignedRow<T>::N), kVecsPerThread * 32) * 32;
  if (needed > kMost || 10 * needed < 9 * Threads) return false;
  prepared.run(kOp, [&] {
    prefer_l1(kernel, kThreadsPerSm / kMost, int(sizeof(ReduceStorage<RowSums<T, kEntropy>>)));
  });
  launch_rows(ctx, kernel, {.threads = Threads ? Threads : int(needed)}, p);
  return true;
}

// Launches a CTA, or a cluster of `blocks` CTAs, of `Threads` threads each per row, with vectors in shared
// memory. Returns false if a part of the row is too short, or an SM does not hold enough CTAs with that much
// shared memory.
template <class T, class D, int Threads, bool kCluster, bool kEntropy>
bool launch_smem(Context& ctx, CrossEntropyParams<T> p, int blocks = 1) {
  static OncePerDevice prepared;
  static OccupancyCache occupancy;
  constexpr int N = AlignedRow<T>::N, kVecs = vecs_in_registers(true), kPerSm = kThreadsPerSm / Threads;
  auto kernel = &register_kernel<T, D, Threads, true, kCluster, kEntropy>;
  // The slice is a multiple of 128 bytes, so that all parts of a row start at the same offset within 16
  // bytes.
  p.slice = kCluster ? int(ceil_div(ceil_div(p.cols, blocks), 64) * 64) : p.cols;
  // The last part is the shortest; N - 1 columns may precede its first full vector.
  const int64_t shortest = p.cols - int64_t(blocks - 1) * p.slice;
  if (shortest - (N - 1) < int64_t(kVecs) * Threads * N) return false;
  const int64_t tiles = ceil_div(p.slice / N, Threads), shared = (tiles - kVecs) * Threads * 16;
  // The sums for an entropy take more shared memory. If results have to be bitwise equal, that amount decides
  // for all calls.
  const int64_t reserved = kEntropy || ctx.deterministic ? 2048 : 0;
  if (shared > device_facts().shared_per_block / kPerSm - reserved) return false;
  const int storage = int(shared + sizeof(ReduceStorage<RowSums<T, kEntropy>>));
  prepared.run(kOp, [&] { prefer_l1(kernel, kPerSm, storage); }, storage);
  // Clusters may leave some SMs idle.
  const int64_t clusters = occupancy.max_active(kOp, kernel, blocks, Threads, size_t(shared));
  if (clusters * blocks <= (kPerSm - 1) * device_facts().sms) return false;
  launch_rows(ctx, kernel, {.threads = Threads, .shared = size_t(shared), .cluster = blocks}, p);
  return true;
}

// Takes the fewest CTAs whose parts have at most 17 tiles.
template <class T, class D, bool kEntropy>
bool launch_cluster(Context& ctx, const CrossEntropyParams<T>& p) {
  constexpr int kThreads = kThreadsPerSm / 2, kMostTiles = 17, kMostBlocks = 8;
  const int64_t blocks = ceil_div(p.cols, kMostTiles * kThreads * AlignedRow<T>::N);
  return blocks <= kMostBlocks && launch_smem<T, D, kThreads, true, kEntropy>(ctx, p, int(blocks));
}

template <class T, bool kMore, class Z = Linear>
void launch_sweep(Context& ctx, const CrossEntropyParams<T>& p) {
  static OncePerDevice prepared;
  auto kernel = &sweep_kernel<T, kMore, Z>;
  prepared.run(kOp, [&] { prefer_l1(kernel, kSweepBlocks, int(sizeof(ReduceStorage<EntropySums<T, Z>>))); });
  launch(kOp, ctx, kernel, {.blocks = std::min<int64_t>(p.rows, INT32_MAX), .threads = kSweepThreads}, p);
}

template <class T, class D, bool kEntropy>
bool launch_row_kernel(Context& ctx, const CrossEntropyParams<T>& p) {
  // Entropies together with gradients, and gradients in fp16, are rare, so one kernel serves any number of
  // threads. It takes all rows if results have to be bitwise equal.
  if constexpr (!kEntropy && !std::is_same_v<D, __half>)
    if (!ctx.deterministic &&
        (launch_registers<T, D, 128, false>(ctx, p) || launch_registers<T, D, 256, false>(ctx, p) ||
         launch_registers<T, D, 512, false>(ctx, p)))
      return true;
  return launch_registers<T, D, 0, kEntropy>(ctx, p) || launch_smem<T, D, 512, false, kEntropy>(ctx, p) ||
         launch_cluster<T, D, kEntropy>(ctx, p) || launch_smem<T, D, 1024, false, kEntropy>(ctx, p);
}

}  // namespace

template <class T, class D>
bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<T>& p) {
  if (p.rows == 0) return true;
  const int64_t vecs = ceil_div(p.cols, 16 / int64_t(sizeof(T)));
  const bool is_short = vecs <= int64_t(kVecsPerThread) * 256,
             entropy = p.entropy != nullptr || p.entropy_scale != nullptr;
  // A sweep adds in another order than the kernels of gradients do.
  const bool sweeps =
      p.dlogits == nullptr && !ctx.deterministic && (!is_short || (entropy && p.softcap == 0.0f));
  if (!sweeps)
    return p.softcap != 0.0f ? cross_entropy_staged<T, D>(ctx, p)
           : entropy         ? launch_row_kernel<T, D, true>(ctx, p)
                             : launch_row_kernel<T, D, false>(ctx, p);
  if (p.softcap != 0.0f)
    launch_sweep<T, true, Capped>(ctx, p);
  else if (entropy || p.predicted != nullptr)
    launch_sweep<T, true>(ctx, p);
  else
    launch_sweep<T, false>(ctx, p);
  return true;
}

template bool cross_entropy_plain<float, float>(Context&, const CrossEntropyParams<float>&);
template bool cross_entropy_plain<float, __nv_bfloat16>(Context&, const CrossEntropyParams<float>&);
template bool cross_entropy_plain<float, __half>(Context&, const CrossEntropyParams<float>&);
template bool cross_entropy_plain<__nv_bfloat16, __nv_bfloat16>(Context&,
                                                                const CrossEntropyParams<__nv_bfloat16>&);
template bool cross_entropy_plain<__half, __half>(Context&, const CrossEntropyParams<__half>&);

}  // namespace tigon::cuda
