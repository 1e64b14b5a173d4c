// The CUDA backend of what adapters of experts need around GEMMs: matmuls with few columns, gradients of few
// ranks, and copies of adapters between memory orders.
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/values.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/experts/experts.h"
#include "tigon/ops/experts/experts_rows.cuh"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "experts";

// Lets a CTA of the kernel have that much shared memory, and as many of them reside as fit into all of it.
template <class... Params>
void take_shared(void (*kernel)(Params...), int bytes) {
  TIGON_CUDA_CHECK(kOp, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  TIGON_CUDA_CHECK(kOp, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             cudaSharedmemCarveoutMaxShared));
}

// ---------------------------------------------------------------- matmuls with few columns

// A CTA multiplies up to so many adjacent rows of one expert, in steps of so many 16-byte vectors of each.
constexpr int kNarrowRows = 128, kNarrowThreads = 128, kNarrowVecs = 8, kNarrowStages = 4, kMostNarrow = 64;

struct Narrow {
  Rows<const __nv_bfloat16> rows;
  const int32_t* order;  // null: rows as they are
  int choices;
  const __nv_bfloat16* stack;  // [experts, columns, depth]
  Offsets offsets;
  __nv_bfloat16* c;  // [rows, columns]
  int columns, depth;
};

template <int kTiles>
struct NarrowStage {
  uint4 x[kNarrowRows][kNarrowVecs], w[8 * kTiles][kNarrowVecs];
};
// Returns where vector `vec` of a row lies. Two rows and four vectors of each take all banks.
__device__ __forceinline__ int swizzled(int row, int vec) { return vec ^ row % 2 * 4; }

// The order of the columns of a step of 32 does not matter, as long as it is that of the stack: lane 4 t + q
// takes columns 8 q to 8 q + 7 of rows t, t + 8, t + 16 and t + 24 of its warp's 32.
template <int kTiles>
__global__ __launch_bounds__(kNarrowThreads) void narrow_kernel(const __grid_constant__ Narrow p) {
  constexpr int kWarpRows = kNarrowRows / (kNarrowThreads / 32), kGroups = kWarpRows / 8,
                kLoaders = kNarrowThreads / kNarrowVecs, kLoads = kNarrowRows / kLoaders;
  extern __shared__ uint4 narrow_shared[];
  auto* stages = reinterpret_cast<NarrowStage<kTiles>*>(narrow_shared);
  // Expert e has the tiles from first[e] / kNarrowRows + e on, which are enough for its rows.
  const int expert = p.offsets.expert_of_tile(int(blockIdx.x), kNarrowRows);
  const int begin = p.offsets.first[expert] +
                    (int(blockIdx.x) - p.offsets.first[expert] / kNarrowRows - expert) * kNarrowRows,
            end = min(begin + kNarrowRows, p.offsets.first[expert + 1]);
  if (begin >= end) return;
  const int vecs = p.depth / 8, steps = (vecs + kNarrowVecs - 1) / kNarrowVecs;
  const int loader = int(threadIdx.x) / kNarrowVecs, vec = int(threadIdx.x) % kNarrowVecs;
  const uint4* from[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int row = min(begin + loader + kLoaders * i, end - 1);
    from[i] = reinterpret_cast<const uint4*>(p.rows[p.order == nullptr ? row : p.order[row] / p.choices]);
  }
  const uint4* matrix = reinterpret_cast<const uint4*>(p.stack) + int64_t(expert) * p.columns * vecs;
  auto load = [&](int step) {
    const int at = kNarrowVecs * step + vec;
    if (step < steps) {
      NarrowStage<kTiles>& to = stages[step % kNarrowStages];
      const bool inside = at < vecs;
      const int column = inside ? at : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = loader + kLoaders * i;
        cp_async(&to.x[row][swizzled(row, vec)], from[i] + column, inside && begin + row < end ? 16 : 0);
      }
#pragma unroll
      for (int row = loader; row < 8 * kTiles; row += kLoaders) {
        const bool given = inside && row < p.columns;
        cp_async(&to.w[row][swizzled(row, vec)], matrix + (given ? row * vecs + column : 0), given ? 16 : 0);
      }
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int step = 0; step < kNarrowStages - 1; ++step) load(step);
  const int first = int(threadIdx.x) / 32 * kWarpRows, lane = int(threadIdx.x) % 32, t = lane / 4,
            q = lane % 4;
  float sums[kGroups / 2][kTiles][4] = {};
  for (int step = 0; step < steps; ++step) {
    cp_async_wait_group<kNarrowStages - 2>();
    __syncthreads();
    load(step + kNarrowStages - 1);
    if (begin + first >= end) continue;
    const NarrowStage<kTiles>& now = stages[step % kNarrowStages];
#pragma unroll
    for (int s = 0; s < kNarrowVecs; s += 4) {
      uint4 x[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) x[g] = now.x[first + 8 * g + t][swizzled(t, s + q)];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4 m = now.w[8 * n + t][swizzled(t, s + q)];
#pragma unroll
        for (int g = 0; g < kGroups; g += 2) {
          const uint4 &a = x[g], &b = x[g + 1];
          mma_m16n8k16(sums[g / 2][n], {a.x, b.x, a.y, b.y}, {m.x, m.y});
          mma_m16n8k16(sums[g / 2][n], {a.z, b.z, a.w, b.w}, {m.z, m.w});
        }
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
    if (const int row = begin + first + 8 * g + t; row < end)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        if (8 * n < p.columns) {
          Vec<__nv_bfloat16, 2> pair;
          pair.set({sums[g / 2][n][g % 2 * 2], sums[g / 2][n][g % 2 * 2 + 1]});
          store<__nv_bfloat16, 2>(p.c + int64_t(row) * p.columns + 8 * n + 2 * q, pair);
        }
}

// ---------------------------------------------------------------- gradients of few ranks

// A CTA has some columns of a few experts, whose rows it takes in steps. A step has rows of one expert.
constexpr int kMostGradient = 32, kGradientExperts = 4, kGradientRows = 64, kGradientColumns = 64,
              kGradientStages = 4;

struct NarrowGradient {
  Rows<const __nv_bfloat16> rows;
  const int32_t* order;  // null: rows as they are
  int choices;
  const __nv_bfloat16* t;  // [rows, width]
  int width;
  Offsets offsets;
  Values out;
  int64_t strides[3];
  int rank, cols, slices;
  float scale;
};

template <int kTiles>
struct NarrowGradientShared {
  struct {
    uint4 x[kGradientRows * kGradientColumns / 8], t[kGradientRows * 2 * kTiles];
  } stages[kGradientStages];
  float sums[16 * kTiles][kGradientColumns][kGradientExperts];
};

// Holds the first row of a step, and whose it is: `last` behind the last step.
struct GradientStep {
  const int32_t* first;
  int last, expert, row;
  __device__ __forceinline__ GradientStep(const int32_t* first, int expert, int last)
      : first(first), last(last), expert(expert), row(first[expert]) {
    settle();
  }
  __device__ __forceinline__ void settle() {
    while (expert < last && row >= first[expert + 1]) row = first[++expert];
  }
  __device__ __forceinline__ void advance() {
    row += kGradientRows;
    settle();
  }
};

// The order of the rows of a step does not matter, as long as it is that of t: lane 4 t + q takes rows 4 q to
// 4 q + 3 of 16 and columns 2 t and 2 t + 1 of its warp's 16. The vectors of rows 4 q lie where lanes of a
// warp read all banks.
template <int kTiles>
__global__ __launch_bounds__(kNarrowThreads) void narrow_gradient_kernel(
    const __grid_constant__ NarrowGradient p) {
  constexpr int kVecs = kGradientColumns / 8, kLoaders = kNarrowThreads / kVecs,
                kLoads = kGradientRows / kLoaders, kFactors = 2 * kTiles;
  static_assert(kGradientColumns == 16 * (kNarrowThreads / 32));
  extern __shared__ uint4 gradient_shared[];
  auto& shared = *reinterpret_cast<NarrowGradientShared<kTiles>*>(gradient_shared);
  auto moved = [](int row) { return row / 4 % 4 * 2; };
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32, t = lane / 4, q = lane % 4;
  const int begin = int(blockIdx.x) / p.slices * kGradientExperts,
            column = int(blockIdx.x) % p.slices * kGradientColumns;
  const int last = min(begin + kGradientExperts, p.offsets.experts);
  const int loader = thread / kVecs, vec = thread % kVecs;
  GradientStep next(p.offsets.first, begin, last), now = next;
  // The rows' places of the next step are read a step ahead.
  int places[kLoads];
  auto find = [&] {
    if (next.expert >= last) return;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = min(next.row + loader + kLoaders * i, next.first[next.expert + 1] - 1);
      places[i] = p.order == nullptr ? row : p.order[row];
    }
  };
  auto load = [&](int stage) {
    if (next.expert < last) {
      auto& to = shared.stages[stage];
      const int rows = next.first[next.expert + 1] - next.row;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = loader + kLoaders * i;
        const bool inside = row < rows && column + 8 * vec < p.cols;
        cp_async(&to.x[row * kVecs + (vec ^ moved(row))],
                 p.rows[places[i] / p.choices] + (inside ? column + 8 * vec : 0), inside ? 16 : 0);
      }
      for (int i = thread; i < kGradientRows * kFactors; i += kNarrowThreads) {
        const int row = i / kFactors, rank = i % kFactors * 8;
        const bool inside = row < rows && rank < p.width;
        cp_async(&to.t[i ^ moved(row)], p.t + (inside ? int64_t(next.row + row) * p.width + rank : 0),
                 inside ? 16 : 0);
      }
      next.advance();
      find();
    }
    cp_async_commit_group();
  };
  find();
#pragma unroll
  for (int stage = 0; stage < kGradientStages - 1; ++stage) load(stage);
  for (int i = thread; i < int(sizeof shared.sums / sizeof(float)); i += kNarrowThreads)
    (&shared.sums[0][0][0])[i] = 0.0f;
  float sums[kTiles][2][4] = {};
  for (int step = 0; now.expert < last; ++step) {
    cp_async_wait_group<kGradientStages - 2>();
    __syncthreads();
    load((step + kGradientStages - 1) % kGradientStages);
    const auto& stage = shared.stages[step % kGradientStages];
#pragma unroll
    for (int s = 0; s < kGradientRows; s += 16) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = reinterpret_cast<const uint32_t*>(
            &stage.x[(s + 4 * q + i) * kVecs + ((2 * warp + t / 4) ^ 2 * q)])[t % 4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        auto factors = [&](int h, int i) {
          auto at = [&](int row) {
            return uint32_t(reinterpret_cast<const uint16_t*>(
                &stage.t[((s + 4 * q + row) * kFactors + 2 * m + h) ^ 2 * q])[t]);
          };
          return at(i) | at(i + 1) << 16;
        };
        const uint4 a = {factors(0, 0), factors(1, 0), factors(0, 2), factors(1, 2)};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          auto pair = [&](int i) { return __byte_perm(x[i], x[i + 1], j == 0 ? 0x5410 : 0x7632); };
          mma_m16n8k16(sums[m][j], a, {pair(0), pair(2)});
        }
      }
    }
    const int expert = now.expert;
    now.advance();
    if (now.expert == expert) continue;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          shared.sums[16 * m + 8 * (c / 2) + t][16 * warp + 2 * (2 * q + c % 2) + j][expert - begin] =
              sums[m][j][c];
          sums[m][j][c] = 0.0f;
        }
  }
  __syncthreads();
  // The experts of an element are adjacent if they are so in memory, else the columns of a rank.
  const bool adjacent = p.strides[0] == 1;
  for (int i = thread; i < 16 * kTiles * kGradientColumns * kGradientExperts; i += kNarrowThreads) {
    constexpr int kElements = 16 * kTiles * kGradientColumns;
    const int e = adjacent ? i % kGradientExperts : i / kElements,
              element = adjacent ? i / kGradientExperts : i % kElements;
    const int rank = element / kGradientColumns, c = element % kGradientColumns;
    if (begin + e >= last || rank >= p.rank || column + c >= p.cols) continue;
    p.out.set((begin + e) * p.strides[0] + rank * p.strides[1] + (column + c) * p.strides[2],
              p.scale * shared.sums[rank][c][e]);
  }
}

// ---------------------------------------------------------------- copies

// A CTA copies some squares through shared memory, read along the fastest index of x and written along that
// of out, which is the last one here. The middle one is that of x if they differ (`turns`). The first one
// counts the squares.
constexpr int kSide = 32, kSquares = 4, kCopyThreads = 256;

struct Copy {
  int64_t in[3], out[3];  // strides
  int squares, rows, cols, tiles_m, tiles_n;
  bool turns;
  float scale;
};

template <class In, class Out>
__global__ __launch_bounds__(kCopyThreads) void copy_kernel(const In* x, Out* out, const Copy p) {
  __shared__ float square[kSquares][kSide][kSide + 1];
  const int col = int(blockIdx.x) % p.tiles_n * kSide, rest = int(blockIdx.x) / p.tiles_n,
            row = rest % p.tiles_m * kSide, lane = int(threadIdx.x) % kSide, first = int(threadIdx.x) / kSide;
  const int from = rest / p.tiles_m * kSquares;
  x += from * p.in[0] + row * p.in[1] + col * p.in[2];
  out += from * p.out[0] + row * p.out[1] + col * p.out[2];
  // All loads are under way before the first store.
  constexpr int kStep = kCopyThreads / kSide, kLoads = kSide / kStep;
  In loaded[kSquares][kLoads] = {};
#pragma unroll
  for (int s = 0; s < kSquares; ++s)
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (const int other = first + kStep * i, r = p.turns ? lane : other, c = p.turns ? other : lane;
          from + s < p.squares && row + r < p.rows && col + c < p.cols)
        loaded[s][i] = x[s * p.in[0] + r * p.in[1] + c * p.in[2]];
#pragma unroll
  for (int s = 0; s < kSquares; ++s)
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (const int other = first + kStep * i; p.turns)
        square[s][lane][other] = widen(loaded[s][i]);
      else
        square[s][other][lane] = widen(loaded[s][i]);
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kSquares; ++s)
#pragma unroll
    for (int i = first; i < kSide; i += kStep)
      if (from + s < p.squares && row + i < p.rows && col + lane < p.cols)
        out[s * p.out[0] + i * p.out[1] + lane * p.out[2]] = narrow<Out>(p.scale * square[s][i][lane]);
}

}  // namespace

void experts_copy(Context& ctx, const ExpertsCopy& a) {
  // The indices, the last one the fastest of out and the one before it that of x, or any other.
  int order[3] = {0, 1, 2};
  auto fastest = [&](const Strided& t, int count) {
    return int(std::min_element(order, order + count,
                                [&](int i, int j) {
                                  auto step = [&](int d) {
                                    return t.sizes[d] > 1 ? t.strides[d] : INT64_MAX;
                                  };
                                  return step(i) < step(j);
                                }) -
               order);
  };
  const int of_x = order[fastest(a.x, 3)];
  std::swap(order[fastest(a.out, 3)], order[2]);
  std::swap(order[fastest(a.x, 2)], order[1]);
  Copy p{.squares = int(a.x.sizes[order[0]]),
         .rows = int(a.x.sizes[order[1]]),
         .cols = int(a.x.sizes[order[2]])};
  for (int i = 0; i < 3; ++i) p.in[i] = a.x.strides[order[i]], p.out[i] = a.out.strides[order[i]];
  // Two indices that count adjacent elements of both are one, whose pieces of a square's width are squares.
  if (p.in[0] == p.in[2] * p.cols && p.out[0] == p.out[2] * p.cols && p.squares * p.cols % kSide == 0) {
    p.squares = p.squares * p.cols / kSide, p.cols = kSide;
    p.in[0] = kSide * p.in[2], p.out[0] = kSide * p.out[2];
  }
  p.tiles_m = int(ceil_div(p.rows, kSide)), p.tiles_n = int(ceil_div(p.cols, kSide));
  p.turns = of_x == order[1], p.scale = a.scale;
  dispatch_float(kOp, "x", a.x.dtype, [&](auto in) {
    dispatch_float(kOp, "out", a.out.dtype, [&](auto to) {
      using In = typename DeviceType<typename decltype(in)::type>::type;
      using Out = typename DeviceType<typename decltype(to)::type>::type;
      launch(kOp, ctx, copy_kernel<In, Out>,
             {.blocks = ceil_div(p.squares, kSquares) * p.tiles_m * p.tiles_n, .threads = kCopyThreads},
             static_cast<const In*>(a.x.data), static_cast<Out*>(a.out.data), p);
    });
  });
}

bool experts_narrow_matmul(Context& ctx, const ExpertsMatmul& a) {
  using T = __nv_bfloat16;
  const int64_t depth = a.rows.cols, columns = a.c.cols;
  if (a.rows.dtype != DType::bf16 || a.transposed || a.t.data != nullptr || columns > kMostNarrow ||
      columns % 8 != 0 || !vectorized(a.rows) || !vectorized(a.stack) || a.stack.stride != depth)
    return false;
  if (a.c.rows == 0) return true;
  auto run = [&]<int kTiles>() {
    static OncePerDevice prepared;
    constexpr int kShared = kNarrowStages * sizeof(NarrowStage<kTiles>);
    prepared.run(kOp, [&] { take_shared(narrow_kernel<kTiles>, kShared); });
    launch(kOp, ctx, narrow_kernel<kTiles>,
           {.blocks = a.c.rows / kNarrowRows + a.experts, .threads = kNarrowThreads, .shared = kShared},
           Narrow{.rows = rows_of<const T>(a.rows),
                  .order = a.order.as<int32_t>(),
                  .choices = int(a.c.rows / a.rows.rows),
                  .stack = a.stack.row<const T>(0),
                  .offsets = offsets_of(a.offsets),
                  .c = a.c.row<T>(0),
                  .columns = int(columns),
                  .depth = int(depth)});
  };
  columns <= 8    ? run.template operator()<1>()
  : columns <= 16 ? run.template operator()<2>()
  : columns <= 32 ? run.template operator()<4>()
                  : run.template operator()<8>();
  return true;
}

bool experts_narrow_gradient(Context& ctx, const ExpertsAdapterGradient& a) {
  using T = __nv_bfloat16;
  if (a.t.dtype != DType::bf16 || a.t.cols > kMostGradient || a.t.stride != a.t.cols || !vectorized(a.t) ||
      !vectorized(a.rows))
    return false;
  auto run = [&]<int kTiles>() {
    const int64_t slices = ceil_div(a.rows.cols, int64_t(kGradientColumns)), experts = a.offsets.size - 1;
    static OncePerDevice prepared;
    constexpr int kShared = sizeof(NarrowGradientShared<kTiles>);
    prepared.run(kOp, [&] { take_shared(narrow_gradient_kernel<kTiles>, kShared); });
    launch(kOp, ctx, narrow_gradient_kernel<kTiles>,
           {.blocks = ceil_div(experts, int64_t(kGradientExperts)) * slices,
            .threads = kNarrowThreads,
            .shared = kShared},
           NarrowGradient{.rows = rows_of<const T>(a.rows),
                          .order = a.order.as<int32_t>(),
                          .choices = int(a.rows.rows > 0 ? a.t.rows / a.rows.rows : 1),
                          .t = a.t.row<const T>(0),
                          .width = int(a.t.cols),
                          .offsets = offsets_of(a.offsets),
                          .out = {a.out.data, a.out.dtype},
                          .strides = {a.out.strides[0], a.out.strides[1], a.out.strides[2]},
                          .rank = int(a.out.sizes[1]),
                          .cols = int(a.rows.cols),
                          .slices = int(slices),
                          .scale = a.scale});
  };
  a.t.cols <= 16 ? run.template operator()<1>() : run.template operator()<2>();
  return true;
}

}  // namespace tigon::cuda
