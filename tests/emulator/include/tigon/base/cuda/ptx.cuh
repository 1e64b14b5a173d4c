// What tigon/base/cuda/ptx.cuh does, on a CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

namespace tigon::cuda {

inline uint64_t mul_wide_u32(uint32_t a, uint32_t b) { return uint64_t(a) * b; }
inline float ex2_approx_ftz(float x) { return exp2f(x); }
// With the mean error that the instruction has below 1.
inline float lg2_approx_ftz(float x) { return x < 1.0f ? float(log2(double(x)) + 5.4e-8) : log2f(x); }
inline float rcp_approx_ftz(float x) { return 1.0f / x; }
inline float rsqrt_approx_ftz(float x) { return float(1.0 / sqrt(double(x))); }
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t bytes) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = bytes >> 4 * i & 15, byte = uint32_t(both >> (digit & 7) * 8) & 0xff;
    result |= (digit < 8 ? byte : (byte >> 7) * 0xff) << 8 * i;
  }
  return result;
}
inline float max_NaN(float a, float b) { return a != a || b != b ? CUDART_NAN_F : fmaxf(a, b); }
template <float (*Widen)(uint16_t), uint16_t (*Narrow)(float)>
uint32_t max_NaN_pair(uint32_t a, uint32_t b) {
  const uint16_t low = Narrow(max_NaN(Widen(uint16_t(a)), Widen(uint16_t(b)))),
                 high = Narrow(max_NaN(Widen(uint16_t(a >> 16)), Widen(uint16_t(b >> 16))));
  return uint32_t(high) << 16 | low;
}
inline float widen_bf16(uint16_t x) { return __bfloat162float({x}); }
inline float widen_f16(uint16_t x) { return __half2float({x}); }
inline uint16_t narrow_bf16(float x) { return __float2bfloat16_rn(x).bits; }
inline uint16_t narrow_f16(float x) { return __float2half_rn(x).bits; }
inline uint32_t max_NaN_f16x2(uint32_t a, uint32_t b) { return max_NaN_pair<widen_f16, narrow_f16>(a, b); }
inline uint32_t max_NaN_bf16x2(uint32_t a, uint32_t b) { return max_NaN_pair<widen_bf16, narrow_bf16>(a, b); }
inline uint32_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  auto byte = [](float x) -> uint32_t {
    if (x != x) return 0x7f;
    const float a = fminf(fabsf(x), 448.0f);
    const int exponent = a < 0x1p-6f ? -6 : ilogbf(a);
    return (std::signbit(x) ? 0x80u : 0u) |
           (uint32_t(exponent + 6) << 3) + uint32_t(nearbyintf(ldexpf(a, 3 - exponent)));
  };
  return byte(high) << 8 | byte(low);
}
inline void cvt_rn_f16x2_e4m3x2(uint32_t bytes, float& low, float& high) {
  auto value = [](uint32_t byte) {
    const int exponent = int(byte >> 3 & 15u), mantissa = int(byte & 7u);
    const float a = exponent == 0 ? ldexpf(float(mantissa), -9) : ldexpf(float(8 + mantissa), exponent - 10);
    return (byte & 0x7fu) == 0x7fu ? CUDART_NAN_F : byte & 0x80u ? -a : a;
  };
  low = value(bytes & 0xffu), high = value(bytes >> 8 & 0xffu);
}
inline uint32_t cvt_rn_f16x2_e4m3x2(uint32_t bytes) {
  float low, high;
  cvt_rn_f16x2_e4m3x2(bytes, low, high);
  return uint32_t(narrow_f16(high)) << 16 | narrow_f16(low);
}
inline uint32_t cvt_rn_satfinite_e4m3x2_f16x2(uint32_t pair) {
  return cvt_rn_satfinite_e4m3x2_f32(widen_f16(uint16_t(pair >> 16)), widen_f16(uint16_t(pair)));
}
inline void keep_in_register(uint32_t&) {}
inline void keep_in_register(float&) {}

inline void aligned(const void* p, unsigned bytes) {
  if (uintptr_t(p) % bytes) fprintf(stderr, "emulator: %p is not aligned to %u bytes\n", p, bytes), abort();
}
inline uint4 words_at(const void* p) {
  aligned(p, 16);
  uint4 w;
  memcpy(&w, p, 16);
  return w;
}
inline float ld_global_f32_predicated(bool pred, const float* from) { return pred ? *from : 0.0f; }
inline uint4 ld_global_predicated(bool pred, const void* from, uint32_t fill = 0) {
  return pred ? words_at(from) : uint4{fill, fill, fill, fill};
}
inline uint4 ld_global_predicated_uninit(bool pred, const void* from) {
  return ld_global_predicated(pred, from, 0xffffffffu);
}
inline void st_global(void* to, const uint4& w) { aligned(to, 16), memcpy(to, &w, 16); }
inline void st_global_predicated(bool pred, void* to, const uint4& w) {
  if (pred) st_global(to, w);
}
inline void st_global_predicated(bool pred, void* to, uint16_t x) {
  if (pred) memcpy(to, &x, 2);
}
inline void st_global_predicated(bool pred, void* to, float x) {
  if (pred) memcpy(to, &x, 4);
}

inline uint32_t cast_smem_ptr_to_uint(const void* p) { return emulator::shared_address(p); }
inline uint4 ld_shared(uint32_t from) { return words_at(emulator::at_shared(from)); }
inline uint4 ld_shared(const uint4* from) { return words_at(from); }
inline void st_shared(uint32_t to, const uint4& w) { st_global(emulator::at_shared(to), w); }

inline unsigned cluster_rank() { return unsigned(emulator::cta.rank); }
inline unsigned cluster_size() { return unsigned(emulator::cta.cluster->size); }
inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline void st_shared_cluster(float* local, unsigned rank, float value) {
  memcpy(emulator::of_rank(local, rank), &value, sizeof value);
}

inline void mbarrier_init(uint64_t* barrier, int count = 1) { emulator::mbarrier_init(barrier, count); }
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
  emulator::mbarrier_update(barrier, 1, bytes);
}
inline void mbarrier_arrive(uint64_t* barrier) { emulator::mbarrier_update(barrier, 1, 0); }
template <bool kClusterScope = true>
void mbarrier_wait_parity(const uint64_t* barrier, int parity) {
  emulator::mbarrier_wait(barrier, parity);
}
template <class T>
void st_async(T* local, unsigned rank, const T& value, uint64_t* barrier) {
  static_assert(sizeof(T) == alignof(T) && (sizeof(T) == 8 || sizeof(T) == 16));
  memcpy(emulator::of_rank(local, rank), &value, sizeof(T));
  emulator::mbarrier_update(reinterpret_cast<uint64_t*>(emulator::of_rank(barrier, rank)), 0,
                            -int(sizeof(T)));
}

// Registers of the whole warp, of which lane 4 t + q brings and takes what PTX's tables of fragments say.
template <int Count>
struct Fragments {
  uint32_t of[32][Count];
  explicit Fragments(const uint32_t (&mine)[Count]) {
    for (int i = 0; i < Count; ++i) {
      const uint64_t* all = emulator::exchange(~0u, mine[i]);
      for (int lane = 0; lane < 32; ++lane) of[lane][i] = uint32_t(all[lane]);
    }
  }
  // The 16-bit value `column` of 8 of row `row` of 8 in register i.
  uint16_t at(int row, int column, int i) const {
    return uint16_t(of[4 * row + column / 2][i] >> 16 * (column % 2));
  }
};
template <int K>
void mma_m16n8(float (&d)[4], const uint32_t (&a)[K / 4], const uint32_t (&b)[K / 8]) {
  const Fragments<K / 4> left(a);
  const Fragments<K / 8> right(b);
  const int t = emulated_lane() / 4, q = emulated_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    double sum = 0;
    for (int k = 0; k < K; ++k)
      sum += double(widen_bf16(left.at(t, k % 8, k / 8 * 2 + i / 2))) *
             widen_bf16(right.at(2 * q + i % 2, k % 8, k / 8));
    d[i] = float(d[i] + sum);
  }
}
inline void mma_m16n8k16(float (&d)[4], const uint4& a, uint2 b) {
  mma_m16n8<16>(d, {a.x, a.y, a.z, a.w}, {b.x, b.y});
}
inline void mma_m16n8k8(float (&d)[4], uint2 a, uint32_t b) { mma_m16n8<8>(d, {a.x, a.y}, {b}); }
inline uint32_t movmatrix_trans(uint32_t rows) {
  const Fragments<1> matrix({rows});
  const int t = emulated_lane() / 4, q = emulated_lane() % 4;
  return matrix.at(2 * q, t, 0) | uint32_t(matrix.at(2 * q + 1, t, 0)) << 16;
}

inline void cp_async(uint32_t to, const void* from, int bytes = 16) {
  char* place = emulator::at_shared(to);
  aligned(place, 16), aligned(from, 16);
  emulator::start_copy({place, from, bytes, 16 - bytes});
}
inline void cp_async(void* to, const void* from, int bytes = 16) {
  cp_async(cast_smem_ptr_to_uint(to), from, bytes);
}
inline void cp_async_L2_128B(void* to, const void* from, int bytes = 16) { cp_async(to, from, bytes); }
inline void cp_async_predicated(bool pred, uint32_t to, const void* from) {
  if (pred) cp_async(to, from);
}
inline void cp_async_partial(uint32_t to, const void* from, int bytes) {
  if (bytes > 0) emulator::start_copy({emulator::at_shared(to), from, std::min(bytes, 16), 0});
}
inline void cp_async_commit_group() { emulator::commit_copies(); }
template <int Pending>
void cp_async_wait_group() {
  emulator::wait_copies(Pending);
}
inline void cp_async_wait_group(int pending) { emulator::wait_copies(size_t(std::clamp(pending, 0, 8))); }

inline void cp_async_bulk_prefetch_L2(const void*, int) {}
inline void cp_async_bulk(uint32_t to, const void* from, int bytes, const uint64_t* barrier) {
  aligned(emulator::at_shared(to), 16), aligned(from, 16);
  if (bytes % 16) fprintf(stderr, "emulator: a bulk copy of %d bytes\n", bytes), abort();
  memcpy(emulator::at_shared(to), from, size_t(bytes));
  emulator::mbarrier_update(const_cast<uint64_t*>(barrier), 0, -bytes);
}
inline void fence_proxy_async() {}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
template <int Count>
void setmaxnreg_dec() {}
template <int Count>
void setmaxnreg_inc() {}

}  // namespace tigon::cuda
