// Launches of persistent CTAs and clusters, as many as are resident.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/ops/divergence/divergence_reduce.cuh"

namespace tigon::cuda {
namespace {

// Columns of a CTA of a cluster: a multiple of 64, so that slices have the row's offset.
int slice_of(int64_t cols, int cluster) { return int(ceil_div(ceil_div(cols, cluster), 64) * 64); }

// Returns false when no such cluster fits on the device.
template <class Kernel, class... Arguments>
bool launch_resident(Context& ctx, OccupancyCache& occupancy, Kernel kernel, int threads, size_t shared,
                     int cluster, int64_t rows, const Arguments&... arguments) {
  const int64_t resident = occupancy.max_active(kOp, kernel, cluster, threads, shared);
  if (resident == 0) return false;
  launch(kOp, ctx, kernel,
         {.blocks = std::min(rows, resident) * cluster,
          .threads = threads,
          .shared = shared,
          .cluster = cluster},
         arguments...);
  return true;
}

}  // namespace
}  // namespace tigon::cuda
