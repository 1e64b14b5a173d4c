// Errors: every refused call throws tigon::Error with "[op] argument must be X, got Y".
// Checks stay active in release builds and run before anything is launched or written.
#pragma once

#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "tigon/base/export.h"

namespace tigon {

class TIGON_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {
// Numbers as std::ostream writes them. Without its locales: in a process whose libraries bring several copies of the C++
// runtime, a stream that formats a number may find the facets of another copy and crash.
inline void append(std::string& s, std::string_view part) { s += part; }
template <class T>
  requires std::is_arithmetic_v<T>
void append(std::string& s, T x) {
  char text[48], *end = text + sizeof text;
  if constexpr (std::is_floating_point_v<T>)
    end = std::to_chars(text, end, x, std::chars_format::general, 6).ptr;
  else if constexpr (std::is_same_v<T, bool>)
    end = std::to_chars(text, end, int(x)).ptr;
  else
    end = std::to_chars(text, end, x).ptr;
  s.append(text, end);
}

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const char* op, const Parts&... parts) {
  std::string s = std::string("[") + op + "] ";
  (append(s, parts), ...);
  throw Error(s);
}
}  // namespace detail

}  // namespace tigon

// TIGON_CHECK(op, condition, parts...): throws "[op] parts..." when the condition is false.
#define TIGON_CHECK(op, cond, ...)              \
  do {                                          \
    if (!(cond)) [[unlikely]]                   \
      ::tigon::detail::fail((op), __VA_ARGS__); \
  } while (0)
