// CUDA backend of divergence.
//
// Bytes per element (b = element size): 3b with the gradient, 2b without. Instructions: 35 to 60 per element, six of them
// ex2, against a budget of 42 at the speed of the memory in 16 bits, 84 in 32.
//
// Variants
//   held    A row pair lies in the registers of one block, or of a cluster of 4 or 8 (sm_90 on), eight packs of 16 bytes of
//           each row a thread; all loads are in flight together. Blocks stay: a pack of the next row is asked for as soon as
//           this row's has been used for the last time. Student, teacher and gradient lie at the same position in their 16
//           bytes (or the gradient does not, and is stored element by element).
//   swept   Longer rows, and rows that lie differently: one block a row, three sweeps, element by element in the second case.
#include <algorithm>
#include <array>
#include <atomic>

#include "tigon/base/cuda/cluster.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/row_packs.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/divergence/divergence.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/divergence/divergence_math.inc"

constexpr const char* kOp = "divergence";
constexpr int kHeld = 8, kThreadsPerSm = 512, kMaxCluster = 8, kSweepThreads = 1024;

template <class T>
struct Params {
  const T *student, *teacher;
  T* dstudent;            // may be null, or student
  const int64_t* labels;  // may be null
  const float* scale;     // may be null
  float* loss;
  int64_t rows, student_stride, teacher_stride, dstudent_stride, scale_step, ignore_index;
  int cols, slice;  // slice: columns of a block of a cluster
  float beta, slope, factor, gain;
  bool log_probs;
  uint32_t zero;

  __device__ bool ignored(int64_t r) const { return labels != nullptr && labels[r] == ignore_index; }
  __device__ float gain_of(int64_t r) const { return scale != nullptr ? gain * scale[r * scale_step] : gain; }
};

// Maximum and sum of 2^(slope * (x - m)) of part of a row.
struct Peak {
  float m = -INFINITY, s = 0.0f;
  // What the exponentials are taken from: nothing but -inf so far adds nothing; NaN and +inf survive.
  __device__ float from() const { return m == -INFINITY ? 0.0f : m; }
};
// log2 softmax = (x - m) * slope - log_sum.
struct Softmax {
  float m, log_sum;
  __device__ float log2_of(float x, float slope) const { return fma(x - m, slope, -log_sum); }
};

template <int N>
__device__ __forceinline__ void add_peak(Peak& a, const float (&x)[N], float slope) {
  float top = x[0];
#pragma unroll
  for (int j = 1; j < N; ++j) top = fmaxf(top, x[j]);
  if (top > a.m) a.s *= exp2_approx((a.m - top) * slope), a.m = top;
  float from = a.from();
#pragma unroll
  for (int j = 0; j < N; ++j) a.s += exp2_approx((x[j] - from) * slope);
}

__device__ __forceinline__ Peak merge_lanes(Peak a, float slope) {
  float m = reduce_lanes<Max, 32>(a.m), s = a.m == m ? a.s : a.s * exp2_approx((a.m - m) * slope);
  return {m, reduce_lanes<Sum, 32>(s)};
}

// What the threads of a row tell each other: two peaks, then two sums. The two turns use memory of their own, and between two
// uses of one lies the other, or a meeting.
struct Exchange {
  float warp[2][4][32];
  float peer[2][kMaxCluster][4];
};

template <bool Cluster>
__device__ __forceinline__ void meet() {
  if constexpr (Cluster) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

// `merge` makes four values of 32 lanes' into every lane's; the row's result is the same in all threads.
template <bool Cluster, class Merge>
__device__ __forceinline__ void merge_row(float (&v)[4], const float (&empty)[4], Exchange& x, int turn,
                                          const Merge& merge) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  merge(v);
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) x.warp[turn][i][warp] = v[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = lane < int(blockDim.x) / 32 ? x.warp[turn][i][lane] : empty[i];
  merge(v);
  if constexpr (Cluster) {
    const unsigned blocks = cluster_size();
    if (threadIdx.x < blocks)
#pragma unroll
      for (int i = 0; i < 4; ++i) put_remote(&x.peer[turn][cluster_rank()][i], threadIdx.x, v[i]);
    meet<true>();
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = unsigned(lane) < blocks ? x.peer[turn][lane][i] : empty[i];
    merge(v);
  }
}

template <bool Cluster>
__device__ __forceinline__ void merge_peaks(Peak a, Peak b, float slope, Exchange& x, Softmax& s,
                                            Softmax& t) {
  float v[4] = {a.m, a.s, b.m, b.s};
  const float empty[4] = {-INFINITY, 0.0f, -INFINITY, 0.0f};
  merge_row<Cluster>(v, empty, x, 0, [slope](float (&v)[4]) {
    Peak first = merge_lanes({v[0], v[1]}, slope), second = merge_lanes({v[2], v[3]}, slope);
    v[0] = first.m, v[1] = first.s, v[2] = second.m, v[3] = second.s;
  });
  s = {v[0], log2f(v[1])}, t = {v[2], log2f(v[3])};
}

template <bool Cluster>
__device__ __forceinline__ void merge_sums(float& total, float& sum_g, Exchange& x) {
  float v[4] = {total, sum_g, 0.0f, 0.0f};
  const float empty[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  merge_row<Cluster>(v, empty, x, 1, [](float (&v)[4]) {
    v[0] = reduce_lanes<Sum, 32>(v[0]), v[1] = reduce_lanes<Sum, 32>(v[1]);
  });
  total = v[0], sum_g = v[1];
}

template <DivergenceKind K, int N>
__device__ __forceinline__ void add_terms(const float (&x)[N], const float (&y)[N], const Softmax& s,
                                          const Softmax& t, float slope, float beta, float& total,
                                          float& sum_g) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float q, term, g;
    divergence_terms<K>(s.log2_of(x[j], slope), t.log2_of(y[j], slope), beta, q, term, g);
    total += term, sum_g += g;
  }
}
template <DivergenceKind K, int N>
__device__ __forceinline__ void gradients(float (&x)[N], const float (&y)[N], const Softmax& s,
                                          const Softmax& t, float slope, float beta, float sum_g,
                                          float gain) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float q, term, g;
    divergence_terms<K>(s.log2_of(x[j], slope), t.log2_of(y[j], slope), beta, q, term, g);
    x[j] = divergence_gradient(g, q, sum_g, gain);
  }
}

// N columns: in one instruction at a boundary of 16 bytes.
template <class T>
__device__ __forceinline__ void put_whole(T* to, bool aligned, const float (&v)[Row<T>::N]) {
  Pack<T, Row<T>::N> pack;
  pack.set(v);
  if (aligned) {
    store<T, Row<T>::N>(to, pack);
  } else {
#pragma unroll
    for (int j = 0; j < Row<T>::N; ++j) to[j] = pack.v[j];
  }
}
// The columns of pack k that the row has.
template <class T>
__device__ __forceinline__ void put_pack(const Row<T>& row, int k, bool aligned,
                                         const float (&v)[Row<T>::N]) {
  constexpr int N = Row<T>::N;
  if (row.whole(k)) return put_whole(row.base + int64_t(k) * N, aligned, v);
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (row.has(row.column(k) + j)) row.base[int64_t(k) * N + j] = narrow<T>(v[j]);
}

// The gradient's row, counted in the packs of the student's row.
template <class T>
__device__ __forceinline__ Row<T> row_like(T* out, const Row<const T>& like) {
  Row<T> row(out, like.cols);
  row.lead = like.lead, row.base = out - like.lead, row.packs = like.packs;
  return row;
}

template <class T>
__device__ __forceinline__ uint4 nothing() {  // -inf in every column
  constexpr uint32_t w = sizeof(T) == 4 ? 0xff800000u : std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u;
  return make_uint4(w, w, w, w);
}

// The same words, which the compiler must take for others (`zero` is a 0 that it does not know): it then takes a pack apart
// again in the next sweep, where it would hold the fp32 values of the last one at twice the registers.
__device__ __forceinline__ void forget(uint4& w, uint32_t zero) {
  w.x ^= zero, w.y ^= zero, w.z ^= zero, w.w ^= zero;
}

template <DivergenceKind K, class T, bool Cluster>
__global__ __launch_bounds__(kThreadsPerSm) void held_kernel(const __grid_constant__ Params<T> p) {
  constexpr int N = Row<T>::N;
  __shared__ Exchange exchange;
  const int tid = int(threadIdx.x), threads = int(blockDim.x);
  const unsigned blocks = Cluster ? cluster_size() : 1, rank = Cluster ? cluster_rank() : 0;
  if constexpr (Cluster) meet<true>();  // everybody's memory is there
  // The block's columns [first, first + n) of every row that it takes.
  const int first = Cluster ? min(int(rank) * p.slice, p.cols) : 0;
  const int n = Cluster ? min(p.slice, p.cols - first) : p.cols;
  const int64_t step = gridDim.x / blocks;
  uint4 a[kHeld], b[kHeld];
  float edge[2][1];  // of the first threads
  auto student_of = [&](int64_t r) { return Part<const T>(p.student + r * p.student_stride + first, n); };
  auto teacher_of = [&](int64_t r) { return p.teacher + r * p.teacher_stride + first; };
  auto read = [&](const Part<const T>& x, const T* y, int h) {
    const int k = h * threads + tid;
    const bool has = k < x.packs;
    a[h] = has ? *reinterpret_cast<const uint4*>(x.pack(k)) : nothing<T>();
    b[h] = has ? *reinterpret_cast<const uint4*>(y + x.head + int64_t(k) * N) : nothing<T>();
  };
  auto read_edge = [&](const Part<const T>& x, const T* y) {
    const int c = x.edge(n);
    edge[0][0] = c >= 0 ? widen(x.x[c]) : -INFINITY;
    edge[1][0] = c >= 0 ? widen(y[c]) : -INFINITY;
  };
  bool have = false;  // this row is in the registers
  for (int64_t r = blockIdx.x / blocks; r < p.rows; r += step) {
    const Part<const T> x = student_of(r);
    const bool ahead = r + step < p.rows && !p.ignored(r + step);
    T* out = p.dstudent + r * p.dstudent_stride + first;
    if (p.ignored(r)) {
      if (p.dstudent != nullptr)
        for (int c = tid; c < n; c += threads) out[c] = narrow<T>(0.0f);
      if (tid == 0 && rank == 0) p.loss[r] = 0.0f;
      have = false;
      continue;
    }
    if (!have) {
      const T* y = teacher_of(r);
#pragma unroll
      for (int h = 0; h < kHeld; ++h) read(x, y, h);
      read_edge(x, y);
    }
    Softmax s = {0.0f, 0.0f}, t = {0.0f, 0.0f};
    if (p.log_probs) {
      meet<Cluster>();
    } else {
      Peak first_peak, second_peak;
      add_peak(first_peak, edge[0], p.slope);
      add_peak(second_peak, edge[1], p.slope);
#pragma unroll
      for (int h = 0; h < kHeld; ++h) {
        float v[N];
        unpack<T>(a[h], v);
        add_peak(first_peak, v, p.slope);
        unpack<T>(b[h], v);
        add_peak(second_peak, v, p.slope);
        forget(a[h], p.zero), forget(b[h], p.zero);
      }
      merge_peaks<Cluster>(first_peak, second_peak, p.slope, exchange, s, t);
    }
    float total = 0.0f, sum_g = 0.0f;
    add_terms<K>(edge[0], edge[1], s, t, p.slope, p.beta, total, sum_g);
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      float v[N], w[N];
      unpack<T>(a[h], v);
      unpack<T>(b[h], w);
      add_terms<K>(v, w, s, t, p.slope, p.beta, total, sum_g);
      forget(a[h], p.zero), forget(b[h], p.zero);
    }
    merge_sums<Cluster>(total, sum_g, exchange);
    if (tid == 0 && rank == 0) p.loss[r] = total * p.factor;
    const Part<const T> next_x = student_of(r + step);
    const T* next_y = teacher_of(r + step);
    const bool aligned = reinterpret_cast<uintptr_t>(out + x.head) % 16 == 0;
    const float gain = p.gain_of(r), through = p.log_probs ? 0.0f : sum_g;
    if (const int c = x.edge(n); p.dstudent != nullptr && c >= 0) {
      gradients<K>(edge[0], edge[1], s, t, p.slope, p.beta, through, gain);
      out[c] = narrow<T>(edge[0][0]);
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int k = h * threads + tid;
      if (p.dstudent != nullptr && k < x.packs) {
        float v[N], w[N];
        unpack<T>(a[h], v);
        unpack<T>(b[h], w);
        gradients<K>(v, w, s, t, p.slope, p.beta, through, gain);
        put_whole(out + x.head + int64_t(k) * N, aligned, v);
      }
      if (ahead) read(next_x, next_y, h);
    }
    if (ahead) read_edge(next_x, next_y);
    have = ahead;
  }
  if constexpr (Cluster) meet<true>();  // a block that has ended cannot be written to
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

template <DivergenceKind K, class T, bool Packs>
__global__ __launch_bounds__(kSweepThreads) void swept_kernel(const __grid_constant__ Params<T> p) {
  using Pair = Pieces<T, Packs>;
  constexpr int N = Pair::N;
  __shared__ Exchange exchange;
  const int tid = int(threadIdx.x);
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    T* out = p.dstudent + r * p.dstudent_stride;
    if (p.ignored(r)) {
      if (p.dstudent != nullptr)
        for (int c = tid; c < p.cols; c += kSweepThreads) out[c] = narrow<T>(0.0f);
      if (tid == 0) p.loss[r] = 0.0f;
      continue;
    }
    const Pair pair(p.student + r * p.student_stride, p.teacher + r * p.teacher_stride, p.cols);
    Softmax s = {0.0f, 0.0f}, t = {0.0f, 0.0f};
    float v[N], w[N];
    if (p.log_probs) {
      __syncthreads();
    } else {
      Peak first, second;
      for (int k = tid; k < pair.count; k += kSweepThreads) {
        pair.get(k, v, w);
        add_peak(first, v, p.slope);
        add_peak(second, w, p.slope);
      }
      merge_peaks<false>(first, second, p.slope, exchange, s, t);
    }
    float total = 0.0f, sum_g = 0.0f;
    for (int k = tid; k < pair.count; k += kSweepThreads) {
      pair.get(k, v, w);
      add_terms<K>(v, w, s, t, p.slope, p.beta, total, sum_g);
    }
    merge_sums<false>(total, sum_g, exchange);
    if (tid == 0) p.loss[r] = total * p.factor;
    if (p.dstudent == nullptr) continue;
    const float gain = p.gain_of(r);
    const Row<T> to = row_like(out, pair.x);
    const bool aligned = reinterpret_cast<uintptr_t>(to.base) % 16 == 0;
    for (int k = tid; k < pair.count; k += kSweepThreads) {
      pair.get(k, v, w);
      gradients<K>(v, w, s, t, p.slope, p.beta, p.log_probs ? 0.0f : sum_g, gain);
      if constexpr (Packs)
        put_pack(to, k, aligned, v);
      else
        out[k] = narrow<T>(v[0]);
    }
  }
}

// Columns of a block of a cluster: where they begin does not change the position in 16 bytes.
int slice_of(int64_t cols, int cluster) { return int(ceil_div(ceil_div(cols, cluster), 64) * 64); }

// False when the device has no room for such a cluster.
template <DivergenceKind K, class T, bool Cluster>
bool launch_held(Context& ctx, Params<T> p, int threads, int cluster) {
  auto kernel = &held_kernel<K, T, Cluster>;
  p.slice = slice_of(p.cols, cluster);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(cluster));
  config.blockDim = dim3(unsigned(threads));
  config.stream = static_cast<cudaStream_t>(ctx.stream());
  config.attrs = &attribute;
  config.numAttrs = Cluster ? 1 : 0;
  int room = device_facts().sms * (kThreadsPerSm / threads);
  if constexpr (Cluster) {
    // Clusters that run together, by device, threads and size; 0 not asked yet, -1 none.
    static std::array<std::array<std::atomic<int>, 4>, 64> known;
    int device = 0;
    TIGON_CUDA_CHECK(kOp, cudaGetDevice(&device));
    std::atomic<int>& slot =
        known[size_t(device) % known.size()][size_t(threads / 512 * 2 + cluster / kMaxCluster)];
    room = slot.load(std::memory_order_relaxed);
    if (room == 0) {
      if (cudaOccupancyMaxActiveClusters(&room, kernel, &config) != cudaSuccess || room <= 0) {
        cudaGetLastError();
        room = -1;
      }
      slot.store(room, std::memory_order_relaxed);
    }
    if (room < 0) return false;
  }
  config.gridDim = dim3(unsigned(std::min<int64_t>(p.rows, room) * cluster));
  cudaError_t status = cudaLaunchKernelEx(&config, kernel, p);
  TIGON_CHECK(kOp, status == cudaSuccess, "kernel launch failed: ", cudaGetErrorString(status));
  return true;
}

// The first that holds the rows runs.
template <DivergenceKind K, class T>
void launch_rows(Context& ctx, const Params<T>& p, bool alike) {
  auto fits = [&](int threads, int cluster = 1) {
    int64_t columns = cluster == 1 ? p.cols : slice_of(p.cols, cluster);
    return ceil_div(columns, Row<T>::N) <= int64_t(kHeld) * threads &&
           (cluster == 1 || device_facts().capability >= 90);
  };
  if (alike) {
    if (fits(64)) return void(launch_held<K, T, false>(ctx, p, 64, 1));
    if (fits(256)) return void(launch_held<K, T, false>(ctx, p, 256, 1));
    if (fits(512)) return void(launch_held<K, T, false>(ctx, p, 512, 1));
    if (fits(256, 4) && launch_held<K, T, true>(ctx, p, 256, 4)) return;
    if (fits(256, 8) && launch_held<K, T, true>(ctx, p, 256, 8)) return;
    if (fits(512, 8) && launch_held<K, T, true>(ctx, p, 512, 8)) return;
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
    const float inverse = 1.0f / a.temperature;
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
                   .slope = 1.44269504f * inverse,
                   .factor = a.factor,
                   .gain = a.factor * inverse,
                   .log_probs = a.log_probs,
                   .zero = 0};
    auto lead = [](const Matrix& m) { return int64_t(reinterpret_cast<uintptr_t>(m.data) % 16 / sizeof(T)); };
    bool one = p.rows == 1, alike = lead(a.student) == lead(a.teacher) &&
                                    (one || (p.student_stride - p.teacher_stride) % N == 0);
    switch (a.kind) {
      case DivergenceKind::forward_kl: return launch_rows<DivergenceKind::forward_kl>(ctx, p, alike);
      case DivergenceKind::reverse_kl: return launch_rows<DivergenceKind::reverse_kl>(ctx, p, alike);
      case DivergenceKind::jsd: return launch_rows<DivergenceKind::jsd>(ctx, p, alike);
      case DivergenceKind::tvd: return launch_rows<DivergenceKind::tvd>(ctx, p, alike);
    }
  });
}

}  // namespace tigon::cuda
