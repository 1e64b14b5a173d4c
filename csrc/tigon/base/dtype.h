// Storage types and their names. Arithmetic never happens in bf16 or f16: kernels widen to fp32 and round
// once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace tigon {

enum class DType : int8_t { f32, bf16, f16, f64, i32, i64, u8, i16, e4m3 };

// Holds one value for each of f32, bf16 and f16.
template <class K>
struct ByDtype {
  K at[3];
  constexpr const K& operator[](DType t) const { return at[int(t)]; }
};

constexpr size_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::f16:
    case DType::i16: return 2;
    case DType::u8:
    case DType::e4m3: return 1;
  }
  return 0;
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::f32: return "float32";
    case DType::bf16: return "bfloat16";
    case DType::f16: return "float16";
    case DType::f64: return "float64";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::u8: return "uint8";
    case DType::i16: return "int16";
    case DType::e4m3: return "float8_e4m3fn";
  }
  return "unknown";
}

// These are the host images of the 16-bit formats, bits only. CUDA code uses the toolkit's own types of the
// same layout.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_float(f16 h) {
  uint32_t sign = uint32_t(h.bits & 0x8000u) << 16, exponent = (h.bits >> 10) & 31u,
           mantissa = h.bits & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    float tiny = float(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(tiny) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Rounds to nearest even. NaN stays NaN (quiet), and overflow becomes infinity.
template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40u)};
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <>
inline f16 from_float<f16>(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {uint16_t(sign | 0x7e00u | ((a >> 13) & 0x3ffu))};
  if (a >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};
  // The result is subnormal in f16: the fp32 adder rounds it at 2^-24.
  if (a < 0x38800000u) {
    float shifted = std::bit_cast<float>(a) + 0x1p-1f;
    return {uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  return {uint16_t(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13))};
}

template <class T>
inline constexpr DType dtype_of = DType::u8;
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<f16> = DType::f16;

constexpr bool is_kernel_float(DType t) { return t == DType::f32 || t == DType::bf16 || t == DType::f16; }
constexpr bool is_half(DType t) { return t == DType::bf16 || t == DType::f16; }
// Follows PyTorch's promotion among the float types of the kernels.
constexpr DType promote(DType a, DType b) { return a == b ? a : DType::f32; }

}  // namespace tigon
