// Decides which tiles of the result a cluster of the persistent kernel computes, and in what order.
#pragma once

#include <cstdint>

namespace tigon::cuda::matmul {

// A tile of the result is kTileM x kTileN and summed in steps of kTileK, which are the 128 bytes of a
// swizzled row.
constexpr int kTileM = 128, kTileN = 256, kTileK = 64, kCluster = 2;

// Says what a launch computes: matmuls of adjacent matrices, or one for each group of rows, which lie one
// after the other.
//   rows    a group's rows of A times its matrix of B
//   depth   a group's rows of A, transposed, times its rows of B: the groups are along K
enum class Groups { none, rows, depth };

// Describes the tile of a CTA.
struct Tile {
  int m, n;        // its first row and column in A, B and the result
  int matrix;      // or group
  int begin, end;  // the group's rows
  int k_blocks;
  // The other CTA's tile lies below or above and reads the same columns of B. Otherwise it lies to the right
  // or left.
  bool shares_b;
};

// Clusters take tiles in turn, two by two, one matrix after the other. The order goes across `kAcross`
// columns of tiles, then to the next rows, so that the tiles in flight at a time cover a rectangle, whose
// panels of A and B stay in L2. A pair is a square, one tile below the other. If the number of rows of tiles
// is odd, the last row has pairs side by side.
template <Groups kGroups>
struct TileScheduler {
  static constexpr int kAcross = 16;
  struct Params {
    // Count the rows (unused with Groups::rows) and columns of tiles of a matrix.
    int m = 0, tiles_n = 0;
    int k_blocks = 0;  // unused with Groups::depth
    int matrices = 1;
    // Skips squares above the diagonal; a matrix then has as many rows as columns.
    bool lower = false;
    const int32_t* offsets = nullptr;  // [matrices + 1]: the groups' first rows
  };

  // These are the next pair, the first pair of the matrix, and the matrix.
  int at, first = 0, matrix = 0;
  const int step, rank;
  __device__ TileScheduler(int cluster, int clusters, unsigned rank)
      : at(cluster), step(clusters), rank(int(rank)) {}

  __device__ __forceinline__ bool next(const Params& p, Tile& tile) {
    int rows = p.m, pairs, squares_m, begin = 0, end = 0;
    for (;; first += pairs, ++matrix) {
      if (matrix == p.matrices) return false;
      if constexpr (kGroups != Groups::none) begin = p.offsets[matrix], end = p.offsets[matrix + 1];
      if constexpr (kGroups == Groups::rows) rows = end - begin;
      const int tiles_m = (rows + kTileM - 1) / kTileM;
      squares_m = tiles_m / 2;
      pairs = p.lower ? p.tiles_n * (p.tiles_n + 1) / 2
                      : squares_m * p.tiles_n + tiles_m % 2 * ((p.tiles_n + 1) / 2);
      if (at < first + pairs) break;
    }
    const int i = at - first;
    at += step;
    tile.shares_b = p.lower || i < squares_m * p.tiles_n;
    int m, n;
    // A row and its counterpart, counted from the last one, have tiles_n + 1 tiles together.
    if (p.lower) {
      const int pair = i / (p.tiles_n + 1), rest = i % (p.tiles_n + 1), last = p.tiles_n - 1 - pair;
      m = rest <= last ? last : pair, n = rest <= last ? rest : rest - last - 1;
    } else if (tile.shares_b) {
      const int left = i / (kAcross * squares_m) * kAcross, rest = i - left * squares_m;
      const int across = min(kAcross, p.tiles_n - left);
      m = rest / across, n = left + rest % across;
    } else {
      m = squares_m, n = (i - squares_m * p.tiles_n) * 2 + rank;
    }
    tile.m = (m * 2 + (tile.shares_b ? rank : 0)) * kTileM + (kGroups == Groups::rows ? begin : 0);
    tile.n = n * kTileN;
    tile.matrix = matrix, tile.begin = begin, tile.end = end;
    // An empty group has a step of zeros.
    tile.k_blocks = kGroups == Groups::depth ? max(1, (end - begin + kTileK - 1) / kTileK) : p.k_blocks;
    return true;
  }
};

}  // namespace tigon::cuda::matmul
