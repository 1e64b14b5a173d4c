#include "tigon/base/error.h"

#include <charconv>
#include <string>

#include "tigon/base/check.h"

namespace tigon::detail {

// Numbers are printed without std::ostream and its locales: in a process whose libraries bring several copies
// of the C++ runtime, a stream that formats a number may find the facets of another copy and crash.
void fail(const char* op, std::initializer_list<Part> parts) {
  std::string s = std::string("[") + op + "] ";
  for (const Part& part : parts) {
    char number[48], *end = number + sizeof number;
    if (part.size == Part::kInteger)
      s.append(number, std::to_chars(number, end, part.integer).ptr);
    else if (part.size == Part::kFloating)
      s.append(number, std::to_chars(number, end, part.floating, std::chars_format::general, 6).ptr);
    else if (part.size == Part::kTerminated)
      s += part.text;
    else
      s.append(part.text, size_t(part.size));
  }
  throw Error(s);
}

}  // namespace tigon::detail
