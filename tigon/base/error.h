// Errors: every refused call throws tigon::Error with "[op] argument must be X, got Y".
// Checks stay active in release builds and run before anything is launched or written.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "tigon/base/export.h"

namespace tigon {

class TIGON_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream s;
  s << '[' << op << "] ";
  (s << ... << parts);
  throw Error(s.str());
}
}  // namespace detail

}  // namespace tigon

// TIGON_CHECK(op, condition, parts...): throws "[op] parts..." when the condition is false.
#define TIGON_CHECK(op, cond, ...)              \
  do {                                          \
    if (!(cond)) [[unlikely]]                   \
      ::tigon::detail::fail((op), __VA_ARGS__); \
  } while (0)
