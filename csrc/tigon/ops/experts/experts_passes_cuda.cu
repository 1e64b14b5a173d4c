// The CUDA backend of ExpertsPass. A CTA has adjacent tiles of rows, of whole width, and a tile has rows of
// one expert. Tensor cores take a fragment of rows twice: as it is for u, and transposed for the gradient,
// whose sums over a CTA's rows of an expert stay in registers. Another kernel adds them in the order of CTAs.
#include <array>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/matmul/ptx.cuh"
#include "tigon/base/cuda/values.cuh"
#include "tigon/ops/experts/experts.h"
#include "tigon/ops/experts/experts_rows.cuh"

namespace tigon::cuda {
namespace {

#include "tigon/ops/experts/experts_math.inc"

constexpr const char* kOp = "experts";

using T = __nv_bfloat16;

// Each CTA has a part of the rows. There are as many parts as an H200 has SMs, on every GPU, since the order
// of the sums follows from their number.
constexpr int kPassWarps = 16, kPassThreads = 32 * kPassWarps, kPassRows = 16, kPassParts = 132,
              kPassRanks = ExpertsPass::kMostRanks;

// Describes a pass to its kernel. With kGate it is ExpertsGatePass, otherwise ExpertsAdapterPass. `first` is
// its stack, and `width` the rank of the adapter.
struct Pass {
  Rows<const T> rows;    // are read; the gate's are the gradient of act
  const int32_t* order;  // if null, rows are taken as they are
  int choices;
  // Receives the rows in order, if it has data. With kGate it holds gate and up, which their gradient
  // replaces.
  Rows<T> copy;
  const T* first;      // [experts, width, columns]
  const T *t, *act_t;  // [rows, width]
  int width, cols;
  Values weights, dweights;
  const int32_t* slots;  // are the places of the rows' weights; null if these are in order
  Offsets offsets;
  T* u;  // [rows, width]
  // [parts + experts][kPassRanks][columns]. What part p adds up for expert e is at p + e. Parts and experts
  // both ascend, so no two share a place.
  float* sums;
  int count;  // rows, local or not
};

// Walks over the tiles [from, to) that have rows. They are counted as in Offsets::expert_of_tile.
struct PassTile {
  const int32_t* first;
  int tile, last, expert, begin, end;  // the expert's rows
  __device__ __forceinline__ PassTile(const Offsets& offsets, int from, int to)
      : first(offsets.first), tile(from), last(to) {
    if (from >= to) return;
    expert = offsets.expert_of_tile(from, kPassRows);
    begin = first[expert], end = first[expert + 1];
    settle();
  }
  __device__ __forceinline__ bool valid() const { return tile < last; }
  __device__ __forceinline__ int row() const {
    return begin + (tile - begin / kPassRows - expert) * kPassRows;
  }
  __device__ __forceinline__ int rows() const { return min(kPassRows, end - row()); }
  // Skips tiles without rows.
  __device__ __forceinline__ void settle() {
    while (tile < last) {
      if (tile >= end / kPassRows + expert + 1) {
        begin = end, end = first[++expert + 1];
        continue;
      }
      if (row() < end) return;
      ++tile;
    }
  }
  __device__ __forceinline__ void advance() {
    ++tile;
    settle();
  }
};

// Returns the first tile of a part, part * tiles / kPassParts, without a product that overflows.
__device__ __forceinline__ int part_begin(int part, int tiles) {
  return part * (tiles / kPassParts) + part * (tiles % kPassParts) / kPassParts;
}
__device__ __forceinline__ int tiles_of(const Offsets& offsets) {
  return offsets.here() / kPassRows + offsets.experts;
}

// Describes shared memory: two stages of tiles, a lane's own fragments of `first`, and what warps add up.
template <bool kGate, int kSteps>
struct PassShared {
  static constexpr int kBlocks =
      kGate ? 2 * kSteps : kSteps;  // of 16 columns, of a warp, that are multiplied
  uint4 fragments[kPassWarps][kBlocks][32];
  float parts[kPassWarps][kPassRows][kPassRanks];
  float dots[kGate ? kPassWarps : 1][kPassRows];
  T t[2][2][kPassRanks][kPassRows];
  float weights[2][kPassRows];
  uint64_t full[2];
  // The two stages follow. Each holds kPassRows rows of `cols` elements, and with kGate as many of 2 cols.
  // Every row has 16 bytes of padding, so that fragments are read without bank conflicts.
};
constexpr int pass_stage_bytes(bool gate, int cols) {
  return kPassRows * (2 * cols + 16 + (gate ? 4 * cols + 16 : 0));
}
template <bool kGate, int kSteps>
constexpr int pass_shared_bytes(int cols) {
  return (int(sizeof(PassShared<kGate, kSteps>)) + 15) / 16 * 16 + 2 * pass_stage_bytes(kGate, cols);
}

__device__ __forceinline__ uint32_t pass_pair(float x, float y) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(both);
}
__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

template <bool kGate, int kSteps>
__global__ __launch_bounds__(kPassThreads, 1) void pass_kernel(const __grid_constant__ Pass p) {
  using Shared = PassShared<kGate, kSteps>;
  constexpr int kBlocks = Shared::kBlocks, kSums = kGate ? 3 * kSteps : kSteps;
  extern __shared__ __align__(128) uint4 pass_shared[];
  auto& shared = *reinterpret_cast<Shared*>(pass_shared);
  char* const stages = reinterpret_cast<char*>(pass_shared) + (sizeof(Shared) + 15) / 16 * 16;
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32, t = lane / 4, q = lane % 4;
  const int pitch = 2 * p.cols + 16, wide_pitch = 4 * p.cols + 16,
            stage_bytes = pass_stage_bytes(kGate, p.cols);
  const int tiles = tiles_of(p.offsets);
  PassTile now(p.offsets, part_begin(int(blockIdx.x), tiles), part_begin(int(blockIdx.x) + 1, tiles));
  PassTile next = now;
  if (thread == 0) {
    mbarrier_init(&shared.full[0]), mbarrier_init(&shared.full[1]);
    fence_proxy_async();
  }
  __syncthreads();

  // One warp loads tiles and stores them. Its lanes know the places of the next tile's rows.
  int place = 0;
  const int r = lane % kPassRows;
  auto find = [&] {
    if (!next.valid()) return;
    const int row = min(next.row() + r, next.end - 1);
    place = p.order == nullptr ? row : p.order[row] / p.choices;
  };
  auto load = [&](int stage) {
    if (!next.valid()) return;
    const int rows = next.rows(), row = next.row();
    uint64_t* full = &shared.full[stage];
    if (lane == 0) mbarrier_arrive_expect_tx(full, rows * p.cols * (kGate ? 6 : 2));
    __syncwarp();
    const uint32_t to = cast_smem_ptr_to_uint(stages + stage * stage_bytes);
    if (r < rows) {
      if (lane < kPassRows)
        cp_async_bulk(to + r * pitch, p.rows[place], 2 * p.cols, full);
      else if (kGate)
        cp_async_bulk(to + kPassRows * pitch + r * wide_pitch, p.copy[row + r], 4 * p.cols, full);
    }
    next.advance();
    find();
  };
  if (warp == 0) {
    find();
    load(0), load(1);
  }

  // Other values of rows come through registers, a tile ahead.
  const int own_row = thread % 256 / kPassRanks, own_rank = thread % kPassRanks;
  const bool has_t = kGate || thread < 256;
  PassTile ahead = now;
  float own_t = 0.0f, own_weight = 0.0f;
  auto read = [&] {
    own_t = 0.0f, own_weight = 0.0f;
    if (!ahead.valid()) return;
    const int row = ahead.row() + own_row;
    if (has_t && row < ahead.end && own_rank < p.width) {
      own_t = widen((thread < 256 ? p.t : p.act_t)[int64_t(row) * p.width + own_rank]);
      if (!kGate || (thread < 256 && own_rank == 0))
        own_weight = p.weights[p.slots == nullptr ? row : p.slots[row]];
    }
    ahead.advance();
  };
  auto keep = [&](int stage) {
    if (has_t)
      shared.t[stage][thread / 256][own_rank][own_row] = narrow<T>(kGate ? own_t : own_t * own_weight);
    if (kGate && thread < 256 && own_rank == 0) shared.weights[stage][own_row] = own_weight;
  };
  read();
  keep(0);
  read();
  __syncthreads();

  const int column = warp * 16 * kSteps;
  float sums[kSums][2][4] = {};
  auto column_of = [&](int block) {  // of `first` and of sums
    return kGate ? block / kSteps * p.cols + column + block % kSteps * 16 : column + 16 * block;
  };
  const int width_of_sums = kGate ? 3 * p.cols : p.cols, width_of_first = kGate ? 2 * p.cols : p.cols;
  int expert = -1;
  for (int i = 0; now.valid(); ++i) {
    const int stage = i % 2;
    // These wait for memory while the tile is on its way.
    keep(1 - stage);
    read();
    if (now.expert != expert) {
      expert = now.expert;
      const T* first = p.first + int64_t(expert) * p.width * width_of_first;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        uint4 f = {};
        if (column + b % kSteps * 16 < p.cols) {
          auto at = [&](int rank, int c) {
            return *reinterpret_cast<const uint32_t*>(first + int64_t(rank) * width_of_first + column_of(b) +
                                                      c + 2 * q);
          };
          f.x = at(t, 0), f.y = at(t, 8);
          if (p.width > 8) f.z = at(8 + t, 0), f.w = at(8 + t, 8);
        }
        shared.fragments[warp][b][lane] = f;
      }
    }
    const int row = now.row(), rows = now.rows();
    mbarrier_wait_parity<false>(&shared.full[stage], i / 2 % 2);
    char* const tile = stages + stage * stage_bytes;
    const uint32_t low = t < rows ? ~0u : 0u, high = t + 8 < rows ? ~0u : 0u;
    auto factors = [&](int which) {
      auto at = [&](int rank, int r) {
        return *reinterpret_cast<const uint32_t*>(&shared.t[stage][which][rank][r + 2 * q]);
      };
      return uint4{at(t, 0), at(t + 8, 0), at(t, 8), at(t + 8, 8)};
    };
    auto fragment = [&](int base, int row_bytes, int c) -> uint4 {
      auto at = [&](int r, int k) {
        return *reinterpret_cast<const uint32_t*>(tile + base + (t + r) * row_bytes + 2 * (c + k + 2 * q));
      };
      return {at(0, 0), at(8, 0), at(0, 8), at(8, 8)};
    };
    float u[2][4] = {};
    auto multiply = [&](const uint4& m, int block) {
      const uint4 f = shared.fragments[warp][block][lane];
      mma_m16n8k16(u[0], m, {f.x, f.y});
      mma_m16n8k16(u[1], m, {f.z, f.w});
    };
    auto add = [&](const uint4& m, const uint4& a, float (&sum)[2][4]) {
      mma_m16n8k16(sum[0], a, {movmatrix_trans(m.x & low), movmatrix_trans(m.y & high)});
      mma_m16n8k16(sum[1], a, {movmatrix_trans(m.z & low), movmatrix_trans(m.w & high)});
    };
    const uint4 a = factors(0);
    if constexpr (!kGate) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (column + 16 * s >= p.cols) break;
        const uint4 m = fragment(0, pitch, column + 16 * s);
        multiply(m, s);
        add(m, a, sums[s]);
      }
    } else {
      const uint4 act_a = factors(1);
      const float weights[2] = {shared.weights[stage][t], shared.weights[stage][t + 8]};
      float dots[2] = {};
      const int wide = kPassRows * pitch;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int c = column + 16 * s;
        if (c >= p.cols) break;
        const uint4 d = fragment(0, pitch, c), z = fragment(wide, wide_pitch, c),
                    v = fragment(wide, wide_pitch, p.cols + c);
        uint4 act, gate, up;
        auto points = [&](int h, uint32_t d, uint32_t z, uint32_t v, uint32_t& act, uint32_t& gate,
                          uint32_t& up) {
          float of[3][2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            Approx x = 0.0f, dg = x, du = x, dw = x;
            experts_point<GluKind::swiglu, Approx>(j ? high_of(d) : low_of(d), weights[h],
                                                   j ? high_of(z) : low_of(z), j ? high_of(v) : low_of(v), {},
                                                   x, dg, du, dw);
            of[0][j] = x, of[1][j] = dg, of[2][j] = du, dots[h] += dw;
          }
          act = pass_pair(of[0][0], of[0][1]), gate = pass_pair(of[1][0], of[1][1]);
          up = pass_pair(of[2][0], of[2][1]);
        };
        points(0, d.x, z.x, v.x, act.x, gate.x, up.x);
        points(1, d.y, z.y, v.y, act.y, gate.y, up.y);
        points(0, d.z, z.z, v.z, act.z, gate.z, up.z);
        points(1, d.w, z.w, v.w, act.w, gate.w, up.w);
        auto put = [&](const uint4& m, int c) {
          auto at = [&](int r, int k) -> uint32_t& {
            return *reinterpret_cast<uint32_t*>(tile + wide + (t + r) * wide_pitch + 2 * (c + k + 2 * q));
          };
          at(0, 0) = m.x, at(8, 0) = m.y, at(0, 8) = m.z, at(8, 8) = m.w;
        };
        put(gate, c), put(up, p.cols + c);
        multiply(gate, s), multiply(up, kSteps + s);
        add(gate, a, sums[s]), add(up, a, sums[kSteps + s]), add(act, act_a, sums[2 * kSteps + s]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        dots[h] += __shfl_xor_sync(~0u, dots[h], 1);
        dots[h] += __shfl_xor_sync(~0u, dots[h], 2);
      }
      __syncthreads();
      if (q == 0) shared.dots[warp][t] = dots[0], shared.dots[warp][t + 8] = dots[1];
      fence_proxy_async();
    }
    if constexpr (!kGate) __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(&shared.parts[warp][t + 8 * h][8 * n + 2 * q]) =
            float2{u[n][2 * h], u[n][2 * h + 1]};
    __syncthreads();
    if (warp == 0) {
      if (p.copy.data != nullptr) {
        if (r < rows && (lane < kPassRows) != kGate)
          matmul::cp_async_bulk_store(
              p.copy[row + r],
              cast_smem_ptr_to_uint(tile + (kGate ? kPassRows * pitch + r * wide_pitch : r * pitch)),
              kGate ? 4 * p.cols : 2 * p.cols);
        matmul::cp_async_bulk_commit_group();
        matmul::cp_async_bulk_wait_group_read<0>();
        __syncwarp();
      }
      load(stage);
    }
    if (thread >= 256) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kPassWarps; ++w) sum += shared.parts[w][own_row][own_rank];
      if (own_row < rows && own_rank < p.width)
        p.u[int64_t(row + own_row) * p.width + own_rank] = narrow<T>(sum);
    } else if (kGate && warp == 7 && lane < rows && p.dweights.data != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kPassWarps; ++w) sum += shared.dots[w][lane];
      p.dweights.set(p.slots == nullptr ? row + lane : p.slots[row + lane], sum);
    }
    now.advance();
    if (now.valid() && now.expert == expert) continue;
    float* to = p.sums + int64_t(int(blockIdx.x) + expert) * kPassRanks * width_of_sums;
#pragma unroll
    for (int b = 0; b < kSums; ++b)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (column + b % kSteps * 16 < p.cols && t + 8 * h < p.width)
            *reinterpret_cast<float2*>(to + int64_t(t + 8 * h) * width_of_sums + column_of(b) + 8 * n +
                                       2 * q) = float2{sums[b][n][2 * h], sums[b][n][2 * h + 1]};
          sums[b][n][2 * h] = 0.0f, sums[b][n][2 * h + 1] = 0.0f;
        }
  }
  if (kGate && p.dweights.data != nullptr)
    for (int row = p.offsets.here() + int(blockIdx.x) * kPassThreads + thread; row < p.count;
         row += kPassParts * kPassThreads)
      p.dweights.set(p.slots == nullptr ? row : p.slots[row], 0.0f);
}

// ---------------------------------------------------------------- sums

// A CTA has some columns of a few experts, a warp one of them.
constexpr int kPassSumExperts = 8, kPassSumCols = 32, kPassSumThreads = 32 * kPassSumExperts;

// Describes a gradient, whose columns are [from, from + cols) of the sums.
struct PassSum {
  Values out;
  int64_t strides[3];
  float scale;
  int rank, from, cols, slices;
};
struct PassSums {
  const float* sums;
  Offsets offsets;
  int columns;  // of a row of sums
  PassSum of[2];
};

__global__ __launch_bounds__(kPassSumThreads) void pass_sums_kernel(const __grid_constant__ PassSums p) {
  __shared__ float sums[kPassRanks][kPassSumCols][kPassSumExperts + 1];
  const int slices = p.of[0].slices + p.of[1].slices, slice = int(blockIdx.x) % slices;
  const bool second = slice >= p.of[0].slices;
  const PassSum& to = p.of[second];
  const int begin = int(blockIdx.x) / slices * kPassSumExperts,
            column = (second ? slice - p.of[0].slices : slice) * kPassSumCols;
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32, expert = begin + warp;
  float sum[kPassRanks] = {};
  if (expert < p.offsets.experts && column + lane < to.cols) {
    const int tiles = tiles_of(p.offsets), row = p.offsets.first[expert],
              rows = p.offsets.first[expert + 1] - row, tile = row / kPassRows + expert;
    auto part_of = [&](int tile) { return int(((int64_t(tile) + 1) * kPassParts - 1) / tiles); };
    const int last = rows > 0 ? part_of(tile + (rows - 1) / kPassRows) : -1;
    for (int part = rows > 0 ? part_of(tile) : 0; part <= last; ++part) {
      // A part may have less than a tile.
      if (part_begin(part, tiles) == part_begin(part + 1, tiles)) continue;
      const float* from = p.sums + int64_t(part + expert) * kPassRanks * p.columns + to.from + column + lane;
#pragma unroll
      for (int i = 0; i < kPassRanks; ++i)
        if (i < to.rank) sum[i] += from[int64_t(i) * p.columns];
    }
  }
#pragma unroll
  for (int i = 0; i < kPassRanks; ++i) sums[i][lane][warp] = sum[i];
  __syncthreads();
  // Adjacent threads write adjacent memory: the experts of an element, or else the columns of a rank.
  const bool adjacent = to.strides[0] == 1;
  for (int i = thread; i < kPassRanks * kPassSumCols * kPassSumExperts; i += kPassSumThreads) {
    constexpr int kElements = kPassRanks * kPassSumCols;
    const int e = adjacent ? i % kPassSumExperts : i / kElements,
              element = adjacent ? i / kPassSumExperts : i % kElements;
    const int rank = element / kPassSumCols, c = element % kPassSumCols;
    if (begin + e >= p.offsets.experts || rank >= to.rank || column + c >= to.cols) continue;
    to.out.set((begin + e) * to.strides[0] + rank * to.strides[1] + (column + c) * to.strides[2],
               to.scale * sums[rank][c][e]);
  }
}

PassSum sum_of(const Strided& out, int from, float scale) {
  const int cols = int(out.sizes[2]);
  return {.out = {out.data, out.dtype},
          .strides = {out.strides[0], out.strides[1], out.strides[2]},
          .scale = scale,
          .rank = int(out.sizes[1]),
          .from = from,
          .cols = cols,
          .slices = int(ceil_div(cols, kPassSumCols))};
}
void add_parts(Context& ctx, const Pass& pass, int columns, const std::array<PassSum, 2>& of) {
  launch(kOp, ctx, pass_sums_kernel,
         {.blocks = ceil_div(pass.offsets.experts, kPassSumExperts) * (of[0].slices + of[1].slices),
          .threads = kPassSumThreads},
         PassSums{.sums = pass.sums, .offsets = pass.offsets, .columns = columns, .of = {of[0], of[1]}});
}

template <bool kGate, int kSteps>
void run_pass(Context& ctx, const Pass& p) {
  TIGON_CHECK(kOp,
              is_vectorizable(p.rows.data, p.rows.stride, p.cols, sizeof(T)) &&
                  is_vectorizable(p.copy.data, p.copy.stride, p.cols, sizeof(T)),
              "rows of a pass must be whole 16-byte vectors");
  static OncePerDevice prepared;
  constexpr int kMost = pass_shared_bytes<kGate, kSteps>(kPassWarps * 16 * kSteps);
  static_assert(kMost <= 232448);
  auto kernel = pass_kernel<kGate, kSteps>;
  prepared.run(kOp, [&] {
    TIGON_CUDA_CHECK(kOp, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost));
  });
  launch(kOp, ctx, kernel,
         {.blocks = kPassParts,
          .threads = kPassThreads,
          .shared = size_t(pass_shared_bytes<kGate, kSteps>(p.cols))},
         p);
}

}  // namespace

void experts_adapter_pass(Context& ctx, const ExpertsAdapterPass& a) {
  const int cols = int(a.rows.cols);
  const Pass p = {.rows = rows_of<const T>(a.rows),
                  .order = a.order.as<int32_t>(),
                  .choices = int(a.rows.rows > 0 ? a.t.rows / a.rows.rows : 1),
                  .copy = rows_of<T>(a.copy),
                  .first = a.stack.row<const T>(0),
                  .t = a.t.row<const T>(0),
                  .act_t = nullptr,
                  .width = int(a.t.cols),
                  .cols = cols,
                  .weights = {a.weights.data, a.weights.dtype},
                  .dweights = {},
                  .slots = a.order.as<int32_t>(),
                  .offsets = offsets_of(a.offsets),
                  .u = a.u.row<T>(0),
                  .sums = ctx.scratch_of<float>((kPassParts + a.experts) * kPassRanks * cols),
                  .count = int(a.t.rows)};
  static_assert(ExpertsPass::kMostColumns == 8 * 16 * kPassWarps);
  cols <= 1024   ? run_pass<false, 4>(ctx, p)
  : cols <= 1536 ? run_pass<false, 6>(ctx, p)
                 : run_pass<false, 8>(ctx, p);
  add_parts(ctx, p, cols, {sum_of(a.out, 0, a.scale)});
}

void experts_gate_pass(Context& ctx, const ExpertsGatePass& a) {
  const int cols = int(a.dact.cols);
  const Pass p = {.rows = rows_of<const T>(a.dact),
                  .order = nullptr,
                  .choices = 1,
                  .copy = rows_of<T>(a.gate_up),
                  .first = a.stack.row<const T>(0),
                  .t = a.t.row<const T>(0),
                  .act_t = a.act_t.row<const T>(0),
                  .width = int(a.t.cols),
                  .cols = cols,
                  .weights = {a.weights.data, a.weights.dtype},
                  .dweights = {a.dweights.data, a.dweights.dtype},
                  .slots = a.order.as<int32_t>(),
                  .offsets = offsets_of(a.offsets),
                  .u = a.u.row<T>(0),
                  .sums = ctx.scratch_of<float>((kPassParts + a.experts) * kPassRanks * 3 * cols),
                  .count = int(a.t.rows)};
  static_assert(ExpertsPass::kMostUnits == 3 * 16 * kPassWarps);
  run_pass<true, 3>(ctx, p);
  add_parts(ctx, p, 3 * cols, {sum_of(a.out, 0, a.scale), sum_of(a.act_out, 2 * cols, 1.0f)});
}

}  // namespace tigon::cuda
