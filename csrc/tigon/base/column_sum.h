// The last step of every deterministic column reduction on the CPU: partial rows, summed in index order, rounded once.
#pragma once

#include "tigon/base/context.h"

namespace tigon::cpu {

// out[c] = sum over p < partials of rows[p * cols + c]; out is f32, bf16 or f16.
void sum_partials(Context& ctx, const float* rows, int64_t partials, int64_t cols, const Vector& out);

}  // namespace tigon::cpu
