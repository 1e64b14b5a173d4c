// Which tiles of the result a cluster of the persistent kernel computes, and in what order.
#pragma once

namespace tigon::cuda::matmul {

constexpr int kGroup = 4;

// Clusters take tiles in turn. Those in flight at a time cover a rectangle that is about a square, so that the panels of A and
// B which they share stay in L2: the order goes across `group` rows of tiles, then to the next column of the group.
struct TileScheduler {
  // A tile here is that of a whole cluster.
  struct Params {
    int tiles_m = 0, tiles_n = 0, group = 0;
    bool along_n = false;  // groups are columns of tiles
  };
  struct Tile {
    int m, n;
  };

  int at;
  const int step;
  __device__ TileScheduler(int cluster, int clusters) : at(cluster), step(clusters) {}

  __device__ __forceinline__ bool next(const Params& p, Tile& tile) {
    if (at >= p.tiles_m * p.tiles_n) return false;
    const int major = p.along_n ? p.tiles_n : p.tiles_m, minor = p.along_n ? p.tiles_m : p.tiles_n;
    const int first = at / (p.group * minor) * p.group, rest = at - first * minor;
    const int size = min(p.group, major - first);
    const int i = first + rest % size, j = rest / size;
    tile = p.along_n ? Tile{j, i} : Tile{i, j};
    at += step;
    return true;
  }
};

}  // namespace tigon::cuda::matmul
