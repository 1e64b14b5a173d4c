// The CUDA backend of the casts moves b + 1 bytes per element in fp8_quantize (b = element size), and 2 in
// fp8_transpose, or 3 with factors. It has three kinds of kernels:
// quantize   A CTA has a row in registers: it computes its maximum, then its bytes.
// largest    computes the maxima of columns over the rows of a CTA, 16 columns per thread, combined by
//            atomicMax, whose result does not depend on the order.
// transpose  takes tiles of 128 rows and 128 columns: a thread has 16 columns of four rows, a word for each
//            column, and the CTA transposes the words in shared memory.
#include "tigon/base/aligned_rows.h"
#include "tigon/base/cuda/e4m3.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/fp8_linear/fp8_quantize.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/fp8_linear/fp8_linear_math.inc"

constexpr const char* kOp = "fp8_quantize";
constexpr int kLongThreads = 512;

template <class T>
struct Rows {
  const T* x;
  int64_t stride;
  int cols;
  ByteRows bytes;
  // Values are unpacked again with it; the compiler would otherwise keep them in registers.
  uint32_t opaque_zero;
};

// Takes 16 bytes of T at a time: V columns. The thread has the vectors thread, thread + kThreads, ... of a
// row.
template <class T, int kThreads, int kVecs>
__global__ __launch_bounds__(kThreads, (kVecs < 8 ? 1024 : 512) / kThreads) void rows_kernel(Rows<T> p) {
  constexpr int V = 16 / sizeof(T);
  __shared__ uint32_t slots[32];
  const int64_t r = blockIdx.x;
  const T* x = p.x + r * p.stride;
  auto column = [](int i) { return (i * kThreads + int(threadIdx.x)) * V; };
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Vec<T, V> w[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) w[i] = load_predicated<T, V>(column(i) < p.cols, x + column(i));
  // Powers of two keep the digits of a bfloat16, and its exponents are those of fp32.
  Vec<std::conditional_t<std::is_same_v<T, __half>, float, T>, V> values[kVecs];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const Vec<float, V> f = load_predicated<float, V>(p.bytes.factors != nullptr && column(i) < p.cols,
                                                      p.bytes.factors + column(i));
    float v[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      v[j] = p.bytes.factors != nullptr ? fp8_value(w[i][j], f.v[j]) : w[i][j];
      raise_e4m3(largest, v[j]);
    }
    values[i].set(v);
  }
  const float inverse = finish_e4m3(p.bytes, r, largest, slots);
  uint8_t* q = p.bytes.q + r * p.bytes.stride;
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
    if (column(i) < p.cols) store_e4m3(q + column(i), hide_from_compiler(values[i], p.opaque_zero), inverse);
}

// Takes rows of any length and alignment, one element at a time.
template <class T>
__global__ __launch_bounds__(kLongThreads) void any_rows_kernel(Rows<T> p) {
  __shared__ uint32_t slots[32];
  const int64_t r = blockIdx.x;
  const T* x = p.x + r * p.stride;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  auto value = [&](int c) {
    return fp8_value(widen(x[c]), p.bytes.factors != nullptr ? p.bytes.factors[c] : 1.0f);
  };
  uint32_t largest = 0;
  for (int c = int(threadIdx.x); c < p.cols; c += kLongThreads) raise_e4m3(largest, value(c));
  const float inverse = finish_e4m3(p.bytes, r, largest, slots);
  for (int c = int(threadIdx.x); c < p.cols; c += kLongThreads)
    p.bytes.q[r * p.bytes.stride + c] = uint8_t(e4m3_bytes(fp8_scaled(value(c), inverse), 0.0f));
}

// Widens the bytes of a word; the scale remains in them.
__device__ __forceinline__ void widen_word(uint32_t word, float (&x)[4]) {
#if __CUDA_ARCH__ >= 890
  cvt_rn_f16x2_e4m3x2(word & 0xffffu, x[0], x[1]), cvt_rn_f16x2_e4m3x2(word >> 16, x[2], x[3]);
#else
  for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(e4m3_widen(word >> (8 * i) & 0xffu));
#endif
}

constexpr int kTileRows = 128, kTileCols = 128, kTileThreads = 256, kTileWords = kTileRows / 4, kByteVec = 16;

struct Bytes {
  const uint8_t* q;
  int64_t stride, rows, cols;
  // If null, the bytes are copied as they are.
  const float *row_factors, *row_scales;
  const float* column_divisors;
  uint32_t* largest;  // by column
  float* column_scales;
  uint8_t* to;
  int64_t to_stride, to_cols;
  bool to_vectors;  // rows begin at 16-byte boundaries
};
// Casts 16 elements of a row whose scale is known.
__device__ __forceinline__ void load_cast(const Bytes& p, int64_t r, int64_t c, uint32_t (&w)[4]) {
  const bool has = r < p.rows && c < p.cols;
  const auto* x = reinterpret_cast<const __nv_bfloat16*>(p.q) + r * p.stride + c;
  const float inverse = has ? __uint_as_float(e4m3_inverse(__float_as_uint(p.row_scales[r]))) : 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto v = load_predicated<__nv_bfloat16, 8>(has, x + 8 * i);
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      auto at = [&](int k) { return fp8_scaled(v[j + k], inverse); };
      w[2 * i + j / 4] = e4m3_bytes(at(0), at(1), at(2), at(3));
    }
  }
}
template <bool kVectors>
__device__ __forceinline__ uint4 load_bytes(const Bytes& p, int64_t r, int64_t c) {
  const uint8_t* q = p.q + r * p.stride + c;
  if constexpr (kVectors) return ld_global_predicated(r < p.rows && c < p.cols, q);
  uint32_t w[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      if (r < p.rows && c + 4 * i + j < p.cols) w[i] |= uint32_t(q[4 * i + j]) << (8 * j);
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// A warp has 512 columns of some rows.
constexpr int kLargestRows = 64, kLargestCols = 32 * kByteVec;
template <bool kVectors>
__global__ __launch_bounds__(kTileThreads) void largest_kernel(Bytes p) {
  constexpr int kWarps = kTileThreads / 32, kRows = kLargestRows / kWarps;
  __shared__ alignas(16) uint32_t all[kWarps][kLargestCols];
  const int64_t tiles = (p.cols + kLargestCols - 1) / kLargestCols;
  const int64_t first_row = blockIdx.x / tiles * kLargestRows, first_col = blockIdx.x % tiles * kLargestCols;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  uint32_t largest[kByteVec] = {};
  uint4 w[kRows];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
#pragma unroll
  for (int k = 0; k < kRows; ++k)
    w[k] = load_bytes<kVectors>(p, first_row + k * kWarps + warp, first_col + lane * kByteVec);
  auto for_each = [&](auto&& fn) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t r = first_row + k * kWarps + warp;
      if (r >= p.rows) break;
      const float factor = p.row_factors[r] * p.row_scales[r];
      const uint32_t words[4] = {w[k].x, w[k].y, w[k].z, w[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[4];
        widen_word(words[i], x);
#pragma unroll
        for (int j = 0; j < 4; ++j) fn(largest[4 * i + j], fp8_value(x[j], factor));
      }
    }
  };
  // A maximum of floats leaves NaN out, in one instruction. Products that overflow are looked for again.
  for_each([](uint32_t& most, float x) { most = __float_as_uint(fmaxf(__uint_as_float(most), fabsf(x))); });
  bool overflow = false;
#pragma unroll
  for (int j = 0; j < kByteVec; ++j) overflow = overflow || largest[j] >= 0x7f800000u;
  if (overflow) {
#pragma unroll
    for (int j = 0; j < kByteVec; ++j) largest[j] = 0;
    for_each([](uint32_t& most, float x) { raise_e4m3(most, x); });
  }
  auto* to = reinterpret_cast<uint4*>(&all[warp][lane * kByteVec]);
#pragma unroll
  for (int j = 0; j < kByteVec; j += 4)
    to[j / 4] = make_uint4(largest[j], largest[j + 1], largest[j + 2], largest[j + 3]);
  __syncthreads();
#pragma unroll
  for (int i = int(threadIdx.x); i < kLargestCols; i += kTileThreads) {
    uint32_t x = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) x = max(x, all[k][i]);
    if (first_col + i < p.cols && x != 0) atomicMax(p.largest + first_col + i, x);
  }
}

// Avoids bank conflicts: the lanes of a warp are 16 columns apart.
__device__ __forceinline__ int place_of(int column) { return column * (kTileWords + 1) + column / 32 * 4; }
// With kCast, q points to rows of bf16, which are cast on the way.
template <bool kVectors, bool kFactors, bool kCast = false>
__global__ __launch_bounds__(kTileThreads) void transpose_kernel(Bytes p) {
  constexpr int kLanes = kTileCols / kByteVec;
  __shared__ uint32_t words[kTileCols * (kTileWords + 1) + kTileCols / 32 * 4];
  __shared__ alignas(16) float inverses[kTileCols];
  const int64_t tiles = (p.cols + kTileCols - 1) / kTileCols;
  const int64_t first_row = blockIdx.x / tiles * kTileRows, first_col = blockIdx.x % tiles * kTileCols;
  const int lane = int(threadIdx.x) % kLanes, group = int(threadIdx.x) / kLanes;
  const int64_t c = first_col + lane * kByteVec, r = first_row + group * 4;
  uint32_t w[4][4];
  float factor[4];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (kCast) {
      load_cast(p, r + k, c, w[k]);
    } else {
      const uint4 v = load_bytes<kVectors>(p, r + k, c);
      w[k][0] = v.x, w[k][1] = v.y, w[k][2] = v.z, w[k][3] = v.w;
    }
    if (!kFactors) continue;
    factor[k] = r + k < p.rows ? p.row_factors[r + k] * p.row_scales[r + k] : 0.0f;
  }
  if constexpr (kFactors) {
    if (const int i = int(threadIdx.x); i < kTileCols) {
      const int64_t column = first_col + i;
      const uint32_t of = e4m3_scale(column < p.cols ? p.largest[column] : 0u);
      inverses[i] = __uint_as_float(e4m3_inverse(of));
      if (first_row == 0 && column < p.cols) {
        const float divisor = p.column_divisors != nullptr ? p.column_divisors[column] : 1.0f;
        p.column_scales[column] = __uint_as_float(of) / divisor;
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    auto at = [&](int j) -> uint32_t& { return words[place_of(lane * kByteVec + 4 * i + j) + group]; };
    if constexpr (kFactors) {
      float x[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) widen_word(w[k][i], x[k]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float inverse = inverses[lane * kByteVec + 4 * i + j];
        auto scaled = [&](int k) { return fp8_scaled(fp8_value(x[k][j], factor[k]), inverse); };
        at(j) = e4m3_bytes(scaled(0), scaled(1), scaled(2), scaled(3));
      }
    } else {
      const uint32_t low01 = __byte_perm(w[0][i], w[1][i], 0x5140),
                     low23 = __byte_perm(w[2][i], w[3][i], 0x5140),
                     high01 = __byte_perm(w[0][i], w[1][i], 0x7362),
                     high23 = __byte_perm(w[2][i], w[3][i], 0x7362);
      at(0) = __byte_perm(low01, low23, 0x5410), at(1) = __byte_perm(low01, low23, 0x7632);
      at(2) = __byte_perm(high01, high23, 0x5410), at(3) = __byte_perm(high01, high23, 0x7632);
    }
  }
  __syncthreads();
  constexpr int kStoreLanes = kTileWords / 4;  // 16 bytes per lane
  const int64_t to = first_row + int(threadIdx.x) % kStoreLanes * kByteVec;
#pragma unroll
  for (int i = int(threadIdx.x) / kStoreLanes; i < kTileCols; i += kTileThreads / kStoreLanes) {
    if (first_col + i >= p.cols || to >= p.to_cols) continue;
    const uint32_t* from = words + place_of(i) + int(threadIdx.x) % kStoreLanes * 4;
    const uint32_t all[4] = {from[0], from[1], from[2], from[3]};
    uint8_t* q = p.to + (first_col + i) * p.to_stride + to;
    if (p.to_vectors)
      st_global(q, make_uint4(all[0], all[1], all[2], all[3]));
    else
      for (int j = 0; j < kByteVec; ++j) q[j] = uint8_t(all[j / 4] >> (8 * (j % 4)));
  }
}

template <class T>
void quantize(Context& ctx, const Fp8Quantize& a) {
  constexpr int V = 16 / sizeof(T);
  TIGON_CHECK(kOp, a.x.cols <= INT32_MAX, "x must have at most 2^31 - 1 columns, got ", a.x.cols);
  const Rows<T> rows = {.x = static_cast<const T*>(a.x.data),
                        .stride = a.x.stride,
                        .cols = int(a.x.cols),
                        .bytes = byte_rows({a.q, a.scales, a.column_factors})};
  auto run = [&](auto kernel, int threads) {
    launch(kOp, ctx, kernel, {.blocks = a.x.rows, .threads = threads, .pdl = true}, rows);
  };
  const int64_t vecs = a.x.cols / V;
  const bool vectors = is_vectorizable(a.x.data, a.x.stride, a.x.cols, sizeof(T)) && rows_are_aligned(a.q) &&
                       reinterpret_cast<uintptr_t>(a.column_factors.data) % 16 == 0;
  if (!vectors || vecs > 8 * kLongThreads) return run(any_rows_kernel<T>, kLongThreads);
  if (vecs <= 128) return run(rows_kernel<T, 128, 1>, 128);
  if (vecs <= 256) return run(rows_kernel<T, 256, 1>, 256);
  if (vecs <= 512) return run(rows_kernel<T, 256, 2>, 256);
  if (vecs <= 1024) return run(rows_kernel<T, 256, 4>, 256);
  if (vecs <= 2048) return run(rows_kernel<T, kLongThreads, 4>, kLongThreads);
  run(rows_kernel<T, kLongThreads, 8>, kLongThreads);
}

}  // namespace

void fp8_quantize(Context& ctx, const Fp8Quantize& a) {
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    quantize<typename DeviceType<typename decltype(type)::type>::type>(ctx, a);
  });
}

void fp8_quantize_transposed(Context& ctx, const Fp8QuantizeTransposed& a) {
  constexpr const char* kName = "fp8_quantize_transposed";
  if (a.x.dtype != DType::bf16 || a.x.cols % kByteVec != 0 ||
      !is_vectorizable(a.x.data, a.x.stride, a.x.cols, 2)) {
    const Matrix q = {ctx.scratch(size_t(a.x.rows * a.x.cols)), DType::e4m3, a.x.rows, a.x.cols, a.x.cols};
    const Vector scales = {ctx.scratch_of<float>(a.x.rows), DType::f32, a.x.rows};
    cuda::fp8_quantize(ctx, {.x = a.x, .q = q, .scales = scales});
    return cuda::fp8_transpose(ctx, {.q = q, .qt = a.qt});
  }
  launch(kName, ctx, transpose_kernel<true, false, true>,
         {.blocks = ceil_div(a.qt.cols, kTileRows) * ceil_div(a.x.cols, kTileCols),
          .threads = kTileThreads,
          .pdl = true},
         Bytes{.q = static_cast<const uint8_t*>(a.x.data),
               .stride = a.x.stride,
               .rows = a.x.rows,
               .cols = a.x.cols,
               .row_scales = a.scales.as<float>(),
               .to = static_cast<uint8_t*>(a.qt.data),
               .to_stride = a.qt.stride,
               .to_cols = a.qt.cols,
               .to_vectors = rows_are_aligned(a.qt)});
}

void fp8_transpose(Context& ctx, const Fp8Transpose& a) {
  constexpr const char* kName = "fp8_transpose";
  Bytes p = {.q = static_cast<const uint8_t*>(a.q.data),
             .stride = a.q.stride,
             .rows = a.q.rows,
             .cols = a.q.cols,
             .row_factors = a.row_factors.as<float>(),
             .row_scales = a.row_scales.as<float>(),
             .column_divisors = a.column_divisors.as<float>(),
             .column_scales = a.column_scales.as<float>(),
             .to = static_cast<uint8_t*>(a.qt.data),
             .to_stride = a.qt.stride,
             .to_cols = a.qt.cols,
             .to_vectors = rows_are_aligned(a.qt)};
  const bool vectors = is_vectorizable(a.q.data, a.q.stride, a.q.cols, 1);
  auto tiles = [&](int64_t rows, int64_t of_rows, int64_t of_cols) {
    return (rows + of_rows - 1) / of_rows * ((a.q.cols + of_cols - 1) / of_cols);
  };
  if (p.row_factors != nullptr) {
    p.largest = ctx.scratch_of<uint32_t>(a.q.cols);
    TIGON_CUDA_CHECK(kName, cudaMemsetAsync(p.largest, 0, sizeof(uint32_t) * size_t(a.q.cols),
                                            static_cast<cudaStream_t>(ctx.stream())));
    launch(kName, ctx, vectors ? largest_kernel<true> : largest_kernel<false>,
           {.blocks = tiles(a.q.rows, kLargestRows, kLargestCols), .threads = kTileThreads, .pdl = true}, p);
  }
  const auto kernel = p.row_factors != nullptr
                          ? (vectors ? transpose_kernel<true, true> : transpose_kernel<false, true>)
                          : (vectors ? transpose_kernel<true, false> : transpose_kernel<false, false>);
  launch(kName, ctx, kernel,
         {.blocks = tiles(a.qt.cols, kTileRows, kTileCols), .threads = kTileThreads, .pdl = true}, p);
}

}  // namespace tigon::cuda
