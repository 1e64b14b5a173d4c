// A refused call throws Error with the text "[op] argument must be X, got Y".
#pragma once

#include <stdexcept>

#include "tigon/base/export.h"

namespace tigon {

class TIGON_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tigon
