// CUDA backend of divergence.
//
// Bytes per element (b = element size): 3b with the gradient, 2b without. What a column of 16 bits may cost at the rate of a copy, H200
// (132 multiprocessors of 128 lanes at 1.98 GHz, 4.2 TB/s; 56 and 7.0 at 85 % of it): 48 instructions, of them 6.0 ex2 or
// lg2 (16 lanes, measured: 0.50 a clock). Twice that in 32 bits. Spent, about: held KL 26 and 2; kl 30 and 4; ring TVD 32 and 4, JSD 40
// and 5; 32 bits: exponentials on the multiply-add units, exact to an ulp, 24 more (JSD 50).
//
// Variants
//   held    A row pair is expanded once: its exponentials, against the maxima of their warp, stay in the registers of a block,
//           in 32 bits of a cluster too (sm_90 on), until the gradient is stored; no exponential is taken twice. The next rows
//           arrive in shared memory meanwhile, every thread copying and reading packs of its own. The row's threads bring sums
//           together once for the KLs, twice for the others. Student and teacher lie at the same position in their 16 bytes
//           (the gradient may not, and is then stored element by element).
//   kl      KLs of longer rows in 16 bits (sm_90 on): rows stay in shared memory as words (divergence_kl.cuh).
//   ring    jsd and tvd of longer rows in 16 bits (sm_90 on), three rows under way (divergence_ring.cuh). JSD is bound by its arithmetic:
//           without loads and stores it takes 95 % of its time, 64 clocks of a scheduler for 32 columns, where either kind of instruction
//           would fill 40. TVD's ring alone, without the arithmetic, is at 82 % of a copy; copies by the threads themselves (as in
//           kl) reach 94 to 96 there, but lose more than that in a kernel with so many instructions.
//   swept   Still longer rows, and rows that lie differently: one block a row, three sweeps, element by element in the second case.
#include <algorithm>

#include "tigon/base/cuda/async_copy.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/row_packs.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/divergence/divergence_kl.cuh"
#include "tigon/ops/divergence/divergence_launch.cuh"
#include "tigon/ops/divergence/divergence_ring.cuh"
#include "tigon/ops/divergence/divergence_sums.cuh"

namespace tigon::cuda {
namespace {

template <int Threads, int Pairs, int Stages, int Blocks>
struct HeldShape {
  static constexpr int threads = Threads;  // of a block
  static constexpr int pairs = Pairs;      // columns of a thread
  static constexpr int stages = Stages;    // rows in shared memory
  static constexpr int blocks = Blocks;    // of a multiprocessor
  static constexpr int64_t columns = int64_t(Threads) * Pairs;
  template <class T>
  static constexpr size_t shared = size_t(columns) * Stages * 2 * sizeof(T);
};

template <DivergenceKind K, class T, class Shape, bool Cluster>
__global__ __launch_bounds__(Shape::threads,
                             Shape::blocks) void held_kernel(const __grid_constant__ Params<T> p) {
  constexpr int N = Row<T>::N, kThreads = Shape::threads, kHeld = Shape::pairs / N, kStages = Shape::stages;
  __shared__ Exchange<T, kThreads / 32 * (Cluster ? kMaxCluster : 1)> exchange;
  extern __shared__ uint4 staged[];  // [stage][pack of a thread][student, teacher][thread]
  const int tid = int(threadIdx.x);
  const unsigned blocks = Cluster ? cluster_size() : 1, rank = Cluster ? cluster_rank() : 0;
  const int messages = int(blocks) * kThreads / 32;
  if constexpr (Cluster) {
    if (tid == 0) arrival_init(&exchange.arrival[0]), arrival_init(&exchange.arrival[1]);
    cluster_arrive();
    cluster_wait();
  }
  // The block's columns [first, first + n) of every row that it takes.
  const int first = Cluster ? min(int(rank) * p.slice, p.cols) : 0;
  const int n = Cluster ? min(p.slice, p.cols - first) : p.cols;
  const int64_t step = gridDim.x / blocks;
  auto student_of = [&](int64_t r) { return Row<const T>(p.student + r * p.student_stride + first, n); };
  auto at = [&](int slot, int h, int side) {
    return staged + ((slot * kHeld + h) * 2 + side) * kThreads + tid;
  };
  auto fetch_row = [&](int64_t r, int slot) {
    const Row<const T> x = student_of(r);
    const T* from_s = x.base + int64_t(tid) * N;
    const T* from_t = p.teacher + r * p.teacher_stride + first - x.lead + int64_t(tid) * N;
    const uint32_t to = shared_address(at(slot, 0, 0));
    const int left = (n - x.column(tid)) * int(sizeof(T));  // bytes from the thread's first pack on
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int bytes = left - h * kThreads * 16;
      if (bytes > 0) {
        copy_async_upto(to + h * 2 * kThreads * 16, from_s + h * kThreads * N, bytes);
        copy_async_upto(to + (h * 2 + 1) * kThreads * 16, from_t + h * kThreads * N, bytes);
      }
    }
  };
  const Scaling<T> scaling(p);
  // This row and those to come: of a cluster only such as count, of a block alone any, and whether the one that is copied next counts
  // has been asked for a row earlier.
  int64_t row_at[kStages];
  Deal<> deal;
#pragma unroll
  for (int i = 0; i < kStages; ++i)
    row_at[i] =
        Cluster ? deal.next(p, i == 0 ? int(blockIdx.x / blocks) : int(step) - 1) : blockIdx.x + i * step;
  auto to_fetch = [&](int64_t r) { return r < p.rows && (Cluster || !p.ignored(r)); };
  int turn = 0, slot = 0;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (to_fetch(row_at[i])) fetch_row(row_at[i], i);
    copies_commit();
  }
  if constexpr (Cluster)
    clear_ignored(p, (int(blockIdx.x) * kThreads + tid) / 32, int(gridDim.x) * kThreads / 32);
  bool counts = to_fetch(row_at[kStages - 1]);
  int64_t next = row_at[kStages - 1] + step;
  auto advance = [&] {
#pragma unroll
    for (int i = 1; i < kStages; ++i) row_at[i - 1] = row_at[i];
    row_at[kStages - 1] = next;
    if constexpr (Cluster) counts = next < p.rows;
    next += step;
  };
  for (; row_at[0] < p.rows; advance()) {
    const int64_t r = row_at[0];
    const int last = slot == 0 ? kStages - 1 : slot - 1;  // the stage of the row before
    if (counts) fetch_row(row_at[kStages - 1], last);
    copies_commit();
    if constexpr (!Cluster) counts = to_fetch(next);
    T* out = p.dstudent + r * p.dstudent_stride + first;
    const int here = slot;
    slot = slot + 1 == kStages ? 0 : slot + 1;
    if (!Cluster && p.ignored(r)) {
      if (p.dstudent != nullptr)
        for (int c = tid; c < n; c += kThreads) out[c] = narrow<T>(0.0f);
      if (tid == 0) p.loss[r] = 0.0f;
      continue;
    }
    const float scale = p.scale_of(r);
    const Row<const T> x = student_of(r);
    copies_wait<kStages - 1>();

    uint32_t top_s = kMinusInf<T>, top_t = top_s;
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int k = h * kThreads + tid;
      uint4 a = load_shared(at(here, h, 0)), b = load_shared(at(here, h, 1));
      if (!x.whole(k)) {
        *at(here, h, 0) = a = only_columns<T>(x, k, a);
        *at(here, h, 1) = b = only_columns<T>(x, k, b);
      }
      top_s = max_words<T>(top_s, max_words<T>(a)), top_t = max_words<T>(top_t, max_words<T>(b));
    }
    Sums own = {0.0f, 0.0f, 0.0f, 0.0f};
    if (!p.log_probs) {
      own.ref_s = max_lanes(max_of_word<T>(top_s));
      own.ref_t = max_lanes(max_of_word<T>(top_t));
    }
    // The exponentials; then q and g, reverse_kl: at once.
    float s[kHeld][N], t[kHeld][N];
    Totals<T> totals = {};
    const float from_s = finite(own.ref_s), from_t = finite(own.ref_t);
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      unpack<T>(load_shared(at(here, h, 0)), s[h]);
      unpack<T>(load_shared(at(here, h, 1)), t[h]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float u = s[h][j] - from_s, v = t[h][j] - from_t;
        s[h][j] = scaling.power(u), t[h][j] = scaling.power(v);
        own.sum_s += s[h][j], own.sum_t += t[h][j];
        if constexpr (kKl<K>) {
          float term, g;
          terms_of<K, T>(s[h][j], t[h][j], u - v, p.beta, term, g);  // in logits, not bits
          totals.terms += term;
          if constexpr (K == DivergenceKind::reverse_kl) t[h][j] = g;
        }
      }
    }
    own.sum_s = sum_lanes(own.sum_s), own.sum_t = sum_lanes(own.sum_t);
    if constexpr (kKl<K>) totals.terms = sum_lanes(totals.terms);
    const RowPair row = meet_sums<K, Cluster>(exchange, turn++, messages, own, totals, scaling, p.log_probs,
                                              [&] { return Cluster ? deal.next(p, int(step) - 1) : 0; });
    if constexpr (Cluster) next = row.next;
    const float part_s = scaling.power(own.ref_s - row.ref_s) * row.part_s;
    const float part_t = scaling.power(own.ref_t - row.ref_t) * row.part_t;
    const float gain = p.factor * p.inverse * scale * rough::divergence_unit<K>(p.beta);
    float loss, sum_g, center = 0.0f;
    if constexpr (kKl<K>) {
      const float mean =
          fma(row.mean, p.slope, K == DivergenceKind::reverse_kl ? row.log2_quotient : -row.log2_quotient);
      loss = rough::divergence_loss<K>(mean, 0.0f, p.beta);
      sum_g = row.mean;
    } else {
      // log2 q - log2 p; in 32 bits with the distances from the maxima, so that no large number is rounded.
      const float apart = fma(row.ref_t - row.ref_s, p.slope, row.log2_quotient);
      auto difference = [&](float x, float y) {
        return sizeof(T) == 4 ? fma((x - row.ref_s) - (y - row.ref_t), p.slope, row.log2_quotient)
                              : fma(x - y, p.slope, apart);
      };
#pragma unroll
      for (int h = 0; h < kHeld; ++h) {
        float v[N], w[N];
        if constexpr (K == DivergenceKind::jsd) {
          unpack<T>(load_shared(at(here, h, 0)), v);
          unpack<T>(load_shared(at(here, h, 1)), w);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float d = K == DivergenceKind::jsd ? difference(v[j], w[j]) : 0.0f;
          add_class<K, T>(s[h][j], t[h][j], part_s, part_t, d, p.beta, totals);
        }
      }
      if constexpr (sizeof(T) == 4) {
        totals.center = totals.weight > 0.0f ? totals.g / totals.weight : 0.0f, totals.g = 0.0f;
#pragma unroll
        for (int h = 0; h < kHeld; ++h)
#pragma unroll
          for (int j = 0; j < N; ++j) totals.g = fma(s[h][j], t[h][j] - totals.center, totals.g);
      } else if constexpr (K == DivergenceKind::jsd) {
        totals.g *= part_s, totals.terms *= part_t;
      }
      merge_lanes(totals);
      const Totals<T> all = meet_totals<Cluster>(exchange, turn++, messages, totals);
      loss = rough::divergence_loss<K>(all.terms, sum_of(all), p.beta);
      sum_g = all.g, center = center_of(all);
    }
    if (tid == 0 && rank == 0) p.loss[r] = loss * p.factor;
    if (p.dstudent == nullptr) continue;
    const Row<T> to = row_like(out, x);
    const bool aligned = reinterpret_cast<uintptr_t>(to.base) % 16 == 0;
    if (p.log_probs) sum_g = rough::divergence_own_share<K>(), center = 0.0f;
    // Of a KL the exponentials are not divided yet; reverse_kl's terms are logits, against the warp's references.
    float gain_s = gain * part_s, gain_t = gain * part_t;
    if constexpr (K == DivergenceKind::reverse_kl) {
      if (p.log_probs) sum_g /= p.slope;
      sum_g -= shift_of(own, row.ref_s, row.ref_t);
      gain_s *= p.slope;
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int k = h * kThreads + tid;
      if (k >= x.packs) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if constexpr (K == DivergenceKind::forward_kl) {
          const float q = p.log_probs ? 0.0f : __fmul_rn(s[h][j], gain_s);
          s[h][j] = q - __fmul_rn(t[h][j], gain_t);
        } else if constexpr (K == DivergenceKind::reverse_kl ||
                             (K == DivergenceKind::tvd && sizeof(T) == 2)) {
          s[h][j] =
              rough::divergence_gradient(t[h][j], s[h][j], sum_g, K == DivergenceKind::tvd ? gain : gain_s);
        } else if constexpr (sizeof(T) == 2) {
          s[h][j] *= fma(t[h][j], gain_s, -sum_g * gain_s);
        } else {
          s[h][j] *= ((t[h][j] - center) - sum_g) * gain;
        }
      }
      store_pack(to, k, s[h], aligned);
    }
  }
  copies_wait<0>();
  if constexpr (Cluster) {  // a block that has ended cannot be written to
    cluster_arrive();
    cluster_wait();
  }
}

// A row pair from memory in pieces: packs, or single elements where the rows lie differently.
template <class T, bool Packs>
struct Pieces {
  static constexpr int N = Packs ? Row<T>::N : 1;
  Row<const T> x, y;
  int count;
  __device__ Pieces(const T* student, const T* teacher, int cols)
      : x(student, cols), y(teacher, cols), count(Packs ? x.packs : cols) {}
  __device__ void get(int k, float (&v)[N], float (&w)[N]) const {
    if constexpr (Packs) {
      unpack<T>(fetch(x, k), v);
      unpack<T>(fetch(y, k), w);
    } else {
      v[0] = widen(x.base[x.lead + k]), w[0] = widen(y.base[y.lead + k]);
    }
  }
};

// A reference that grows, and the sum of exponentials against it.
template <class T, int N>
__device__ __forceinline__ void add_exponentials(float& reference, float& sum, const float (&x)[N],
                                                 const Scaling<T>& scaling) {
  float top = x[0];
#pragma unroll
  for (int j = 1; j < N; ++j) top = fmaxf(top, x[j]);
  if (top > reference) {
    if (sum != 0.0f) sum *= scaling.power(reference - top);
    reference = top;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sum += scaling.power(x[j] - finite(reference));
}

template <DivergenceKind K, class T, bool Packs>
__global__ __launch_bounds__(kSweepThreads) void swept_kernel(const __grid_constant__ Params<T> p) {
  using Pair = Pieces<T, Packs>;
  constexpr int N = Pair::N, kMessages = kSweepThreads / 32;
  __shared__ Exchange<T, kMessages> exchange;
  const int tid = int(threadIdx.x);
  const Scaling<T> scaling(p);
  int turn = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    T* out = p.dstudent + r * p.dstudent_stride;
    if (p.ignored(r)) {
      if (p.dstudent != nullptr)
        for (int c = tid; c < p.cols; c += kSweepThreads) out[c] = narrow<T>(0.0f);
      if (tid == 0) p.loss[r] = 0.0f;
      continue;
    }
    const Pair pair(p.student + r * p.student_stride, p.teacher + r * p.teacher_stride, p.cols);
    RowPair row;
    float v[N], w[N];
    if (!p.log_probs) {
      Sums own = {-INFINITY, 0.0f, -INFINITY, 0.0f};
      for (int k = tid; k < pair.count; k += kSweepThreads) {
        pair.get(k, v, w);
        add_exponentials(own.ref_s, own.sum_s, v, scaling);
        add_exponentials(own.ref_t, own.sum_t, w, scaling);
      }
      merge_lanes(own, scaling);
      row = meet_sums<DivergenceKind::jsd, false>(exchange, turn++, kMessages, own, Totals<T>{}, scaling,
                                                  false, [] { return 0; });
    }
    auto terms = [&](float x, float y, float& q, float& term, float& g) {
      q = __fmul_rn(scaling.power(x - row.ref_s), row.part_s);
      const float other = __fmul_rn(scaling.power(y - row.ref_t), row.part_t);
      const float d = fma((x - row.ref_s) - (y - row.ref_t), p.slope, row.log2_quotient);
      terms_of<K, T>(q, other, d, p.beta, term, g);
    };
    Totals<T> totals = {};
    for (int k = tid; k < pair.count; k += kSweepThreads) {
      pair.get(k, v, w);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float q, term, g;
        terms(v[j], w[j], q, term, g);
        totals.terms += term, totals.g += g;
      }
    }
    merge_lanes(totals);
    totals = meet_totals<false>(exchange, turn++, kMessages, totals);
    if (tid == 0) p.loss[r] = rough::divergence_loss<K>(totals.terms, totals.g, p.beta) * p.factor;
    if (p.dstudent == nullptr) continue;
    const float gain = p.factor * p.inverse * p.scale_of(r) * rough::divergence_unit<K>(p.beta);
    const float sum_g = p.log_probs ? rough::divergence_own_share<K>() : totals.g;
    const Row<T> to = row_like(out, pair.x);
    const bool aligned = reinterpret_cast<uintptr_t>(to.base) % 16 == 0;
    for (int k = tid; k < pair.count; k += kSweepThreads) {
      pair.get(k, v, w);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float q, term, g;
        terms(v[j], w[j], q, term, g);
        v[j] = rough::divergence_gradient(g, q, sum_g, gain);
      }
      if constexpr (Packs)
        store_pack(to, k, v, aligned);
      else
        out[k] = narrow<T>(v[0]);
    }
  }
}

// False when the device has no room for such a cluster.
template <DivergenceKind K, class T, class Shape, bool Cluster>
bool launch_held(Context& ctx, Params<T> p, int cluster) {
  static ClusterRoom clusters;
  p.slice = slice_of(p.cols, cluster);
  return launch_together(ctx, clusters, &held_kernel<K, T, Shape, Cluster>, Shape::threads,
                         Shape::template shared<T>, cluster, p.rows, p);
}

template <class Shape, class T>
bool fits(const Params<T>& p, int cluster) {
  const int64_t columns = cluster == 1 ? p.cols : slice_of(p.cols, cluster);
  return columns + (p.aligned ? 0 : Row<T>::N - 1) <= Shape::columns;
}

// The first that holds the rows runs.
template <DivergenceKind K, class T>
void launch_rows(Context& ctx, const Params<T>& p, bool alike) {
  constexpr bool kFine = sizeof(T) == 4;
  using Short = HeldShape<64, 16, 2, 8>;
  using Half =
      HeldShape<256, kFine ? 16 : 32, 3, 2>;  // two rows a multiprocessor: one works while the other waits
  if (alike) {
    if (fits<Short>(p, 1)) return void(launch_held<K, T, Short, false>(ctx, p, 1));
    if (fits<Half>(p, 1)) return void(launch_held<K, T, Half, false>(ctx, p, 1));
  }
  if (alike && device_facts().capability >= 90) {
    if constexpr (kFine) {
      using Whole = HeldShape<512, 24, 2, 1>;
      for (int cluster : {2, 4, 8, 16})
        if (fits<Half>(p, cluster) && launch_held<K, T, Half, true>(ctx, p, cluster)) return;
      for (int cluster : {4, 8, 16})
        if (fits<Whole>(p, cluster) && launch_held<K, T, Whole, true>(ctx, p, cluster)) return;
    } else if constexpr (kKl<K>) {
      for (int cluster : {1, 2, 4, 8, 16})
        if (launch_kl<K, T, KlShape<23>>(ctx, p, cluster)) return;
    } else {
      for (int cluster : {1, 2, 4, 8, 16}) {
        if (launch_ring<K, T, PairShape<16, 2, 4, 48>>(ctx, p, cluster)) return;
        if (cluster == 8 && launch_ring<K, T, PairShape<20, 2, 4, 40>>(ctx, p, cluster)) return;
      }
    }
  }
  Grid grid = {.blocks = std::min<int64_t>(p.rows, int64_t(device_facts().sms) * 2),
               .threads = kSweepThreads};
  if (alike)
    launch(kOp, ctx, swept_kernel<K, T, true>, grid, p);
  else
    launch(kOp, ctx, swept_kernel<K, T, false>, grid, p);
}

}  // namespace

void divergence_rows(Context& ctx, const DivergenceRows& a) {
  TIGON_CHECK(kOp, a.student.cols < (int64_t(1) << 30), "student must have fewer than 2^30 columns, got ",
              a.student.cols);
  dispatch_float(kOp, "student", a.student.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr int64_t N = Row<T>::N;
    const double slope = 1.4426950408889634 / double(a.temperature);
    Params<T> p = {.student = a.student.row<T>(0),
                   .teacher = a.teacher.row<T>(0),
                   .dstudent = a.dstudent.row<T>(0),
                   .labels = a.labels.as<int64_t>(),
                   .scale = a.scale.as<float>(),
                   .loss = a.loss.as<float>(),
                   .rows = a.student.rows,
                   .student_stride = a.student.stride,
                   .teacher_stride = a.teacher.stride,
                   .dstudent_stride = a.dstudent.stride,
                   .scale_step = a.scale.size == 1 ? 0 : 1,
                   .ignore_index = a.ignore_index,
                   .cols = int(a.student.cols),
                   .slice = 0,
                   .beta = a.beta,
                   .slope = float(slope),
                   .slope_low = float(slope - double(float(slope))),
                   .factor = a.factor,
                   .inverse = 1.0f / a.temperature,
                   .log_probs = a.log_probs,
                   .aligned = false};
    p.aligned = uintptr_t(a.student.data) % 16 == 0 && (p.rows == 1 || p.student_stride % N == 0);
    const bool alike = rows_alike<T>(a.student, a.teacher);
    switch (a.kind) {
      case DivergenceKind::forward_kl: return launch_rows<DivergenceKind::forward_kl>(ctx, p, alike);
      case DivergenceKind::reverse_kl: return launch_rows<DivergenceKind::reverse_kl>(ctx, p, alike);
      case DivergenceKind::jsd: return launch_rows<DivergenceKind::jsd>(ctx, p, alike);
      case DivergenceKind::tvd: return launch_rows<DivergenceKind::tvd>(ctx, p, alike);
    }
  });
}

}  // namespace tigon::cuda
