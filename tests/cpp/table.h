// What the tests share: tables of numbers with guarded memory, instruction sets, the double-precision
// oracle's vocabulary.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tigon/base/dispatch.h"
#include "tigon/base/error.h"
#include "tigon/base/make_context.h"
#include "tigon/base/simd/lanes.h"

namespace tigon::test {

// As a string: doctest prints a plain char pointer as an address.
inline std::string text(DType t) { return tigon::name_of(t); }

inline constexpr DType kFloats[] = {DType::f32, DType::bf16, DType::f16};

// The largest relative error of one rounding to the type.
inline double unit(DType t) { return t == DType::f32 ? 0x1p-24 : t == DType::bf16 ? 0x1p-8 : 0x1p-11; }
// Half the smallest positive number: the largest absolute error of a rounding near zero.
inline double tiny(DType t) { return t == DType::f16 ? 0x1p-25 : t == DType::bf16 ? 0x1p-134 : 0x1p-150; }

// rows x cols elements, `gap` unused elements after each row. Memory starts as NaN; gaps and the zones before
// and after are never to be written. Elements are read and written as double.
class Table {
 public:
  Table(DType dtype, int64_t rows, int64_t cols, int64_t gap = 0)
      : dtype_(dtype), rows_(rows), cols_(cols), stride_(cols + gap) {
    bytes_.assign(size_t(2 * kZone) + size_t(rows * stride_) * size_of(dtype), 0xff);
  }
  static Table column(DType dtype, int64_t size) { return Table(dtype, 1, size); }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DType dtype() const { return dtype_; }
  Matrix matrix() {
    return {.data = data(), .dtype = dtype_, .rows = rows_, .cols = cols_, .stride = stride_};
  }
  Vector vector() { return {.data = data(), .dtype = dtype_, .size = rows_ * cols_}; }

  double operator()(int64_t r, int64_t c) const {
    const char* p = address(r, c);
    switch (dtype_) {
      case DType::f32: return read<float>(p);
      case DType::bf16: return to_float(read<bf16>(p));
      case DType::f16: return to_float(read<f16>(p));
      case DType::f64: return read<double>(p);
      case DType::i64: return double(read<int64_t>(p));
      default: FAIL("dtype not used in tests"); return 0;
    }
  }
  double operator()(int64_t i) const { return (*this)(i / cols_, i % cols_); }

  void set(int64_t r, int64_t c, double v) {
    char* p = const_cast<char*>(address(r, c));
    switch (dtype_) {
      case DType::f32: return write(p, float(v));
      case DType::bf16: return write(p, from_float<bf16>(float(v)));
      case DType::f16: return write(p, from_float<f16>(float(v)));
      case DType::f64: return write(p, v);
      case DType::i64: return write(p, int64_t(v));
      default: FAIL("dtype not used in tests");
    }
  }
  template <class Fn>  // every element = fn(r, c)
  Table& fill(const Fn& fn) {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < cols_; ++c) set(r, c, double(fn(r, c)));
    return *this;
  }
  Table& normal(unsigned seed, double scale = 1.0, double mean = 0.0) {
    std::mt19937 bits(seed);
    std::normal_distribution<double> draw(mean, scale);
    return fill([&](int64_t, int64_t) { return draw(bits); });
  }

  bool guards_intact() const {
    auto untouched = [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i)
        if (bytes_[i] != 0xff) return false;
      return true;
    };
    size_t element = size_of(dtype_);
    for (int64_t r = 0; r < rows_; ++r)
      if (!untouched(kZone + size_t(r * stride_ + cols_) * element,
                     kZone + size_t((r + 1) * stride_) * element))
        return false;
    return untouched(0, kZone) && untouched(bytes_.size() - kZone, bytes_.size());
  }
  bool operator==(const Table& other) const {
    return bytes_ == other.bytes_;
  }  // bit for bit, guards included

 private:
  static constexpr size_t kZone = 256;
  char* data() { return reinterpret_cast<char*>(bytes_.data()) + kZone; }
  const char* address(int64_t r, int64_t c) const {
    return reinterpret_cast<const char*>(bytes_.data()) + kZone + size_t(r * stride_ + c) * size_of(dtype_);
  }
  template <class T>
  static T read(const char* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  template <class T>
  static void write(char* p, T v) {
    std::memcpy(p, &v, sizeof v);
  }

  DType dtype_;
  int64_t rows_, cols_, stride_;
  std::vector<unsigned char> bytes_;
};

// Every element of `got` within bound(r, c) of expected(r, c), NaN where NaN is expected, nothing written
// outside.
template <class Expected, class Bound>
void check_close(const std::string& name, const Table& got, const Expected& expected, const Bound& bound) {
  CHECK_MESSAGE(got.guards_intact(), name, ": memory outside the result was written");
  int bad = 0;
  for (int64_t r = 0; r < got.rows(); ++r)
    for (int64_t c = 0; c < got.cols(); ++c) {
      double want = expected(r, c), have = got(r, c), room = bound(r, c);
      if (std::isnan(want) ? std::isnan(have) : want == have || std::abs(want - have) <= room) continue;
      if (++bad <= 3)
        FAIL_CHECK(name << "[" << r << ", " << c << "] = " << have << ", expected " << want << " within "
                        << room);
    }
  CHECK_MESSAGE(bad == 0, name, ": ", bad, " elements are off");
}

// Every element of `got` equals expected(r, c).
template <class Expected>
void check_exact(const std::string& name, const Table& got, const Expected& expected) {
  check_close(name, got, expected, [](int64_t, int64_t) { return 0.0; });
}
inline void check_equal(const std::string& name, const Table& got, const Table& expected) {
  check_exact(name, got, [&](int64_t r, int64_t c) { return expected(r, c); });
}

struct NamedIsa {
  cpu::Isa isa;
  std::string name;
};
// The instruction sets of this machine; the best one is active again afterwards.
template <class Fn>
void for_each_isa(const Fn& fn) {
  cpu::Isa best = cpu::active_isa();
  for (NamedIsa i :
       {NamedIsa{cpu::Isa::scalar, "scalar"}, {cpu::Isa::avx2, "avx2"}, {cpu::Isa::avx512, "avx512"}}) {
    if (!cpu::force_isa(i.isa)) {
      MESSAGE("this machine has no " << i.name);
      continue;
    }
    fn(i);
  }
  cpu::force_isa(best);
}

// run(ctx) returns its results; they must be the same bits for every instruction set and thread count.
inline void check_same_everywhere(const std::function<std::vector<Table>(Context&)>& run) {
  std::vector<Table> first;
  for_each_isa([&](NamedIsa isa) {
    for (int threads : {1, 2, 3, 7}) {
      auto ctx = make_cpu_context(threads);
      std::vector<Table> got = run(*ctx);
      if (first.empty()) first = got;
      REQUIRE(got.size() == first.size());
      for (size_t i = 0; i < got.size(); ++i) {
        INFO("result " << i << ", " << isa.name << ", " << threads << " threads");
        CHECK(got[i] == first[i]);
      }
    }
  });
}

}  // namespace tigon::test

// The words of <op>_math.inc for V = double. Include the formula after this, inside tigon::test::oracle.
namespace tigon::test::oracle {
using std::exp;
using std::fma;
using std::sqrt;
[[maybe_unused]] static inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
[[maybe_unused]] static inline double constant(double, double c) { return c; }
[[maybe_unused]] static inline double mul(double a, double b) { return a * b; }
[[maybe_unused]] static inline bool lt(double a, double b) { return a < b; }
[[maybe_unused]] static inline bool gt(double a, double b) { return a > b; }
[[maybe_unused]] static inline double select(bool m, double a, double b) { return m ? a : b; }
#include "tigon/base/silu.inc"
}  // namespace tigon::test::oracle
