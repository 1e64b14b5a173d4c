// CUDA backend of qk_norm_rope.
//
// Bytes per element (b = element size): forward 2b, backward 3b; besides, blocks * 2D * 4 bytes of dweight partials, written
// and read back from L2. Tables and weights come out of L1 and L2.
// Instructions: about 12 per element forward, 18 backward, against a budget of 24 and 36 at the speed of the memory (bf16).
#include <algorithm>
#include <type_traits>

#include "tigon/base/cuda/rows.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/rope/qk_norm_rope.h"
#include "tigon/ops/rope/rope_cuda.cuh"

namespace tigon::cuda {
namespace {

#include "tigon/ops/rope/qk_norm_rope_math.inc"

using namespace rope_kernels;

constexpr const char* kOp = "qk_norm_rope";
constexpr int kWarps = kThreads / 32;
constexpr int kHeldBackward = 2;  // rows of x and of dy a thread has in flight

// Blocks a multiprocessor, which bound the registers; what is not 16 bits wide and plain takes more of them.
template <class X, bool Plain>
constexpr int kBlocks = !Plain           ? 3
                        : sizeof(X) == 2 ? 6
                                         : 4;

struct Norm {
  const void *q_weight, *k_weight;  // null: none
  bool f32_weight, round_h, round_n;
  float eps, offset, inverse;  // 1 / cols

  Norm(const QkNorm& a, DType x, int64_t cols)
      : q_weight(a.q_weight.data),
        k_weight(a.k_weight.data),
        f32_weight(a.any_weight() && a.any_weight().dtype == DType::f32),
        round_h(a.rounding == Rounding::llama),
        round_n(a.result(x) == x),
        eps(a.eps),
        offset(a.offset),
        inverse(1.0f / float(cols)) {}

  // offset + weight of N columns; 1 without weights, which changes nothing.
  template <class X, int N>
  __device__ __forceinline__ void factors(bool second, int column, float (&f)[N]) const {
    const void* from = second ? k_weight : q_weight;
    if (from == nullptr) {
#pragma unroll
      for (int n = 0; n < N; ++n) f[n] = 1.0f;
    } else if (f32_weight) {
      auto pack = load<float, N>(static_cast<const float*>(from) + column);
#pragma unroll
      for (int n = 0; n < N; ++n) f[n] = offset + pack[n];
    } else {
      auto pack = load<X, N>(static_cast<const X*>(from) + column);
#pragma unroll
      for (int n = 0; n < N; ++n) f[n] = offset + pack[n];
    }
  }
  __device__ __forceinline__ bool has(bool second) const { return (second ? k_weight : q_weight) != nullptr; }

  __device__ __forceinline__ float rstd(float squares) const {
    return 1.0f / sqrtf(fma(squares, inverse, eps));
  }

  // N columns of a normalised row, from h; what is rounded at last is returned as it was packed for that.
  template <class X, int N>
  __device__ __forceinline__ Pack<X, N> normalise(float (&h)[N], float rstd, const float (&f)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) h[n] *= rstd;
    if (round_h) round_all<X>(h);
#pragma unroll
    for (int n = 0; n < N; ++n) h[n] *= f[n];
    Pack<X, N> packed;
    if (round_n) {
      packed.set(h);
#pragma unroll
      for (int n = 0; n < N; ++n) h[n] = packed[n];
    }
    return packed;
  }
};

template <bool Plain>
struct Forward {
  Part q, k;
  Tables<Plain> tables;
  Shape shape;
  Lanes lanes;
  int64_t q_blocks;  // then come those of k
  Norm norm;
};

// Sums over the lanes of a row, in every lane, several at once.
template <int R>
__device__ __forceinline__ void sum_row(float (&v)[R], int width) {
  for (int step = width / 2; step > 0; step >>= 1)
#pragma unroll
    for (int i = 0; i < R; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], step);
}

// v[i] = fn(sum of v[i] over the lanes of a row, at least R), in every lane. A lane keeps half of what it holds at each step and hands
// the other half over, then works on the one sum that is left to it: for 4 sums over 16 lanes 9 exchanges and one fn instead
// of 16 and 4. The additions are those of sum_row.
template <int R, class Fn>
__device__ __forceinline__ void of_sums(float (&v)[R], int width, const Fn& fn) {
  const int lane = int(threadIdx.x) % 32, share = width / R;
  int step = width / 2;
#pragma unroll
  for (int n = R / 2; n > 0; n /= 2, step /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      float keep = upper ? v[n + i] : v[i], give = upper ? v[i] : v[n + i];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, give, step);
    }
  }
  float sum[1] = {v[0]};
  sum_row(sum, share);
  const float own = fn(sum[0]);
#pragma unroll
  for (int i = 0; i < R; ++i) v[i] = __shfl_sync(0xffffffffu, own, (lane & ~(width - 1)) + i * share);
}

template <bool Halves, bool Plain, class X, class Y>
__global__ void __launch_bounds__(kThreads, kBlocks<X, Plain>)
    forward_kernel(const __grid_constant__ Forward<Plain> p) {
  constexpr int N = kPack;
  const bool second = blockIdx.x >= p.q_blocks;
  const Part& part = second ? p.k : p.q;
  const uint32_t block = blockIdx.x - uint32_t(second ? p.q_blocks : 0);
  const uint32_t index = block * (kThreads >> p.lanes.log) + (threadIdx.x >> p.lanes.log);
  const bool live = index < part.units;
  const Unit unit(p.shape, part, live ? index : 0u);
  const Place place(p.shape, p.lanes.width);
  wait_for_kernel_ahead();
  const Rows<X, Y> rows(part, unit, place.column, live && place.inside);
  Pack<X, N> x[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (rows.has(i)) x[i] = load_stream<X, N>(rows.x + i * rows.x_step);
  float c[N] = {}, s[N] = {}, f[N] = {}, rstd[kHeld] = {};
  if (place.inside) p.norm.template factors<X, N>(second, place.column, f);
  if (live && place.turned) p.tables.template columns<X, N>(unit.b, unit.t, place.rotated, c, s);
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
#pragma unroll
    for (int n = 0; n < N; ++n) rstd[i] = fma(x[i][n], x[i][n], rstd[i]);
  of_sums(rstd, p.lanes.width, [&](float squares) { return p.norm.rstd(squares); });
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    float own[N], other[N];
#pragma unroll
    for (int n = 0; n < N; ++n) own[n] = x[i][n];
    const Pack<X, N> packed = p.norm.template normalise<X>(own, rstd[i], f);
    if constexpr (!Halves) {
#pragma unroll
      for (int n = 0; n < N; ++n) other[n] = own[n ^ 1];
    } else if (sizeof(X) == 2 && p.norm.round_n) {
      const Pack<X, N> partner = exchange(packed, place.partner);
#pragma unroll
      for (int n = 0; n < N; ++n) other[n] = partner[n];
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) other[n] = __shfl_sync(0xffffffffu, own[n], place.partner);
    }
    if (!rows.has(i)) continue;
    if (place.turned) {
#pragma unroll
      for (int n = 0; n < N; ++n) own[n] = rope_second(other[n], own[n], c[n], s[n]);
    }
    Pack<Y, N> out;
    out.set(own);
    store(rows.y + i * rows.y_step, out);
  }
}

// x and its gradient; Part holds dy and dx.
struct Input {
  const void* x;
  int64_t batch, head, token;

  explicit Input(const RopeHeads& x)
      : x(x.data), batch(x.batch_stride), head(x.head_stride), token(x.token_stride) {}
  template <class X>
  __device__ __forceinline__ const X* at(const Unit& u, int h) const {
    return static_cast<const X*>(x) + u.b * batch + u.t * token + h * head;
  }
};

template <bool Plain>
struct Backward {
  Part q, k;
  Input q_x, k_x;
  Tables<Plain> tables;
  Shape shape;
  Lanes lanes;
  Norm norm;
  float* partials;  // [blocks, 2, cols], may be null
};

// Persistent blocks: units b, b + grid, ... of q, then of k. dweight is summed in registers over all rows of a thread, over
// the rows of a warp by a tree, then over its warps in order.
template <bool Halves, bool Plain, class X, class Y>
__global__ void __launch_bounds__(kThreads, kBlocks<X, Plain>)
    backward_kernel(const __grid_constant__ Backward<Plain> p) {
  constexpr int N = kPack, kRows = kHeldBackward;
  __shared__ float sums[kWarps][32 * N];
  const Place place(p.shape, p.lanes.width);
  const int per_block = kThreads >> p.lanes.log, cols = p.shape.cols;
  wait_for_kernel_ahead();
  let_next_kernel_start();
  for (int second = 0; second < 2; ++second) {
    const Part& part = second ? p.k : p.q;
    const Input& input = second ? p.k_x : p.q_x;
    const bool weighted = p.norm.has(second);
    float f[N] = {}, dw[N] = {};
    if (place.inside) p.norm.template factors<X, N>(second, place.column, f);
    const int64_t step = int64_t(gridDim.x) * per_block;
    for (int64_t base = int64_t(blockIdx.x) * per_block; base < part.units; base += step) {
      const int64_t index = base + (threadIdx.x >> p.lanes.log);
      const bool live = index < part.units;
      const Unit unit(p.shape, part, live ? uint32_t(index) : 0u);
      const Rows<Y, X> rows(part, unit, place.column, live && place.inside);  // of dy and dx
      const X* x_row = input.template at<X>(unit, unit.group) + place.column;
      const int64_t x_step = part.groups * input.head;
      Pack<X, N> x[kRows] = {};
      Pack<Y, N> dy[kRows] = {};
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (!rows.has(i)) continue;
        x[i] = load_stream<X, N>(x_row + i * x_step);
        dy[i] = load_stream<Y, N>(rows.x + i * rows.x_step);
      }
      float c[N] = {}, s[N] = {}, total[2 * kRows] = {};
      if (live && place.turned) p.tables.template columns<X, N>(unit.b, unit.t, place.rotated, c, s);
      auto turned = [&](int i, float (&g)[N]) {  // gradient of the normalised row
        Pack<Y, N> other;
        if constexpr (Halves) other = exchange(dy[i], place.partner);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          float own = dy[i][n], partner = Halves ? other[n] : dy[i][n ^ 1];
          g[n] = place.turned ? rope_second(partner, own, c[n], s[n]) : own;
        }
      };
      float g[kRows][N];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        turned(i, g[i]);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          total[2 * i] = fma(x[i][n], x[i][n], total[2 * i]);
          total[2 * i + 1] = fma(g[i][n] * f[n], x[i][n], total[2 * i + 1]);
        }
      }
      sum_row(total, p.lanes.width);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (!rows.has(i)) continue;
        float rstd = p.norm.rstd(total[2 * i]), mean = total[2 * i + 1] * rstd * p.norm.inverse, dx[N], h[N];
#pragma unroll
        for (int n = 0; n < N; ++n) h[n] = x[i][n] * rstd;
#pragma unroll
        for (int n = 0; n < N; ++n) {
          dx[n] = qk_norm_dx(g[i][n] * f[n], h[n], mean, rstd);
        }
        Pack<X, N> out;
        out.set(dx);
        store(rows.y + i * rows.y_step, out);
        if (p.norm.round_h) round_all<X>(h);
#pragma unroll
        for (int n = 0; n < N; ++n) dw[n] = fma(g[i][n], h[n], dw[n]);
      }
    }
    if (p.partials == nullptr) continue;
#pragma unroll
    for (int n = 0; n < N; ++n)
      for (int m = p.lanes.width; m < 32; m <<= 1) dw[n] += __shfl_xor_sync(0xffffffffu, dw[n], m);
    if (int(threadIdx.x % 32) < p.lanes.width && place.inside) {
#pragma unroll
      for (int n = 0; n < N; ++n) sums[threadIdx.x / 32][place.column + n] = weighted ? dw[n] : 0.0f;
    }
    __syncthreads();
    for (int column = threadIdx.x; column < cols; column += kThreads) {
      float sum = sums[0][column];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) sum += sums[i][column];
      p.partials[(int64_t(blockIdx.x) * 2 + second) * cols + column] = sum;
    }
    __syncthreads();
  }
}

// Rows of any length up to the limit and of any alignment: a warp a row, through shared memory.

// c, s and the partner of a column; false where it is not rotated.
template <class X>
__device__ __forceinline__ bool turn_of(const Tables<false>& tables, const Shape& shape, const Unit& unit,
                                        int column, float& c, float& s, int& partner) {
  int at = column - shape.start, half = shape.rotated / 2;
  if (at < 0 || at >= shape.rotated) return false;
  partner = shape.start + (!tables.halves ? at ^ 1 : at < half ? at + half : at - half);
  float cs[1], sn[1];
  tables.columns<X, 1>(unit.b, unit.t, at, cs, sn);
  c = cs[0], s = sn[0];
  return true;
}

template <class X, class Y>
__global__ void __launch_bounds__(kThreads) forward_rows_kernel(const __grid_constant__ Forward<false> p) {
  extern __shared__ float rows[];
  wait_for_kernel_ahead();
  const bool second = blockIdx.x >= p.q_blocks;
  const Part& part = second ? p.k : p.q;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, cols = p.shape.cols;
  const uint64_t index = uint64_t(blockIdx.x - (second ? p.q_blocks : 0)) * kWarps + warp;
  if (index >= uint64_t(part.units)) return;
  const Unit unit(p.shape, part, index);
  const X* x = x_of<X>(part, unit, unit.group);
  Y* y = y_of<Y>(part, unit, unit.group);
  float* n = rows + warp * cols;
  float squares[1] = {};
  for (int i = lane; i < cols; i += 32) squares[0] = fma(widen(x[i]), widen(x[i]), squares[0]);
  sum_row(squares, 32);
  const float rstd = p.norm.rstd(squares[0]);
  for (int i = lane; i < cols; i += 32) {
    float f[1], h[1] = {widen(x[i])};
    p.norm.template factors<X, 1>(second, i, f);
    p.norm.template normalise<X>(h, rstd, f);
    n[i] = h[0];
  }
  __syncwarp();
  for (int i = lane; i < cols; i += 32) {
    float c, s;
    int partner;
    bool turned = turn_of<X>(p.tables, p.shape, unit, i, c, s, partner);
    y[i] = narrow<Y>(turned ? rope_second(n[partner], n[i], c, s) : n[i]);
  }
}

template <class X, class Y>
__global__ void __launch_bounds__(kThreads) backward_rows_kernel(const __grid_constant__ Backward<false> p) {
  extern __shared__ float rows[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, cols = p.shape.cols;
  float *dy = rows + warp * cols, *g = dy + kWarps * cols, *dw = g + kWarps * cols;
  wait_for_kernel_ahead();
  let_next_kernel_start();
  for (int second = 0; second < 2; ++second) {
    const Part& part = second ? p.k : p.q;
    const Input& input = second ? p.k_x : p.q_x;
    for (int i = lane; i < cols; i += 32) dw[i] = 0.0f;
    for (int64_t row = int64_t(blockIdx.x) * kWarps + warp; row < part.units;
         row += int64_t(gridDim.x) * kWarps) {
      const Unit unit(p.shape, part, uint64_t(row));
      const X* x = input.template at<X>(unit, unit.group);
      const Y* upstream = x_of<Y>(part, unit, unit.group);
      X* dx = y_of<X>(part, unit, unit.group);
      for (int i = lane; i < cols; i += 32) dy[i] = widen(upstream[i]);
      __syncwarp();
      float total[2] = {};  // of squares, of the products with the gradient
      for (int i = lane; i < cols; i += 32) {
        float c, s, f[1];
        int partner;
        bool turned = turn_of<X>(p.tables, p.shape, unit, i, c, s, partner);
        g[i] = turned ? rope_second(dy[partner], dy[i], c, s) : dy[i];
        p.norm.template factors<X, 1>(second, i, f);
        total[0] = fma(widen(x[i]), widen(x[i]), total[0]);
        total[1] = fma(g[i] * f[0], widen(x[i]), total[1]);
      }
      sum_row(total, 32);
      const float rstd = p.norm.rstd(total[0]), mean = total[1] * rstd * p.norm.inverse;
      for (int i = lane; i < cols; i += 32) {
        float h = widen(x[i]) * rstd, f[1];
        p.norm.template factors<X, 1>(second, i, f);
        dw[i] = fma(g[i], p.norm.round_h ? round_to<X>(h) : h, dw[i]);
        dx[i] = narrow<X>(qk_norm_dx(g[i] * f[0], h, mean, rstd));
      }
      __syncwarp();
    }
    __syncthreads();
    if (p.partials != nullptr) {
      const float* all = rows + 2 * kWarps * cols;
      for (int i = threadIdx.x; i < cols; i += kThreads) {
        float sum = all[i];
        for (int other = 1; other < kWarps; ++other) sum += all[other * cols + i];
        p.partials[(int64_t(blockIdx.x) * 2 + second) * cols + i] = p.norm.has(second) ? sum : 0.0f;
      }
    }
    __syncthreads();
  }
}

// fn(Type<X>, Type<Y>): y is x's or f32.
template <class Fn>
void with_types(DType x, DType y, Fn&& fn) {
  dispatch_float(kOp, "q", x, [&](auto type) {
    using X = typename DeviceType<typename decltype(type)::type>::type;
    if (x == y) return fn(Type<X>{}, Type<X>{});
    if constexpr (sizeof(X) == 2) fn(Type<X>{}, Type<float>{});
  });
}

// A row has the lanes of one warp, and enough of them for the sums of the rows that a thread holds.
bool lanes_fit(const Rope& a, const RopeHeads& x) {
  return columns_fit(a, x) && Lanes(int(x.cols / kPack)).width >= kHeld;
}
bool weights_align(const QkNorm& a) {
  auto aligned = [](const Vector& w) { return reinterpret_cast<uintptr_t>(w.data) % 16 == 0; };
  return aligned(a.q_weight) && aligned(a.k_weight);
}

template <bool Plain>
Forward<Plain> forward_of(const QkNormRopeFwd& a, const RopeHeads& x, int held, int64_t units_a_block) {
  Forward<Plain> p{.q = Part(a.rope.q, a.rope.q_out, held),
                   .k = Part(a.rope.k, a.rope.k_out, held),
                   .tables = Tables<Plain>(a.rope, false),
                   .shape = Shape(a.rope, x),
                   .lanes = Lanes(int(x.cols / kPack)),
                   .q_blocks = 0,
                   .norm = Norm(a.norm, x.dtype, x.cols)};
  p.q_blocks = ceil_div(p.q.units, units_a_block);
  return p;
}

template <bool Plain>
Backward<Plain> backward_of(const QkNormRopeBwd& a, const RopeHeads& x, int held) {
  return {.q = Part(a.rope.q, a.rope.q_out, held),
          .k = Part(a.rope.k, a.rope.k_out, held),
          .q_x = Input(a.q),
          .k_x = Input(a.k),
          .tables = Tables<Plain>(a.rope, true),
          .shape = Shape(a.rope, x),
          .lanes = Lanes(int(x.cols / kPack)),
          .norm = Norm(a.norm, x.dtype, x.cols),
          .partials = nullptr};
}

// Launches `kernel` on as many persistent blocks as there is work for, and sums what they leave of dweight.
template <bool Plain>
void run_persistent(Context& ctx, void (*kernel)(Backward<Plain>), Backward<Plain>& p, int64_t units_a_block,
                    int64_t blocks_a_multiprocessor, size_t shared, const Matrix& dweight) {
  int64_t most = std::max(ceil_div(p.q.units, units_a_block), ceil_div(p.k.units, units_a_block));
  int64_t blocks = std::min(most, device_facts().sms * blocks_a_multiprocessor);
  if (dweight.data != nullptr) p.partials = ctx.scratch_of<float>(blocks * 2 * p.shape.cols);
  launch(kOp, ctx, kernel, {.blocks = blocks, .threads = kThreads, .shared = shared, .early = true}, p);
  if (dweight.data != nullptr)
    sum_partials(kOp, ctx, p.partials, blocks,
                 {Vector{.data = dweight.data, .dtype = dweight.dtype, .size = 2 * dweight.cols}});
}

}  // namespace

void qk_norm_rope_fwd(Context& ctx, const QkNormRopeFwd& a) {
  const RopeHeads& x = a.rope.q.empty() ? a.rope.k : a.rope.q;
  const RopeHeads& y = a.rope.q.empty() ? a.rope.k_out : a.rope.q_out;
  with_types(x.dtype, y.dtype, [&](auto tx, auto ty) {
    using X = typename decltype(tx)::type;
    using Y = typename decltype(ty)::type;
    auto run = [&](auto kernel, const auto& p, int64_t units_a_block, size_t shared) {
      launch(kOp, ctx, kernel,
             {.blocks = p.q_blocks + ceil_div(p.k.units, units_a_block),
              .threads = kThreads,
              .shared = shared,
              .early = true},
             p);
    };
    if (!lanes_fit(a.rope, x) || !weights_align(a.norm))
      return run(forward_rows_kernel<X, Y>, forward_of<false>(a, x, 1, kWarps), kWarps,
                 kWarps * size_t(x.cols) * sizeof(float));
    dispatch_bool(plain_tables(a.rope), [&](auto plain) {
      int64_t per_block = kThreads / Lanes(int(x.cols / kPack)).width;
      run(a.rope.form.in == RopePairs::halves ? forward_kernel<true, plain, X, Y>
                                              : forward_kernel<false, plain, X, Y>,
          forward_of<plain>(a, x, kHeld, per_block), per_block, 0);
    });
  });
}

void qk_norm_rope_bwd(Context& ctx, const QkNormRopeBwd& a) {
  const RopeHeads& x = a.q.empty() ? a.k : a.q;
  const RopeHeads& dy = a.q.empty() ? a.rope.k : a.rope.q;
  if (x.empty()) {
    TIGON_CUDA_CHECK(kOp,
                     cudaMemsetAsync(a.dweight.data, 0, size_of(a.dweight.dtype) * size_t(2 * a.dweight.cols),
                                     static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  with_types(x.dtype, dy.dtype, [&](auto tx, auto ty) {
    using X = typename decltype(tx)::type;
    using Y = typename decltype(ty)::type;
    if (!lanes_fit(a.rope, x) || !heads_align(a.q) || !heads_align(a.k) || !weights_align(a.norm)) {
      auto p = backward_of<false>(a, x, 1);
      return run_persistent<false>(ctx, backward_rows_kernel<X, Y>, p, kWarps, 4,
                                   3 * kWarps * size_t(x.cols) * sizeof(float), a.dweight);
    }
    dispatch_bool(plain_tables(a.rope), [&](auto plain) {
      auto p = backward_of<plain>(a, x, kHeldBackward);
      run_persistent<plain>(ctx,
                            a.rope.form.in == RopePairs::halves ? backward_kernel<true, plain, X, Y>
                                                                : backward_kernel<false, plain, X, Y>,
                            p, kThreads / p.lanes.width, kBlocks<X, plain>, 0, a.dweight);
    });
  });
}

}  // namespace tigon::cuda
