// What the tests of pointwise ops share.
#pragma once

#include "table.h"

namespace tigon::test {

// fn(dtype, rows, cols): one element, a tail alone, vectors and a tail, more rows than a task takes.
template <class Fn>
void for_each_size(const Fn& fn) {
  for (DType t : kFloats)
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {5, 77}, {40, 1000}}) {
      INFO(rows << " x " << cols << " " << text(t));
      fn(t, rows, cols);
    }
}

// Every element of `got` equals expected(r, c).
template <class Expected>
void check_exact(const std::string& name, const Table& got, const Expected& expected) {
  check_close(name, got, expected, [](int64_t, int64_t) { return 0.0; });
}
inline void check_equal(const std::string& name, const Table& got, const Table& expected) {
  check_exact(name, got, [&](int64_t r, int64_t c) { return expected(r, c); });
}

}  // namespace tigon::test
