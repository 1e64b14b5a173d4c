// TIGON_CHECK(op, condition, parts...) throws Error "[op] parts..." (error.h) if the condition is false.
// Checks stay active in release builds and run before anything is launched or written.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>

namespace tigon::detail {

// A message consists of parts: text, or a number printed as std::ostream prints it.
struct Part {
  union {
    const char* text;
    int64_t integer;
    double floating;
  };
  // The text has this length; kTerminated if a 0 ends it.
  int64_t size;
  static constexpr int64_t kTerminated = -1, kInteger = -2, kFloating = -3;

  Part(const char* x) : text(x), size(kTerminated) {}
  template <std::integral T>
  Part(T x) : integer(int64_t(x)), size(kInteger) {}
  template <std::floating_point T>
  Part(T x) : floating(double(x)), size(kFloating) {}
  template <class String>
    requires requires(const String& x) { x.data(), x.size(); }
  Part(const String& x) : text(x.data()), size(int64_t(x.size())) {}
};

[[noreturn, gnu::cold]] void fail(const char* op, std::initializer_list<Part> parts);

}  // namespace tigon::detail

#define TIGON_CHECK(op, cond, ...)                \
  do {                                            \
    if (!(cond)) [[unlikely]]                     \
      ::tigon::detail::fail((op), {__VA_ARGS__}); \
  } while (0)
