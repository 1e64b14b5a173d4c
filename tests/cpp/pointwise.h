// What the tests of pointwise ops share.
#pragma once

#include "table.h"

namespace tigon::test {

// Every element of `got` equals expected(r, c).
template <class Expected>
void check_exact(const std::string& name, const Table& got, const Expected& expected) {
  check_close(name, got, expected, [](int64_t, int64_t) { return 0.0; });
}
inline void check_equal(const std::string& name, const Table& got, const Table& expected) {
  check_exact(name, got, [&](int64_t r, int64_t c) { return expected(r, c); });
}

}  // namespace tigon::test
