// Long rows of jsd and tvd in 16 bits (sm_90 on). A row passes through the shared memory of a block or of a cluster (row_ring.cuh) as the
// words it came in: its maxima and the sums of its exponentials are found there, then, with both softmaxes known, its classes, which
// the workers hold in registers until the row's sums over classes are known too.
//
// Nobody waits for a row to come together. A warp of its own, the merger, brings the workers' sums together, in the block and then with
// the mergers of the row's other blocks. Meanwhile the workers are at other rows: classes of this one, exponentials of the one after
// the next, gradient of this one. Two more warps clear the gradients of rows that do not count.
#pragma once

#include "tigon/base/cuda/row_ring.cuh"
#include "tigon/ops/divergence/divergence_launch.cuh"
#include "tigon/ops/divergence/divergence_sums.cuh"

namespace tigon::cuda {
namespace {

// Held: packs whose classes a worker holds. Workers get registers that the other four warps do without: these keep Few.
template <int Warps, int Packs, int Held, int Few>
struct PairShape : RingShape<Warps, Packs, 2> {
  static constexpr int held = Held, threads = Warps * 32 + 128;
  static constexpr int few = Few,
                       most = (65536 / threads / 8 * 8 * threads - 128 * few) / (Warps * 32) / 8 * 8;
};

// Sums over a row's classes: of terms, of g, of q as they find it. Against that the mean of slopes is taken: nothing but rounding is
// left of them where all slopes of any weight are one number.
struct alignas(16) ClassSums {
  float terms, g, q, unused;
  __device__ __forceinline__ ClassSums merged() const {
    return {sum_lanes(terms), sum_lanes(g), sum_lanes(q), 0.0f};
  }
};

// A row's softmaxes: references, the student's probability of 2^0, and the teacher's by that; log2 q - log2 p of logits that are as far
// from their references.
struct alignas(16) Softmaxes {
  float ref_s, ref_t, unit, ratio, apart;
};

template <class Shape>
struct RingMail {
  Sums sums[2][Shape::warps], far_sums[2][kMaxCluster];
  ClassSums classes[2][Shape::warps], far_classes[2][kMaxCluster];
  Softmaxes softmax[2];
  float2 slope[2];
  uint64_t sums_told[2], sums_far[2], sums_ready[2], classes_told[2], classes_far[2], classes_ready[2];
  Ring<Shape> ring;

  // One thread.
  __device__ void init() {
    for (int i = 0; i < 2; ++i) {
      arrival_init(&sums_told[i], Shape::warps), arrival_init(&sums_far[i]), arrival_init(&sums_ready[i]);
      arrival_init(&classes_told[i], Shape::warps), arrival_init(&classes_far[i]);
      arrival_init(&classes_ready[i]);
    }
    ring.init();
  }
};

// Counts the messages of one kind, which take turns with two places.
struct Turn {
  int count = 0;
  __device__ __forceinline__ int place() const { return count & 1; }
  __device__ __forceinline__ int phase() const { return count >> 1 & 1; }
};

// The merger's work.
template <DivergenceKind K, class T, class Shape>
struct Merger {
  const Params<T>& p;
  RingMail<Shape>& mail;
  const int lane, blocks, rank;
  Turn sums_turn, classes_turn;

  struct Pending {
    int row;
    float gain;
  };
  __device__ Merger(const Params<T>& p, RingMail<Shape>& mail)
      : p(p),
        mail(mail),
        lane(int(threadIdx.x) % 32),
        blocks(int(cluster_size())),
        rank(int(cluster_rank())) {}

  // What the workers say to each other, then the blocks; `merge` makes one of the lanes'.
  template <class V, class Merge>
  __device__ __forceinline__ V meet(const V* own, V* far, uint64_t* told, uint64_t* far_told,
                                    const Turn& turn, const V& none, const Merge& merge) {
    arrival_wait<false>(told, turn.phase());
    V v = merge(lane < Shape::warps ? own[lane] : none);
    if (blocks == 1) return v;
    if (lane == 0) arrival_expect(far_told, blocks * int(sizeof(V)));
    __syncwarp();
    if (lane < blocks) put_arriving(&far[rank], unsigned(lane), v, far_told);
    arrival_wait(far_told, turn.phase());
    return merge(lane < blocks ? far[lane] : none);
  }
  __device__ __forceinline__ Pending sums(int row) {
    const int i = sums_turn.place();
    const float scale = p.scale_of(row);
    const Scaling<T> scaling(p);
    Sums m = meet(mail.sums[i], mail.far_sums[i], &mail.sums_told[i], &mail.sums_far[i], sums_turn,
                  Sums{-INFINITY, 0.0f, -INFINITY, 0.0f}, [&](Sums v) {
                    merge_lanes(v, scaling);
                    return v;
                  });
    ++sums_turn.count;
    m.ref_s = finite(m.ref_s), m.ref_t = finite(m.ref_t);
    if (p.log_probs) m.sum_s = m.sum_t = 1.0f;
    const Softmaxes softmax = {m.ref_s, m.ref_t, 1.0f / m.sum_s, m.sum_s / m.sum_t,
                               fma(m.ref_t - m.ref_s, p.slope, ::log2f(m.sum_t / m.sum_s))};
    if (lane == 0) {
      mail.softmax[i] = softmax;
      arrival_arrive(&mail.sums_ready[i]);
    }
    return {row, p.factor * p.inverse * scale * softmax.unit * rough::divergence_unit<K>(p.beta)};
  }
  __device__ __forceinline__ void classes(const Pending& row) {
    const int i = classes_turn.place();
    ClassSums all = meet(mail.classes[i], mail.far_classes[i], &mail.classes_told[i], &mail.classes_far[i],
                         classes_turn, ClassSums{}, [](const ClassSums& v) { return v.merged(); });
    ++classes_turn.count;
    if (!(all.terms == all.terms)) all.g = all.terms;  // NaN in the teacher's row is in no g
    if (lane == 0) {
      mail.slope[i] = make_float2(row.gain, p.log_probs ? rough::divergence_own_share<K>() : all.g / all.q);
      arrival_arrive(&mail.classes_ready[i]);
      if (rank == 0) p.loss[row.row] = rough::divergence_loss<K>(all.terms, all.g, p.beta) * p.factor;
    }
  }
  // In the workers' order.
  __device__ void run() {
    DealTo deal(p, int(blockIdx.x) / blocks, int(gridDim.x) / blocks);
    const int rows = deal.end();
    int next = deal();
    auto sums_of_next = [&] {
      const int row = next;
      if (row >= rows) return Pending{rows, 0.0f};
      next = deal();
      return sums(row);
    };
    Pending row = sums_of_next(), following = sums_of_next();
    while (row.row < rows) {
      classes(row);
      row = following, following = sums_of_next();
    }
  }
};

// A block's columns of the rows that it takes.
template <class T>
struct Slice {
  const Params<T>& p;
  int first, n;
  __device__ explicit Slice(const Params<T>& p) : p(p) {
    first = min(int(cluster_rank()) * p.slice, p.cols), n = min(p.slice, p.cols - first);
  }
  __device__ __forceinline__ Row<const T> student(int64_t r) const {
    return Row<const T>(p.student + r * p.student_stride + first, n);
  }
  __device__ __forceinline__ Row<const T> teacher(int64_t r) const {
    return Row<const T>(p.teacher + r * p.teacher_stride + first, n);
  }
};

// max(x, a large negative number): differences of logarithms stay finite. NaN stays.
template <class T>
__device__ __forceinline__ uint4 above_minus_inf(uint4 w) {
  auto limit = [](uint32_t& x) {
    if constexpr (std::is_same_v<T, __half>)
      asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0xfbfffbffu));
    else
      asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(0xf149f149u));  // -1e30
  };
  limit(w.x), limit(w.y), limit(w.z), limit(w.w);
  return w;
}

template <DivergenceKind K, class T, class Shape>
struct Worker {
  using Place = RingPlace<Shape>;
  static constexpr int N = Row<T>::N, kPacks = Shape::packs, kHeld = Shape::held;
  const Params<T>& p;
  RingMail<Shape>& mail;
  uint4* memory;
  const int chunks;
  const Slice<T> slice;
  Place head, tail;  // of the sweep for exponentials, of that for classes
  Turn sums_turn, softmax_turn, classes_turn, slope_turn;
  float q_of[kHeld][N], g_of[kHeld][N];  // of every class the student's probability and its slope (tvd: g)

  __device__ __forceinline__ Worker(const Params<T>& p, RingMail<Shape>& mail, uint4* memory, int chunks)
      : p(p), mail(mail), memory(memory), chunks(chunks), slice(p) {}
  __device__ __forceinline__ uint4& words(const Place& at, int tensor, int i) const {
    return *Ring<Shape>::pack(memory, at, tensor, i);
  }
  __device__ __forceinline__ static int pack_of(int h, int i) {
    return h * Shape::chunk + i * Shape::workers + int(threadIdx.x);
  }
  // All packs of chunk h are whole.
  __device__ __forceinline__ static bool whole(const Row<const T>& x, int h) {
    return (h > 0 || x.lead == 0) && (h + 1) * Shape::chunk * N - x.lead <= x.cols;
  }
  __device__ __forceinline__ static bool first_lane() { return threadIdx.x % 32 == 0; }
  __device__ __forceinline__ static int warp() { return int(threadIdx.x) / 32; }

  // -inf in the columns of a chunk that the row does not have; what is behind the row's last whole word is not here yet.
  __device__ __forceinline__ void trim(int r, const Row<const T>& x, int h, const Place& at) {
#pragma unroll 1
    for (int i = 0; i < kPacks; ++i) {
      const int k = pack_of(h, i);
      if (k >= x.packs) {
        constexpr uint32_t none = kMinusInf<T>;
        words(at, 0, i) = words(at, 1, i) = make_uint4(none, none, none, none);
      } else if (!x.whole(k)) {
        words(at, 0, i) = fetch(x, k), words(at, 1, i) = fetch(slice.teacher(r), k);
      }
    }
  }
  // The sums of exponentials of row r, against the warp's maxima.
  __device__ __forceinline__ void sums(int r) {
    const Row<const T> x = slice.student(r);
    uint32_t top_s = kMinusInf<T>, top_t = top_s;
    Place at = head;
#pragma unroll 1
    for (int h = 0; h < chunks; ++h, at.advance()) {
      mail.ring.wait(at);
      if (!whole(x, h)) trim(r, x, h, at);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        top_s = max_words<T>(top_s, max_words<T>(words(at, 0, i)));
        top_t = max_words<T>(top_t, max_words<T>(words(at, 1, i)));
      }
    }
    Sums own = {0.0f, 0.0f, 0.0f, 0.0f};
    if (!p.log_probs)
      own.ref_s = max_lanes(max_of_word<T>(top_s)), own.ref_t = max_lanes(max_of_word<T>(top_t));
    const Powers power_s(p.slope, finite(own.ref_s)), power_t(p.slope, finite(own.ref_t));
#pragma unroll 1
    for (int h = 0; h < chunks; ++h, head.advance()) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        float s[N], t[N];
        unpack<T>(words(head, 0, i), s);
        unpack<T>(words(head, 1, i), t);
#pragma unroll
        for (int j = 0; j < N; ++j) own.sum_s += power_s(s[j]), own.sum_t += power_t(t[j]);
      }
    }
    own.sum_s = sum_lanes(own.sum_s * power_s.rest), own.sum_t = sum_lanes(own.sum_t * power_t.rest);
    const int place = sums_turn.place();
    if (first_lane()) {
      mail.sums[place][warp()] = own;
      arrival_arrive(&mail.sums_told[place]);
    }
    ++sums_turn.count;
  }

  // A class: its logits become the student's probability and its slope (tvd: g).
  template <bool Half>
  __device__ __forceinline__ void add_class(float& q, float& g, const Softmaxes& m, ClassSums& all) const {
    const float slope = p.slope, x = q, y = g;
    if constexpr (K == DivergenceKind::tvd) {
      q = exp2_approx((x - m.ref_s) * slope);
      const float e = fma(-exp2_approx((y - m.ref_t) * slope), m.ratio, q);
      g = e == 0.0f ? 0.0f : copysignf(q, e);
      all.terms += fabsf(e), all.g += g;
    } else {
      // The likelier side's probability and, by their quotient, the other's: log m = log bigger + log weights, as in divergence_slope.
      const float d = fma(x - y, slope, m.apart);
      const bool teacher = d < 0.0f;  // is the likelier
      float below = x - m.ref_s;
      if (teacher) below = y - m.ref_t;
      float bigger = exp2_approx(below * slope);
      if (teacher) bigger *= m.ratio;
      const float r = exp2_approx(-fabsf(d)), smaller = bigger * r;
      float log_weights;
      if constexpr (Half) {
        log_weights = rough::log2_mean_with_one(r);
      } else {
        const float rest = 1.0f - r;
        float weights = fma(-p.beta, rest, 1.0f);
        if (teacher) weights = fma(p.beta, rest, r);
        log_weights = rough::log2(weights);
      }
      const float low = -fabsf(d) - log_weights;
      q = teacher ? smaller : bigger, g = teacher ? low : -log_weights;
      all.g = fma(q, g, all.g);
      all.terms = fma(smaller, low, fma(bigger, -log_weights, all.terms));  // both sides' together
    }
    all.q += q;
  }
  template <bool Half>  // beta is one half
  __device__ __forceinline__ void classes() {
    int place = softmax_turn.place();
    arrival_wait<false>(&mail.sums_ready[place], softmax_turn.phase());
    ++softmax_turn.count;
    const Softmaxes m = mail.softmax[place];
    ClassSums all = {};
#pragma unroll
    for (int h = 0; h < kHeld / kPacks; ++h) {
      if (h > 0 && h >= chunks) continue;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        float (&q)[N] = q_of[h * kPacks + i];
        float (&g)[N] = g_of[h * kPacks + i];
        uint4 s = words(tail, 0, i), t = words(tail, 1, i);
        if (i + 1 == kPacks) mail.ring.release(tail);
        if constexpr (K == DivergenceKind::jsd) s = above_minus_inf<T>(s), t = above_minus_inf<T>(t);
        unpack<T>(s, q);
        unpack<T>(t, g);
#pragma unroll
        for (int j = 0; j < N; ++j) add_class<Half>(q[j], g[j], m, all);
      }
      tail.advance();
    }
    if constexpr (K == DivergenceKind::jsd) all.terms -= all.g;
    all = ClassSums{all.terms * m.unit, all.g * m.unit, all.q * m.unit, 0.0f}.merged();
    place = classes_turn.place();
    if (first_lane()) {
      mail.classes[place][warp()] = all;
      arrival_arrive(&mail.classes_told[place]);
    }
    ++classes_turn.count;
  }
  __device__ __forceinline__ void gradients(int r) {
    const int place = slope_turn.place();
    arrival_wait<false>(&mail.classes_ready[place], slope_turn.phase());
    ++slope_turn.count;
    if (p.dstudent == nullptr) return;
    const float gain = mail.slope[place].x, mean = mail.slope[place].y;
    const Row<const T> x = slice.student(r);
    const Row<T> to = row_like(p.gradient(r) + slice.first, x);
    const bool aligned = reinterpret_cast<uintptr_t>(to.base) % 16 == 0;
#pragma unroll
    for (int h = 0; h < kHeld / kPacks; ++h) {
      if (h > 0 && h >= chunks) continue;
      const bool all_whole = aligned && whole(x, h);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const float (&q)[N] = q_of[h * kPacks + i];
        const float (&g)[N] = g_of[h * kPacks + i];
        const int k = pack_of(h, i);
        float v[N];
#pragma unroll
        for (int j = 0; j < N; ++j)
          v[j] = K == DivergenceKind::jsd ? (g[j] - mean) * (q[j] * gain) : fma(-q[j], mean, g[j]) * gain;
        if (all_whole) {
          Pack<T, N> pack;
          pack.set(v);
          store_whole(to.base + int64_t(k) * N, pack);
        } else if (k < to.packs) {
          store_pack(to, k, v, aligned);
        }
      }
    }
  }
  __device__ __forceinline__ void run() {
    const int rows = int(p.rows);
    const bool half = K == DivergenceKind::tvd || p.beta == 0.5f;
    for (int row = -1, next = -1, later = -1; row < rows; row = next, next = later) {
      if (row >= 0) half ? classes<true>() : classes<false>();
      if (later < rows && (later = mail.ring.wait(head)) < rows) sums(later);
      if (row >= 0) gradients(row);
    }
  }
};

// `chunks` of a row.
template <DivergenceKind K, class T, class Shape>
__global__ __launch_bounds__(Shape::threads, 1) void ring_kernel(const __grid_constant__ Params<T> p,
                                                                 int chunks) {
#if __CUDA_ARCH__ >= 900
  __shared__ RingMail<Shape> mail;
  extern __shared__ uint4 memory[];
  const int warp = int(threadIdx.x) / 32 - Shape::warps;
  if (threadIdx.x == 0) mail.init();
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (warp < 0) {
    take_registers<Shape::most>();
    Worker<K, T, Shape>(p, mail, memory, chunks).run();
  } else {
    leave_registers<Shape::few>();
    if (warp == 0) {
      Merger<K, T, Shape>(p, mail).run();
    } else if (warp == 1) {
      const int blocks = int(cluster_size());
      const Slice<T> slice(p);
      mail.ring.feed(
          memory, chunks, DealTo(p, int(blockIdx.x) / blocks, int(gridDim.x) / blocks),
          [&](int r, int tensor) { return (tensor == 0 ? slice.student(r) : slice.teacher(r)).base; },
          [&](int r) {
            const Row<const T> x = slice.student(r);
            return (x.lead + x.cols) / Row<T>::N;
          });
    } else {
      clear_ignored(p, int(blockIdx.x) * 2 + warp - 2, int(gridDim.x) * 2);
    }
  }
  __syncwarp();
  cluster_arrive();  // a block that has ended cannot be written to
  cluster_wait();
#endif
}

// False when a row does not fit or the device has no room for such a cluster.
template <DivergenceKind K, class T, class Shape>
bool launch_ring(Context& ctx, Params<T> p, int cluster) {
  static ClusterRoom clusters;
  p.slice = slice_of(p.cols, cluster);
  const int64_t columns = p.slice + (p.aligned ? 0 : Row<T>::N - 1);
  const int chunks = int(ceil_div(columns, Shape::chunk * Row<T>::N));
  // Three rows are under way, of the last one a part.
  if (chunks * Shape::packs > Shape::held || Shape::slots < 2 * chunks + 1) return false;
  return launch_together(ctx, clusters, &ring_kernel<K, T, Shape>, Shape::threads, Shape::shared, cluster,
                         p.rows, p, chunks);
}

}  // namespace
}  // namespace tigon::cuda
