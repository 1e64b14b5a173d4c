// CPU kernels read parameters in fp32. Their gradients are summed from partial rows in index order and
// rounded once, as the last step.
#pragma once

#include <algorithm>

#include "tigon/base/context.h"

namespace tigon::cpu {

// Returns element i.
float number_at(const Vector& v, int64_t i);
// Returns the whole vector in fp32: in place if it is fp32, else as a copy. null stays null.
const float* in_f32(Context& ctx, const Vector& v);

// Splits rows into chunks that each have a partial row. The chunks depend only on the number of rows, so
// results do not depend on the number of threads.
struct RowChunks {
  int64_t rows, length, count;
  explicit RowChunks(int64_t rows, int64_t least = 16, int64_t most = 64)
      : rows(rows),
        length(std::max(least, rows / most + (rows % most != 0))),
        count((rows + length - 1) / length) {}
  int64_t begin(int64_t chunk) const { return chunk * length; }
  int64_t end(int64_t chunk) const { return std::min(rows, (chunk + 1) * length); }
};

// Computes out[c] = sum over p < partials of rows[p * cols + c]; out is f32, bf16 or f16.
void sum_partials(Context& ctx, const float* rows, int64_t partials, int64_t cols, const Vector& out);

}  // namespace tigon::cpu
