// Divides by a divisor that is known on the host.
#pragma once

#include <cstdint>

namespace tigon::cuda {

// Divides n < 2^31 by a divisor < 2^31 with one multiplication, one addition and one shift.
struct Divider {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  explicit Divider(int64_t d) : divisor(uint32_t(d)) {
    while ((uint64_t(1) << shift) < divisor) ++shift;
    multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - divisor)) / divisor + 1);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

}  // namespace tigon::cuda
