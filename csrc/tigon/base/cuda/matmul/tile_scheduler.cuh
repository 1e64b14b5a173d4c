// Which tiles of the result a cluster of the persistent kernel computes, and in what order.
#pragma once

namespace tigon::cuda::matmul {

// Clusters take tiles in turn, one matrix after the other. The order goes across `kGroup` columns of tiles, then to the next row
// of the group, so that the tiles in flight at a time cover a rectangle, whose panels of A and B stay in L2.
struct TileScheduler {
  static constexpr int kGroup = 16;
  // A tile here is that of a whole cluster, which is a square.
  struct Params {
    int tiles_m = 0, tiles_n = 0, matrices = 1;
    bool lower = false;  // no tiles above the diagonal; tiles_m is tiles_n
    __host__ __device__ int tiles() const { return lower ? tiles_m * (tiles_m + 1) / 2 : tiles_m * tiles_n; }
  };
  struct Tile {
    int m, n, matrix;
  };

  int at;
  const int step;
  __device__ TileScheduler(int cluster, int clusters) : at(cluster), step(clusters) {}

  __device__ __forceinline__ bool next(const Params& p, Tile& tile) {
    const int tiles = p.tiles();
    tile.matrix = at / tiles;
    if (tile.matrix >= p.matrices) return false;
    const int i = at % tiles;
    at += step;
    if (p.lower) {  // the last row and the first are as long as the next pair
      const int pair = i / (p.tiles_m + 1), rest = i % (p.tiles_m + 1), last = p.tiles_m - 1 - pair;
      tile.m = rest <= last ? last : pair, tile.n = rest <= last ? rest : rest - last - 1;
      return true;
    }
    const int first = i / (kGroup * p.tiles_m) * kGroup, rest = i - first * p.tiles_m;
    const int columns = min(kGroup, p.tiles_n - first);
    tile.m = rest / columns, tile.n = first + rest % columns;
    return true;
  }
};

}  // namespace tigon::cuda::matmul
