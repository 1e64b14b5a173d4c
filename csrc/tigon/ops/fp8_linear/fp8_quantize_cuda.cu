// The CUDA backend of the casts moves b + 1 bytes per element in fp8_quantize (b = element size), and 2 in
// fp8_transpose. It has two kinds of kernels:
// rows       A CTA has a row in registers: it computes its maximum, then its bytes.
// transpose  takes tiles of 64 columns to shared memory, from where a thread has 16 columns of four rows: a
//            word for each column. With factors the CTAs of a cluster have 64 columns of up to 8192 rows,
//            and exchange the maxima of columns; longer columns are read twice.
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
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const Vec<float, V> f = load_predicated<float, V>(p.bytes.factors != nullptr && column(i) < p.cols,
                                                      p.bytes.factors + column(i));
    float v[V];
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = p.bytes.factors != nullptr ? fp8_value(w[i][j], f.v[j]) : w[i][j];
    values[i].set(v);
  }
  bool infinite;
  const float inverse = finish_e4m3(p.bytes, r, largest_e4m3(values, infinite), slots);
  uint8_t* q = p.bytes.q + r * p.bytes.stride;
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
    if (column(i) < p.cols)
      store_e4m3(q + column(i), hide_from_compiler(values[i], p.opaque_zero), inverse, infinite);
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

// What the transposition does with the elements.
enum class Kind {
  copy,    // bytes
  cast,    // bf16, by the scales of rows
  rescale  // bytes, to scales of columns
};
// Without conversions of float8 all is computed in fp32.
#if __CUDA_ARCH__ >= 890
constexpr bool kHasE4m3 = true;
#else
constexpr bool kHasE4m3 = false;
#endif
constexpr int kTileThreads = 256, kWarps = kTileThreads / 32;
// A CTA has a strip of columns; a thread has kByteVec of them, of four rows at a time.
constexpr int kStrip = 64, kByteVec = 16, kLanes = kStrip / kByteVec, kRowStep = kWarps / kLanes * 32 * 4;
constexpr int kTileRows = kRowStep, kMostRows = 1024, kMostParts = 8;

struct Bytes {
  const uint8_t* q;
  int64_t stride, rows, cols;
  const float *row_factors, *row_scales;
  const float* column_divisors;
  float* column_scales;
  uint8_t* to;
  int64_t to_stride, to_cols;
  bool to_words;  // rows begin at 4-byte boundaries
  int tile_rows;  // of a CTA at a time
};

// Four rows of a strip are followed by 16 bytes, so that lanes with four rows each meet no bank conflicts.
template <Kind kKind>
constexpr int kElement = kKind == Kind::cast ? 2 : 1;
template <Kind kKind>
constexpr int kPitch = 4 * kStrip * kElement<kKind> + 16;

// Starts the copies of a tile to shared memory. What is outside of the matrix is zero.
template <Kind kKind, bool kVectors>
__device__ __forceinline__ void copy_tile(const Bytes& p, int64_t first_row, int64_t first_col,
                                          unsigned char* tile) {
  constexpr int kSize = kElement<kKind>, kVecs = kStrip * kSize / 16;
#pragma unroll 4
  for (int i = int(threadIdx.x); i < p.tile_rows * kVecs; i += kTileThreads) {
    const int row = i / kVecs, at = i % kVecs * 16;
    const int64_t r = first_row + row, c = first_col + at / kSize;
    unsigned char* to = tile + row / 4 * kPitch<kKind> + row % 4 * kStrip * kSize + at;
    const uint8_t* from = p.q + (r * p.stride + c) * kSize;
    if constexpr (kVectors) {
      const bool has = r < p.rows && c < p.cols;
      cp_async(to, has ? from : p.q, has ? 16 : 0);
    } else {
      for (int j = 0; j < kByteVec; ++j) to[j] = r < p.rows && c + j < p.cols ? from[j] : 0;
    }
  }
  cp_async_commit_group();
}

// Stores kByteVec columns of four rows: a word for each column, of which a warp has 128 adjacent bytes.
template <bool kVectors>
__device__ __forceinline__ void store_transposed(const Bytes& p, int64_t r, int64_t c,
                                                 const uint32_t (&w)[4][4]) {
  if (r >= p.to_cols || c >= p.cols) return;
  uint8_t* q = p.to + c * p.to_stride + r;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low01 = __byte_perm(w[0][i], w[1][i], 0x5140),
                   low23 = __byte_perm(w[2][i], w[3][i], 0x5140),
                   high01 = __byte_perm(w[0][i], w[1][i], 0x7362),
                   high23 = __byte_perm(w[2][i], w[3][i], 0x7362);
    const uint32_t words[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                               __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
#pragma unroll
    for (int j = 0; j < 4; ++j, q += p.to_stride) {
      if (!kVectors && c + 4 * i + j >= p.cols) return;
      if (p.to_words)
        *reinterpret_cast<uint32_t*>(q) = words[j];
      else
        for (int k = 0; k < 4; ++k) q[k] = uint8_t(words[j] >> (8 * k));
    }
  }
}

// The factors of a tile's rows, powers of two, as f16 over the largest of them, the frame. A product with a
// byte is exact if the factor is not small, or if the product is at least 2^-20.
struct RowFactors {
  float frame;           // 0 if f16 cannot serve
  bool small;            // some are below 2^-15 of the frame
  const __half* scaled;  // factors / frame
};
struct RescaleShared {
  uint32_t slots[32], largest[kWarps / kLanes][kStrip];
  float parts[kMostParts][kStrip], inverses[kStrip];
};
__device__ __forceinline__ float row_factor(const Bytes& p, int64_t r) {
  return r < p.rows ? p.row_factors[r] * p.row_scales[r] : 0.0f;
}
__device__ __forceinline__ RowFactors read_factors(const Bytes& p, int64_t first_row, RescaleShared& x,
                                                   __half* scaled) {
  constexpr int kCount = kMostRows / kTileThreads;
  float f[kCount];
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int row = k * kTileThreads + int(threadIdx.x);
    f[k] = row < p.tile_rows ? row_factor(p, first_row + row) : 0.0f;
    const uint32_t bits = __float_as_uint(f[k]);
    largest = max(largest, bits & 0x7fffffu ? ~0u : bits);  // no power of two
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) x.slots[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = __reduce_max_sync(0xffffffffu, x.slots[threadIdx.x % kWarps]);
  const bool serves = largest >= 27u << 23 && largest <= 227u << 23;  // 2^-100 to 2^100
  const float inverse = serves ? __uint_as_float((254u << 23) - largest) : 0.0f;
  bool small = false;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int row = k * kTileThreads + int(threadIdx.x);
    small = small || (f[k] > 0.0f && f[k] * inverse < 0x1p-15f);
    if (row < p.tile_rows) scaled[row] = __float2half_rn(f[k] * inverse);
  }
  return {.frame = serves ? __uint_as_float(largest) : 0.0f,
          .small = __syncthreads_or(small) != 0,
          .scaled = scaled};
}
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  const __half2 c = __hmul2_rn(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
  const __half2 c = __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}
__device__ __forceinline__ float2 widen_f16x2(uint32_t a) {
  return __half22float2(reinterpret_cast<const __half2&>(a));
}

// Call fn for each word of four rows with the products of its elements and the factors of rows: in fp32, and
// as two pairs of f16, divided by the frame.
template <class Fn>
__device__ __forceinline__ void for_products(const Bytes& p, int64_t first_row, const uint32_t (&w)[4][4],
                                             Fn&& fn) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float factor = row_factor(p, first_row + k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[4];
      widen_word(w[k][i], x);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = fp8_value(x[j], factor);
      fn(k, i, x);
    }
  }
}
template <class Fn>
__device__ __forceinline__ void for_pairs(const RowFactors& f, int group, const uint32_t (&w)[4][4],
                                          Fn&& fn) {
  const uint2 factors = reinterpret_cast<const uint2*>(f.scaled)[group];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t twice = __byte_perm(k < 2 ? factors.x : factors.y, 0, k % 2 == 0 ? 0x1010 : 0x3232);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fn(k, i, mul_f16x2(cvt_rn_f16x2_e4m3x2(w[k][i] & 0xffffu), twice),
         mul_f16x2(cvt_rn_f16x2_e4m3x2(w[k][i] >> 16), twice));
  }
}

// Takes tiles of a strip: what a warp has of them.
struct Part {
  int lane_of_strip, first_group, groups;
  template <class Fn>
  __device__ __forceinline__ void for_each(const unsigned char* tile, Fn&& fn) const {
#pragma unroll 1
    for (int g = first_group; g < groups; g += kRowStep / 4) {
      uint32_t w[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 v = *reinterpret_cast<const uint4*>(tile + g * kPitch<Kind::rescale> + k * kStrip +
                                                        lane_of_strip * kByteVec);
        w[k][0] = v.x, w[k][1] = v.y, w[k][2] = v.z, w[k][3] = v.w;
      }
      fn(g, w);
    }
  }
};

// Returns the largest magnitude of column `lane` of a warp's kByteVec columns.
__device__ __forceinline__ uint32_t largest_of_part(const Bytes& p, const Part& part, const RowFactors& f,
                                                    int64_t first_row, const unsigned char* tile) {
  const int lane = int(threadIdx.x) % 32;
  uint32_t found = 0;
  uint32_t most[kByteVec / 2] = {};
  part.for_each(tile, [&](int g, const uint32_t (&w)[4][4]) {
    for_pairs(f, g, w, [&](int, int i, uint32_t low, uint32_t high) {  // a maximum leaves NaN out
      most[2 * i] = max_f16x2(most[2 * i], low & 0x7fff7fffu);
      most[2 * i + 1] = max_f16x2(most[2 * i + 1], high & 0x7fff7fffu);
    });
  });
  float least = INFINITY;
#pragma unroll
  for (int i = 0; i < kByteVec / 2; ++i) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      most[i] = max_f16x2(most[i], __shfl_xor_sync(0xffffffffu, most[i], step));
    const float2 two = widen_f16x2(most[i]);
    least = fminf(least, fminf(two.x, two.y));
    if (lane / 2 == i) found = __float_as_uint((lane % 2 == 0 ? two.x : two.y) * f.frame);
  }
  // What small factors give may be rounded, but is then less than 2^-15.
  if (kHasE4m3 && f.frame > 0.0f && (!f.small || least >= 0x1p-15f)) return found;
  uint32_t largest[kByteVec] = {};
  part.for_each(tile, [&](int g, const uint32_t (&w)[4][4]) {
    for_products(p, first_row + 4 * g, w, [&](int, int i, const float (&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) raise_e4m3(largest[4 * i + j], x[j]);
    });
  });
#pragma unroll
  for (int j = 0; j < kByteVec; ++j) {
    const uint32_t all = __reduce_max_sync(0xffffffffu, largest[j]);
    if (lane == j) found = all;
  }
  return found;
}

// Divides what a warp has by the scales of columns, and stores it.
template <bool kVectors>
__device__ __forceinline__ void rescale_part(const Bytes& p, const Part& part, const RowFactors& f,
                                             int64_t first_row, int64_t c, const unsigned char* tile,
                                             const float* inverses) {
  uint32_t of_column[kByteVec / 2], most = 0;
#pragma unroll
  for (int i = 0; i < kByteVec / 2; ++i) {
    const __half2 two = __floats2half2_rn(inverses[2 * i] * f.frame, inverses[2 * i + 1] * f.frame);
    of_column[i] = reinterpret_cast<const uint32_t&>(two);
    most = max_f16x2(most, of_column[i]);
  }
  const float largest = fmaxf(widen_f16x2(most).x, widen_f16x2(most).y);
  // Products with factors of rows are then exact, or so small that their bytes are zeros.
  if (kHasE4m3 && f.frame > 0.0f && largest <= (f.small ? 0x1p6f : 0x1p15f))
    return part.for_each(tile, [&](int g, uint32_t (&w)[4][4]) {
      for_pairs(f, g, w, [&](int k, int i, uint32_t low, uint32_t high) {
        w[k][i] = cvt_rn_satfinite_e4m3x2_f16x2(mul_f16x2(low, of_column[2 * i])) |
                  cvt_rn_satfinite_e4m3x2_f16x2(mul_f16x2(high, of_column[2 * i + 1])) << 16;
      });
      store_transposed<kVectors>(p, first_row + 4 * g, c, w);
    });
  part.for_each(tile, [&](int g, uint32_t (&w)[4][4]) {
    for_products(p, first_row + 4 * g, w, [&](int k, int i, const float (&x)[4]) {
      auto at = [&](int j) { return fp8_scaled(x[j], inverses[4 * i + j]); };
      w[k][i] = e4m3_bytes(at(0), at(1), at(2), at(3));
    });
    store_transposed<kVectors>(p, first_row + 4 * g, c, w);
  });
}

template <bool kVectors, Kind kKind>
__global__ __launch_bounds__(kTileThreads, kKind == Kind::rescale ? 3 : 6) void transpose_kernel(Bytes p) {
  extern __shared__ __align__(16) unsigned char tile[];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const Part part = {
      .lane_of_strip = warp % kLanes, .first_group = warp / kLanes * 32 + lane, .groups = p.tile_rows / 4};
  if constexpr (kKind != Kind::rescale) {
    const int64_t strips = (p.cols + kStrip - 1) / kStrip;
    const int64_t first_row = blockIdx.x / strips * kTileRows, first_col = blockIdx.x % strips * kStrip;
    const int64_t r = first_row + 4 * part.first_group, c = first_col + part.lane_of_strip * kByteVec;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    copy_tile<kKind, kVectors>(p, first_row, first_col, tile);
    float inverse[4];
    if constexpr (kKind == Kind::cast) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        inverse[k] =
            __uint_as_float(e4m3_inverse(__float_as_uint(r + k < p.rows ? p.row_scales[r + k] : 1.0f)));
    }
    cp_async_wait_group<0>();
    __syncthreads();
    uint32_t w[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto* from =
          reinterpret_cast<const uint4*>(tile + part.first_group * kPitch<kKind> +
                                         (k * kStrip + part.lane_of_strip * kByteVec) * kElement<kKind>);
      if constexpr (kKind == Kind::copy) {
        const uint4 v = *from;
        w[k][0] = v.x, w[k][1] = v.y, w[k][2] = v.z, w[k][3] = v.w;
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 words = from[i];
          const auto& v = reinterpret_cast<const Vec<__nv_bfloat16, 8>&>(words);
          uint32_t largest = 0;
          raise_with_infinity(largest, v);
#pragma unroll
          for (int j = 0; j < 8; j += 4)
            w[k][2 * i + j / 4] = e4m3_bytes(v, j, inverse[k], is_infinite(largest));
        }
      }
    }
    store_transposed<kVectors>(p, r, c, w);
  } else {
    __shared__ RescaleShared x;
    const int parts = int(cluster_size()), rank = int(cluster_rank());
    const int64_t first_col = int64_t(blockIdx.x) / parts * kStrip,
                  c = first_col + part.lane_of_strip * kByteVec;
    const int64_t round_rows = int64_t(parts) * p.tile_rows,
                  last = (p.to_cols + round_rows - 1) / round_rows - 1;
    auto* scaled = reinterpret_cast<__half*>(tile + p.tile_rows / 4 * kPitch<kKind>);
    auto row_of = [&](int64_t round) { return round * round_rows + rank * p.tile_rows; };
    auto bring = [&](int64_t round) {
      copy_tile<kKind, kVectors>(p, row_of(round), first_col, tile);
      const RowFactors f = read_factors(p, row_of(round), x, scaled);
      cp_async_wait_group<0>();
      __syncthreads();
      return f;
    };
    cluster_arrive();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int column = int(threadIdx.x);
    const bool has_column = column < kStrip;
    uint32_t largest = 0;
    RowFactors f;
    for (int64_t round = 0; round <= last; ++round) {
      f = bring(round);
      const uint32_t of = largest_of_part(p, part, f, row_of(round), tile);
      if (lane < kByteVec) x.largest[warp / kLanes][part.lane_of_strip * kByteVec + lane] = of;
      __syncthreads();
      if (has_column)
#pragma unroll
        for (int k = 0; k < kWarps / kLanes; ++k) largest = max(largest, x.largest[k][column]);
    }
    cluster_wait();  // all CTAs have started
    if (has_column) {
      x.parts[rank][column] = __uint_as_float(largest);
      for (int k = 1; k < parts; ++k)
        st_shared_cluster(&x.parts[rank][column], unsigned((rank + k) % parts), __uint_as_float(largest));
    }
    cluster_arrive();
    cluster_wait();
    if (has_column) {
      for (int k = 0; k < parts; ++k) largest = max(largest, __float_as_uint(x.parts[k][column]));
      const uint32_t of = e4m3_scale(largest);
      x.inverses[column] = __uint_as_float(e4m3_inverse(of));
      if (const int64_t at = first_col + column; rank == 0 && at < p.cols)
        p.column_scales[at] =
            __uint_as_float(of) / (p.column_divisors != nullptr ? p.column_divisors[at] : 1.0f);
    }
    __syncthreads();
    // The last tile is still there.
    for (int64_t round = last; round >= 0; --round) {
      if (round < last) __syncthreads(), f = bring(round);
      rescale_part<kVectors>(p, part, f, row_of(round), c, tile, x.inverses + part.lane_of_strip * kByteVec);
    }
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

template <Kind kKind>
void launch_transpose(const char* op, Context& ctx, Bytes p, const Matrix& to, bool vectors) {
  p.to = static_cast<uint8_t*>(to.data), p.to_stride = to.stride, p.to_cols = to.cols;
  p.to_words = reinterpret_cast<uintptr_t>(to.data) % 4 == 0 && to.stride % 4 == 0;
  p.tile_rows = kTileRows;
  const auto kernel = vectors ? transpose_kernel<true, kKind> : transpose_kernel<kKind == Kind::cast, kKind>;
  const int64_t strips = ceil_div(p.cols, kStrip);
  if constexpr (kKind != Kind::rescale)
    return launch(op, ctx, kernel,
                  {.blocks = strips * ceil_div(p.to_cols, kTileRows),
                   .threads = kTileThreads,
                   .shared = size_t(kTileRows / 4 * kPitch<kKind>),
                   .pdl = true},
                  p);
  auto shared = [&] { return size_t(p.tile_rows / 4 * kPitch<kKind> + p.tile_rows * int(sizeof(__half))); };
  // The CTAs of a cluster have a strip. They keep their tiles if the cluster has all of its rows.
  int64_t parts = std::min<int64_t>(ceil_div(p.to_cols, kRowStep), kMostParts);
  p.tile_rows = int(std::min<int64_t>(ceil_div(p.to_cols, parts * kRowStep) * kRowStep, kMostRows));
  static OccupancyCache occupancy[2];
  while (occupancy[vectors].max_active(op, kernel, int(parts), kTileThreads, shared()) == 0 && parts > 1)
    parts /= 2;
  launch(op, ctx, kernel,
         {.blocks = strips * parts,
          .threads = kTileThreads,
          .shared = shared(),
          .pdl = true,
          .cluster = int(parts)},
         p);
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
  launch_transpose<Kind::cast>(kName, ctx,
                               {.q = static_cast<const uint8_t*>(a.x.data),
                                .stride = a.x.stride,
                                .rows = a.x.rows,
                                .cols = a.x.cols,
                                .row_scales = a.scales.as<float>()},
                               a.qt, true);
}

void fp8_transpose(Context& ctx, const Fp8Transpose& a) {
  constexpr const char* kName = "fp8_transpose";
  const Bytes p = {.q = static_cast<const uint8_t*>(a.q.data),
                   .stride = a.q.stride,
                   .rows = a.q.rows,
                   .cols = a.q.cols,
                   .row_factors = a.row_factors.as<float>(),
                   .row_scales = a.row_scales.as<float>(),
                   .column_divisors = a.column_divisors.as<float>(),
                   .column_scales = a.column_scales.as<float>()};
  const bool vectors = is_vectorizable(a.q.data, a.q.stride, a.q.cols, 1);
  if (p.row_factors == nullptr) return launch_transpose<Kind::copy>(kName, ctx, p, a.qt, vectors);
  launch_transpose<Kind::rescale>(kName, ctx, p, a.qt, vectors);
}

}  // namespace tigon::cuda
