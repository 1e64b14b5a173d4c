// Which tiles of the result a cluster of the persistent kernel computes, and in what order.
#pragma once

namespace tigon::cuda::matmul {

// Clusters take tiles in turn. The order goes across `kGroup` columns of tiles, then to the next row of the group, so that the
// tiles in flight at a time cover a rectangle, whose panels of A and B stay in L2.
struct TileScheduler {
  static constexpr int kGroup = 16;
  // A tile here is that of a whole cluster.
  struct Params {
    int tiles_m = 0, tiles_n = 0;
  };
  struct Tile {
    int m, n;
  };

  int at;
  const int step;
  __device__ TileScheduler(int cluster, int clusters) : at(cluster), step(clusters) {}

  __device__ __forceinline__ bool next(const Params& p, Tile& tile) {
    if (at >= p.tiles_m * p.tiles_n) return false;
    const int first = at / (kGroup * p.tiles_m) * kGroup, rest = at - first * p.tiles_m;
    const int columns = min(kGroup, p.tiles_n - first);
    tile = {rest / columns, first + rest % columns};
    at += step;
    return true;
  }
};

}  // namespace tigon::cuda::matmul
