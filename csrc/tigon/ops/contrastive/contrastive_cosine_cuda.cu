// Implements contrastive_cosine in CUDA, with our own GEMMs: everything that is as large as the matrix
// happens in their epilogues.
#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/matmul/epilogue_store.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/matrix_gemm.h"
#include "tigon/ops/contrastive/contrastive_cosine.h"

namespace tigon::cuda {
namespace {

using matmul::kTileM, matmul::kTileN, matmul::Tile;
using T = __nv_bfloat16;

constexpr const char* kOp = "contrastive_cosine";
constexpr int kThreads = 256, kWarps = kThreads / 32, kVec = 8,
              kRows = 64;  // rows that share a sum by column

// Says what a GEMM leaves: e^z and its sums, only the sums, or G of both directions.
enum class Leaves { exponentials, sums, gradient };

// Holds the parameters of a chunk of queries, the first of which has document `first`.
struct EpilogueParams {
  matmul::StoreEpilogue<T>::Params store;
  // Get the sums without pairs (i, i): [tiles of columns, rows] and [rows / 64, cols], null if not wanted.
  float *row_parts, *col_parts;
  float* label;                                           // [rows]: z_ii in powers of two
  const float *row_factor, *col_factor, *label_gradient;  // [rows]; by column, zeros after the last; [rows]
  int rows, cols, first;
};

template <Leaves kLeaves>
struct Epilogue {
  using Params = EpilogueParams;
  using Store = matmul::StoreEpilogue<T>;
  using Tensors = Store::Tensors;  // a warpgroup's part first holds its sums by column

  const Tile& tile;
  __device__ Epilogue(const Params&, const Tile& tile, int) : tile(tile) {}

  // A lane has two rows, 8 apart, and in them the columns 8 j + 2 q + i of the tile.
  __device__ __forceinline__ void run(const Params& p, Tensors& smem, int consumer,
                                      float (&acc)[matmul::kAccumulators]) const {
    constexpr int kLanes = matmul::kAccumulators;
    if (tile.n >= p.cols) return;  // this is the second tile of a pair side by side
    const int warp = int(threadIdx.x) / 32 % 4, lane = int(threadIdx.x) % 32, q = lane % 4;
    const int row = tile.m + consumer * kRows + warp * 16 + lane / 4;
    auto column = [&](int k) { return k / 4 * 8 + 2 * q + k % 2; };
    auto row_of = [&](int k) { return row + k / 2 % 2 * 8; };
    auto is_label = [&](int k) { return p.first + row_of(k) == tile.n + column(k) && row_of(k) < p.rows; };
    const int near = p.first + tile.m - tile.n;  // column of the label of the tile's first row
    const bool has_labels = near > -kTileM && near < kTileN;
    if (tile.n + kTileN > p.cols || tile.m + kTileM > p.rows) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k)
        if (tile.n + column(k) >= p.cols || row_of(k) >= p.rows) acc[k] = -INFINITY;
    }
    if (kLeaves != Leaves::gradient && has_labels) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k)
        if (is_label(k)) p.label[row_of(k)] = acc[k], acc[k] = -INFINITY;
    }
#pragma unroll
    for (float& x : acc) x = ex2_approx_ftz(x);
    if constexpr (kLeaves == Leaves::gradient) {
      const float of_row[2] = {row < p.rows ? p.row_factor[row] : 0.0f,
                               row + 8 < p.rows ? p.row_factor[row + 8] : 0.0f};
#pragma unroll
      for (int k = 0; k < kLanes; k += 4) {
        const float2 of_col = *reinterpret_cast<const float2*>(p.col_factor + tile.n + column(k));
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[k + i] *= of_row[i / 2] + (i % 2 ? of_col.y : of_col.x);
      }
      if (has_labels) {
#pragma unroll
        for (int k = 0; k < kLanes; ++k)
          if (is_label(k)) acc[k] = p.label_gradient[row_of(k)];
      }
    } else {
      float sum[2][4] = {};  // a row has four chains of additions
#pragma unroll
      for (int k = 0; k < kLanes; ++k) sum[k / 2 % 2][k / 4 % 2 * 2 + k % 2] += acc[k];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float s = reduce_lanes<Sum, 4>((sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]));
        if (q == 0 && row + 8 * h < p.rows) p.row_parts[int64_t(tile.n / kTileN) * p.rows + row + 8 * h] = s;
      }
    }
    if (kLeaves != Leaves::gradient && p.col_parts != nullptr)
      sum_columns(p, reinterpret_cast<float (*)[kTileN]>(smem.d[consumer]), consumer, acc);
    if constexpr (kLeaves != Leaves::sums) Store(p.store, tile, consumer).run(p.store, smem, consumer, acc);
  }

  // Reduces sums over two lanes: of 2 kCount sums a lane keeps half, of its own rows and of those of the lane
  // kStep away.
  template <int kStep, int kCount>
  __device__ static __forceinline__ void halve(float (&sum)[kTileN / 4], int lane) {
    const bool upper = (lane & kStep) != 0;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const float sent = upper ? sum[c] : sum[c + kCount], kept = upper ? sum[c + kCount] : sum[c];
      sum[c] = kept + __shfl_xor_sync(0xffffffffu, sent, kStep);
    }
  }
  // Sums the scores by column. Lanes with the same q have the same columns.
  __device__ __forceinline__ void sum_columns(const Params& p, float (*slots)[kTileN], int consumer,
                                              const float (&acc)[matmul::kAccumulators]) const {
    const int warp = int(threadIdx.x) / 32 % 4, lane = int(threadIdx.x) % 32, thread = warp * 32 + lane;
    float sum[kTileN / 4];
#pragma unroll
    for (int c = 0; c < kTileN / 4; ++c) sum[c] = acc[c / 2 * 4 + c % 2] + acc[c / 2 * 4 + c % 2 + 2];
    halve<16, kTileN / 8>(sum, lane), halve<8, kTileN / 16>(sum, lane), halve<4, kTileN / 32>(sum, lane);
    const int first = lane / 16 * (kTileN / 8) + lane / 8 % 2 * (kTileN / 16) + lane / 4 % 2 * (kTileN / 32);
    // The previous tile has been stored, and its sums have been read.
    if (thread == 0) matmul::cp_async_bulk_wait_group_read<0>();
    matmul::bar_sync(1 + consumer, matmul::kWarpgroup);
#pragma unroll
    for (int c = 0; c < kTileN / 32; ++c) {
      const int at = first + c;
      slots[warp][at / 2 * 8 + lane % 4 * 2 + at % 2] = sum[c];
    }
    matmul::bar_sync(1 + consumer, matmul::kWarpgroup);
    if (tile.m + consumer * kRows >= p.rows) return;
    float* parts = p.col_parts + int64_t(tile.m / kRows + consumer) * p.cols + tile.n;
    for (int c = thread; c < min(kTileN, p.cols - tile.n); c += matmul::kWarpgroup)
      parts[c] = (slots[0][c] + slots[1][c]) + (slots[2][c] + slots[3][c]);
  }

  __device__ static __forceinline__ void finish() { Store::finish(); }
};

template <Leaves kLeaves>
using Matmul = matmul::Matmul<T, matmul::Major::K, matmul::Major::K, Epilogue<kLeaves>>;

// Holds the rows of q, then those of d; one warp takes one row.
struct Rows {
  const T *q, *d;
  int64_t q_stride, d_stride, n, m, cols;
  Rows(const ContrastiveCosine& a)
      : q(static_cast<const T*>(a.q.data)),
        d(static_cast<const T*>(a.d.data)),
        q_stride(a.q.stride),
        d_stride(a.d.stride),
        n(a.q.rows),
        m(a.d.rows),
        cols(a.q.cols) {}
  __device__ const T* operator[](int64_t r) const {
    return r < n ? q + r * q_stride : d + (r - n) * d_stride;
  }
  bool aligned() const {
    return (reinterpret_cast<uintptr_t>(q) | reinterpret_cast<uintptr_t>(d)) % 16 == 0 &&
           (q_stride | d_stride) % kVec == 0;
  }
  LaunchConfig grid() const {
    return {.blocks = ceil_div(n + m, int64_t(kWarps)), .threads = kThreads, .pdl = true};
  }
};
__device__ __forceinline__ int64_t row_of_warp() { return int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; }
constexpr int kHeld = 4,
              kStep = 32 * kVec;  // vectors of a lane in registers, and columns from one to the next
// Calls fn(column of the first element, vector) for a row, by the lanes of a warp. What `load` returns stays
// in x, and all of it does if `held` is true: then another call with `loaded` reads nothing.
__device__ __forceinline__ bool held(int64_t cols) { return cols <= kHeld * kStep; }
template <class V, class Load, class Fn>
__device__ __forceinline__ void each_vector(V (&x)[kHeld], bool loaded, int64_t cols, Load load, Fn fn) {
  for (int64_t c = threadIdx.x % 32 * kVec; c < cols; c += kHeld * kStep) {
    if (!loaded) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (c + i * kStep < cols) x[i] = load(c + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (c + i * kStep < cols) fn(c + i * kStep, x[i]);
  }
}
template <bool kAligned>
__device__ __forceinline__ Vec<T, kVec> load_vector(const T* from) {
  return kAligned ? load<T, kVec>(from) : load_elements<T, kVec>(from, [](int) { return true; });
}
// Returns 1 / |x| from a sum of squares.
__device__ __forceinline__ float inverse_length(float squares) { return 1.0f / sqrt(squares + 1e-24f); }

__device__ __forceinline__ void store_scaled(T* to, const Vec<T, kVec>& x, float factor) {
  float y[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) y[j] = x[j] * factor;
  Vec<T, kVec> scaled;
  scaled.set(y);
  store_v4(to, scaled);
}

// Writes unit rows, those of q times `length`, so that GEMMs give z in powers of two.
template <bool kAligned>
__global__ __launch_bounds__(kThreads) void unit_rows_kernel(const __grid_constant__ Rows rows, float length,
                                                             T* out) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t row = row_of_warp();
  if (row >= rows.n + rows.m) return;
  const T* from = rows[row];
  Vec<T, kVec> held_x[kHeld];
  auto each = [&](bool loaded, auto fn) {
    each_vector(held_x, loaded, rows.cols, [&](int64_t c) { return load_vector<kAligned>(from + c); }, fn);
  };
  float squares = 0.0f;
  each(false, [&](int64_t, const Vec<T, kVec>& x) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) squares = fma(x[j], x[j], squares);
  });
  const float factor = inverse_length(reduce_lanes<Sum, 32>(squares)) * (row < rows.n ? length : 1.0f);
  each(held(rows.cols),
       [&](int64_t c, const Vec<T, kVec>& x) { store_scaled(out + row * rows.cols + c, x, factor); });
}

// Holds the parameters of the gradient of x from that of x^.
struct BackwardParams {
  Rows rows;
  const T* gd;
  const void* gq;  // float if `wide`
  bool wide;
  const float *factor, *dloss;
  float scale, reduction_scale;
  T *dq, *dd;
};
template <bool kAligned, class G>
__device__ __forceinline__ void backward_row(const T* from, const G* gradient, int64_t cols, float factor,
                                             T* out) {
  struct Pair {
    Vec<T, kVec> x;
    Vec<G, kVec> g;
  } pairs[kHeld];
  auto each = [&](bool loaded, auto fn) {
    auto load_pair = [&](int64_t c) {
      return Pair{load_vector<kAligned>(from + c), load<G, kVec>(gradient + c)};
    };
    each_vector(pairs, loaded, cols, load_pair, fn);
  };
  float squares = 0.0f, dot = 0.0f;
  each(false, [&](int64_t, const Pair& p) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) squares = fma(p.x[j], p.x[j], squares), dot = fma(p.x[j], p.g[j], dot);
  });
  const float inverse = inverse_length(reduce_lanes<Sum, 32>(squares));
  const float along = reduce_lanes<Sum, 32>(dot) * inverse * inverse;
  factor *= inverse;
  each(held(cols), [&](int64_t c, const Pair& p) {
    float y[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) y[j] = factor * (p.g[j] - p.x[j] * along);
    Vec<T, kVec> dx;
    dx.set(y);
    store_v4(out + c, dx);
  });
}
template <bool kAligned>
__global__ __launch_bounds__(kThreads, 4) void backward_kernel(const __grid_constant__ BackwardParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const Rows& rows = p.rows;
  const int64_t row = row_of_warp(), cols = rows.cols, at = (row < rows.n ? row : row - rows.n) * cols;
  T* out = row < rows.n ? p.dq : p.dd;
  if (row >= rows.n + rows.m || out == nullptr) return;
  const float of_row = row >= rows.n ? 1.0f / (p.scale * kLog2e) : p.factor != nullptr ? p.factor[row] : 1.0f;
  const float factor = *p.dloss * p.reduction_scale * p.scale * of_row;
  if (row >= rows.n && p.wide)
    backward_row<kAligned>(rows[row], static_cast<const float*>(p.gq) + at, cols, factor, out + at);
  else
    backward_row<kAligned>(rows[row], (row < rows.n ? p.gd : static_cast<const T*>(p.gq)) + at, cols, factor,
                           out + at);
}

// Sums parts [count, size] for column i, by the warps of a CTA, whose lanes have adjacent columns.
__device__ __forceinline__ float sum_parts(const float* parts, int64_t size, int64_t count, int64_t i,
                                           float (&slots)[kWarps][32]) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t t = warp; t < (i < size ? count : 0); t += kWarps) sum += parts[t * size + i];
  slots[warp][lane] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += slots[w][lane];
  __syncthreads();
  return sum;
}
// Returns log(1 + others / e^z), z in powers of two.
__device__ __forceinline__ float loss_of(float others, float z) {
  const float own = exp2_approx(z);
  return others > own ? logf(others + own) - z / kLog2e : log1pf(others / own);
}

struct SumsParams {
  float *row_parts, *col_parts;
  const float* weight;
  int64_t tiles, blocks;  // parts of a row and of a column
  int64_t n, m, cols, first, rows;
  float *label, *loss, *factor, *row_sum, *col_sum;  // for all queries and documents
  T *g, *unit;                                       // null without a gradient
  int64_t stride;                                    // stride of g
};
// Computes for one direction: a chunk's losses, pairs (i, i) of G, and the factors of rows, by which q^ is
// multiplied before the next GEMM.
__global__ __launch_bounds__(kThreads) void rows_kernel(const __grid_constant__ SumsParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t row = row_of_warp(), query = p.first + row;
  if (row >= p.rows) return;
  Vec<T, kVec> held_x[kHeld];
  T* unit = p.unit + query * p.cols;
  auto each = [&](bool loaded, auto fn) {
    if (p.unit != nullptr)
      each_vector(held_x, loaded, p.cols, [&](int64_t c) { return load<T, kVec>(unit + c); }, fn);
  };
  if (held(p.cols)) each(false, [](int64_t, const Vec<T, kVec>&) {});
  float others = 0.0f;
  for (int64_t t = threadIdx.x % 32; t < p.tiles; t += 32) others += p.row_parts[t * p.rows + row];
  others = reduce_lanes<Sum, 32>(others);
  const float z = p.label[query], weight = p.weight != nullptr ? p.weight[query] : 1.0f;
  const float factor = weight / (others + exp2_approx(z));
  if (threadIdx.x % 32 == 0) {
    p.loss[query] = weight * loss_of(others, z);
    p.factor[query] = factor;
    if (p.g != nullptr) p.g[row * p.stride + query] = narrow<T>(-others);
  }
  each(held(p.cols), [&](int64_t c, const Vec<T, kVec>& x) { store_scaled(unit + c, x, factor); });
}
// Computes for both directions: the sums of a chunk's rows, and those of columns over the chunks so far.
__global__ __launch_bounds__(kThreads) void sums_kernel(const __grid_constant__ SumsParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __shared__ float slots[kWarps][32];
  const int64_t blocks = (p.rows + 31) / 32, block = blockIdx.x, lane = threadIdx.x % 32;
  const bool is_row = block < blocks;
  const int64_t i = (is_row ? block : block - blocks) * 32 + lane;
  const float sum = is_row ? sum_parts(p.row_parts, p.rows, p.tiles, i, slots)
                           : sum_parts(p.col_parts, p.m, p.blocks, i, slots);
  if (threadIdx.x >= 32 || i >= (is_row ? p.rows : p.m)) return;
  if (is_row)
    p.row_sum[p.first + i] = sum;
  else
    p.col_sum[i] = p.first == 0 ? sum : p.col_sum[i] + sum;
}
// Computes the losses after that, puts the factors in place of the sums, and pairs (i, i) of G in place of
// their z.
__global__ __launch_bounds__(kThreads) void both_kernel(const __grid_constant__ SumsParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.n) {
    p.col_sum[i] = 0.0f;  // this column has no query
    return;
  }
  const float half = 0.5f * (p.weight != nullptr ? p.weight[i] : 1.0f), z = p.label[i], own = exp2_approx(z);
  const float of_row = p.row_sum[i], of_col = p.col_sum[i];
  const float row_factor = half / (of_row + own), col_factor = half / (of_col + own);
  p.loss[i] = half * (loss_of(of_row, z) + loss_of(of_col, z));
  p.label[i] = -(of_row * row_factor + of_col * col_factor);
  p.row_sum[i] = row_factor, p.col_sum[i] = col_factor;
}

// Puts G of both directions in place of e^z.
constexpr int kGradientRows = 16;
__global__ __launch_bounds__(kThreads) void gradient_kernel(const __grid_constant__ SumsParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t groups = (p.m + kThreads * kVec - 1) / (kThreads * kVec);
  const int64_t col = (blockIdx.x % groups * kThreads + threadIdx.x) * kVec,
                row = blockIdx.x / groups * kGradientRows;
  if (col >= p.m) return;
  const Vec<float, kVec> of_col = load<float, kVec>(p.col_sum + col);
#pragma unroll 4
  for (int64_t r = row; r < min(p.rows, row + kGradientRows); ++r) {
    auto* at = reinterpret_cast<Vec<T, kVec>*>(p.g + r * p.stride + col);
    const Vec<T, kVec> x = *at;
    const float of_row = p.row_sum[p.first + r];
    float y[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      y[j] = p.first + r == col + j ? p.label[p.first + r] : x[j] * (of_row + of_col[j]);
    at->set(y);
  }
}

constexpr int kTotalThreads = 1024;
__global__ __launch_bounds__(kTotalThreads) void total_kernel(const float* loss, int64_t n,
                                                              float reduction_scale, float* total) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __shared__ double slots[kTotalThreads / 32];
  double sum[1] = {};
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < n; i += kTotalThreads) sum[0] += loss[i];
  sum_block<kTotalThreads>(sum, slots);
  if (threadIdx.x == 0) *total = float(sum[0] * reduction_scale);
}

int64_t rows_of_chunk(const ContrastiveCosineFwd& a, int64_t stride) {
  constexpr int64_t kMostBytes = int64_t(1) << 30, kStep = kTileM * matmul::kCluster;
  const int64_t most = a.chunk_rows > 0 ? a.chunk_rows : std::max(kMostBytes / (2 * stride), kStep);
  if (a.q.rows <= (a.chunk_rows > 0 ? most : most + most / 4)) return a.q.rows;
  const int64_t chunks = ceil_div(a.q.rows, most);
  return a.chunk_rows > 0 ? most : ceil_div(ceil_div(a.q.rows, chunks), kStep) * kStep;
}

}  // namespace

void contrastive_cosine_fwd(Context& ctx, const ContrastiveCosineFwd& a) {
  TIGON_CHECK(kOp, Matmul<Leaves::sums>::is_available(kOp), "q must be on a GPU of sm_90, got another");
  const int64_t n = a.q.rows, m = a.d.rows, h = a.q.cols, stride = ceil_div(m, int64_t(64)) * 64;
  const int64_t most = rows_of_chunk(a, stride), columns = ceil_div(m, int64_t(kThreads)) * kThreads;
  static_assert(kThreads % kTileN == 0);
  const bool gradient = a.gd.data != nullptr || a.gq;
  const Matrix gq = {.data = a.gq.data, .dtype = a.gq.dtype, .rows = m, .cols = h, .stride = h};
  TIGON_CHECK(kOp, a.wide || most >= n, "chunk_rows must be at least q's ", n,
              " rows where gq is not wide, got ", most);
  const Matrix unit = {
      .data = ctx.scratch_of<T>((n + m) * h), .dtype = DType::bf16, .rows = n + m, .cols = h, .stride = h};
  const Matrix unit_d = rows_from(unit, n, m);
  const Rows rows(a);
  launch(kOp, ctx, rows.aligned() ? unit_rows_kernel<true> : unit_rows_kernel<false>, rows.grid(), rows,
         a.scale * kLog2e, unit.row<T>(0));
  Matrix g = {.dtype = DType::bf16, .rows = most, .cols = m, .stride = stride};
  if (gradient) g.data = ctx.scratch_of<T>(most * stride);
  SumsParams s = {.weight = a.weight.as<float>(),
                  .tiles = ceil_div(m, int64_t(kTileN)),
                  .n = n,
                  .m = m,
                  .cols = h,
                  .g = g.row<T>(0),
                  .unit = !a.symmetric && a.gq ? unit.row<T>(0) : nullptr,
                  .stride = stride};
  const int64_t row_parts = s.tiles * most, col_parts = a.symmetric ? ceil_div(most, int64_t(kRows)) * m : 0;
  s.col_sum = ctx.scratch_of<float>(columns + 4 * n + row_parts + col_parts);
  s.label = s.col_sum + columns, s.loss = s.label + n, s.row_sum = s.loss + n;
  s.factor = a.factor ? a.factor.as<float>() : s.row_sum + n;
  s.row_parts = s.row_sum + 2 * n, s.col_parts = a.symmetric ? s.row_parts + row_parts : nullptr;
  // Calls fn(the rows of q^, their G, true for the first) for each chunk, from first to last or `back`, with
  // `s` set for the chunk.
  const int64_t chunks = ceil_div(n, most);
  auto for_chunks = [&](bool back, auto fn) {
    for (int64_t i = 0; i < chunks; ++i) {
      s.first = (back ? chunks - 1 - i : i) * most;
      s.rows = std::min(most, n - s.first), s.blocks = ceil_div(s.rows, int64_t(kRows));
      fn(rows_from(unit, s.first, s.rows), rows_from(g, 0, s.rows), i == 0);
    }
  };
  auto scores = [&]<Leaves kLeaves>(const Matrix& rows, const Matrix& to) {
    EpilogueParams p = {.row_parts = s.row_parts,
                        .col_parts = s.col_parts,
                        .label = s.label + s.first,
                        .row_factor = s.row_sum + s.first,
                        .col_factor = s.col_sum,
                        .label_gradient = s.label + s.first,
                        .rows = int(s.rows),
                        .cols = int(m),
                        .first = int(s.first)};
    if (kLeaves != Leaves::sums)
      p.store.d = matmul::make_tensor_map(kOp, to.data, matmul::kTensorMapType<T>, m, s.rows, stride, kRows);
    Matmul<kLeaves>::run(
        kOp, ctx, {Gemm{.m = s.rows, .n = m, .k = h, .a = rows.data, .lda = h, .b = unit_d.data, .ldb = h}},
        p);
  };
  auto gradients = [&](const Matrix& rows, const Matrix& of, bool first) {
    if (a.gd.data) gemm(ctx, {.a = of, .b = unit_d, .c = rows_from(a.gd, s.first, s.rows)});
    if (a.gq) gemm(ctx, {.a = of, .b = rows, .c = gq, .trans_a = true, .beta = first ? 0.0f : 1.0f});
  };
  auto run = [&](auto kernel, int64_t blocks) {
    launch(kOp, ctx, kernel, {.blocks = blocks, .threads = kThreads, .pdl = true}, s);
  };
  auto total = [&] {
    launch(kOp, ctx, total_kernel, {.threads = kTotalThreads, .pdl = true}, static_cast<const float*>(s.loss),
           n, a.reduction_scale, a.loss.as<float>());
  };
  for_chunks(false, [&](const Matrix& rows, const Matrix& to, bool first) {
    const bool last = s.first + s.rows == n;
    if (gradient && (!a.symmetric || last))
      scores.template operator()<Leaves::exponentials>(rows, to);
    else
      scores.template operator()<Leaves::sums>(rows, to);
    if (a.symmetric) return run(sums_kernel, ceil_div(s.rows, int64_t(32)) + ceil_div(m, int64_t(32)));
    run(rows_kernel, ceil_div(s.rows, int64_t(kWarps)));
    if (last) total();
    gradients(rows, to, first);
  });
  if (a.symmetric) {
    run(both_kernel, columns / kThreads);
    total();
    // The exponentials of the last chunk are still present.
    for_chunks(true, [&](const Matrix& rows, const Matrix& to, bool first) {
      if (!gradient) return;
      if (first)
        run(gradient_kernel,
            ceil_div(m, int64_t(kThreads * kVec)) * ceil_div(s.rows, int64_t(kGradientRows)));
      else
        scores.template operator()<Leaves::gradient>(rows, to);
      gradients(rows, to, first);
    });
  }
}

void contrastive_cosine_bwd(Context& ctx, const ContrastiveCosineBwd& a) {
  const BackwardParams p = {.rows = a,
                            .gd = static_cast<const T*>(a.gd.data),
                            .gq = a.gq.data,
                            .wide = a.gq.dtype == DType::f32,
                            .factor = a.symmetric ? nullptr : a.factor.as<float>(),
                            .dloss = a.dloss.as<float>(),
                            .scale = a.scale,
                            .reduction_scale = a.reduction_scale,
                            .dq = static_cast<T*>(a.dq.data),
                            .dd = static_cast<T*>(a.dd.data)};
  launch(kOp, ctx, p.rows.aligned() ? backward_kernel<true> : backward_kernel<false>, p.rows.grid(), p);
}

}  // namespace tigon::cuda
