// Parameters on the CPU, in fp32, and the last step of their gradients: partial rows, summed in index order, rounded once.
#pragma once

#include <algorithm>

#include "tigon/base/context.h"

namespace tigon::cpu {

// Element i.
float number_at(const Vector& v, int64_t i);
// All of it, where it is or as a copy; null stays null.
const float* in_f32(Context& ctx, const Vector& v);

// Rows in chunks of which each has its partial row: a function of their number alone, so that results do not depend on threads.
struct RowChunks {
  int64_t rows, length, count;
  explicit RowChunks(int64_t rows, int64_t least = 16, int64_t most = 64)
      : rows(rows), length(std::max(least, (rows + most - 1) / most)), count((rows + length - 1) / length) {}
  int64_t begin(int64_t chunk) const { return chunk * length; }
  int64_t end(int64_t chunk) const { return std::min(rows, (chunk + 1) * length); }
};

// out[c] = sum over p < partials of rows[p * cols + c]; out is f32, bf16 or f16.
void sum_partials(Context& ctx, const float* rows, int64_t partials, int64_t cols, const Vector& out);

}  // namespace tigon::cpu
