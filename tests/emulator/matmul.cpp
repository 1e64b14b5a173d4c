// The matmuls of base/cuda/matmul in the emulator: every layout, with tails and a second source,
// exact; symmetric ones in batches; groups of rows.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "tigon/base/cuda/matmul/epilogue_gate.cuh"
#include "tigon/base/cuda/matmul/epilogue_statistics.cuh"
#include "tigon/base/cuda/matmul/epilogue_symmetric.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"
#include "tigon/base/make_context.h"

using namespace tigon;
using namespace tigon::cuda;
using matmul::Groups;
using matmul::Major;

namespace {

// `rows` of `cols` small integers, whose sums are exact, and what must not be read or written between them.
struct Values {
  int64_t rows, cols, stride;
  std::vector<uint16_t> memory;
  uint16_t* data;
  Values(int64_t rows, int64_t cols, int64_t pad)
      : rows(rows), cols(cols), stride(cols + pad), memory(size_t(rows * stride + 8), 0xffff) {
    data = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
  }
  uint16_t& at(int64_t r, int64_t c) { return data[r * stride + c]; }
};

// `k` has the K of each source.
template <Major kMajorA, Major kMajorB, class... Ks>
bool is_exact(int64_t m, int64_t n, Ks... k) {
  using T = __nv_bfloat16;
  constexpr bool trans_a = kMajorA == Major::MN, trans_b = kMajorB == Major::K;
  std::array<Gemm, sizeof...(k)> sources;
  std::vector<Values> kept;
  kept.reserve(2 * sizeof...(k));
  std::vector<float> sums(size_t(m * n), 0.0f);
  for (int source = 0; const int64_t depth : {int64_t(k)...}) {
    Values& a = kept.emplace_back(trans_a ? depth : m, trans_a ? m : depth, 8);
    Values& b = kept.emplace_back(trans_b ? n : depth, trans_b ? depth : n, 16);
    for (Values* x : {&a, &b})
      for (int64_t r = 0; r < x->rows; ++r)
        for (int64_t c = 0; c < x->cols; ++c) x->at(r, c) = narrow_bf16(float(rand() % 5 - 2));
    for (int64_t r = 0; r < m; ++r)
      for (int64_t c = 0; c < n; ++c)
        for (int64_t i = 0; i < depth; ++i)
          sums[size_t(r * n + c)] +=
              widen_bf16(trans_a ? a.at(i, r) : a.at(r, i)) * widen_bf16(trans_b ? b.at(c, i) : b.at(i, c));
    sources[source++] = {
        .m = m, .n = n, .k = depth, .a = a.data, .lda = a.stride, .b = b.data, .ldb = b.stride};
  }
  Values d(m, n, 8);
  matmul::Matmul<T, kMajorA, kMajorB, matmul::StoreEpilogue<T>, Groups::none, sizeof...(k)>::run(
      "matmul", *make_cuda_context(), sources,
      {matmul::make_tensor_map("matmul", d.data, matmul::kTensorMapType<T>, n, m, d.stride, 64)});
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < d.stride; ++c) {
      const float sum = c < n ? sums[size_t(r * n + c)] : 0.0f;
      if (d.at(r, c) == (c < n ? narrow_bf16(sum) : 0xffff)) continue;
      printf("matmul: %ld x %ld, %zu sources, A %d B %d: (%ld, %ld) is %g, not %g\n", long(m), long(n),
             sizeof...(k), int(kMajorA), int(kMajorB), long(r), long(c), widen_bf16(d.at(r, c)), sum);
      return false;
    }
  return true;
}

template <class... Ks>
bool are_exact(int64_t m, int64_t n, Ks... k) {
  return is_exact<Major::K, Major::K>(m, n, k...) && is_exact<Major::K, Major::MN>(m, n, k...) &&
         is_exact<Major::MN, Major::K>(m, n, k...) && is_exact<Major::MN, Major::MN>(m, n, k...);
}

// 2 X X^T - C + 3 I of three matrices, or 2 X^T X.
template <Major kMajor>
bool is_symmetric(int64_t n, int64_t k, bool add) {
  using T = __half;
  constexpr int64_t kCount = 3;
  constexpr bool trans = kMajor == Major::MN;
  const int64_t rows = trans ? k : n, cols = trans ? n : k;
  Values x(kCount * rows, cols, 0), c(kCount * n, n, 0), d(kCount * n, n, 0);
  for (Values* v : {&x, &c})
    for (int64_t r = 0; r < v->rows; ++r)
      for (int64_t j = 0; j < v->cols; ++j) v->at(r, j) = narrow_f16(float(rand() % 5 - 2));
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t j = 0; j < r % n; ++j) c.at(r, j) = c.at(r / n * n + j, r % n);
  const Gemm g = {.m = n, .n = n, .k = k, .a = x.data, .lda = cols, .b = x.data, .ldb = cols};
  using Matmul = matmul::Matmul<T, kMajor, kMajor, matmul::SymmetricEpilogue<T>>;
  Matmul::run("matmul", *make_cuda_context(), {g},
              {.d = matmul::make_tensor_map("matmul", d.data, matmul::kTensorMapType<T>, n, n, n, 64, kCount),
               .c = add ? reinterpret_cast<const T*>(c.data) : nullptr,
               .alpha = 2,
               .beta = -1,
               .gamma = 3,
               .size = int(n)},
              {.count = kCount, .lower = true});
  for (int64_t r = 0; r < d.rows; ++r)
    for (int64_t j = 0; j < n; ++j) {
      const int64_t b = r / n;
      float sum = (add ? -widen_f16(c.at(r, j)) : 0) + (j == r % n ? 3 : 0);
      for (int64_t i = 0; i < k; ++i)
        sum += 2 * widen_f16(trans ? x.at(b * k + i, r % n) : x.at(r, i)) *
               widen_f16(trans ? x.at(b * k + i, j) : x.at(b * n + j, i));
      if (d.at(r, j) == narrow_f16(sum)) continue;
      printf("matmul: symmetric %ld x %ld, X %d: (%ld, %ld) is %g, not %g\n", long(n), long(k), int(kMajor),
             long(r), long(j), widen_f16(d.at(r, j)), sum);
      return false;
    }
  return d.memory.back() == 0xffff;
}
bool are_symmetric(int64_t n, int64_t k) {
  return is_symmetric<Major::K>(n, k, true) && is_symmetric<Major::MN>(n, k, false);
}

// Matmuls of groups of so many rows, with rows of no group behind them. What nobody may read is NaN, what
// nobody may write stays so.
template <Major kMajorB, Groups kGroups>
bool groups_are_exact(std::initializer_list<int> sizes, int64_t n, int64_t k) {
  using T = __nv_bfloat16;
  constexpr bool depth = kGroups == Groups::depth, trans_b = kMajorB == Major::K;
  std::vector<int32_t> offsets{0};
  for (int size : sizes) offsets.push_back(offsets.back() + size);
  const int64_t groups = int64_t(sizes.size()), here = offsets.back(), all = here + 70;
  Values a(all, k, 8), b(depth ? all : groups * (trans_b ? n : k), trans_b ? k : n, depth ? 16 : 0),
      d(depth ? groups * k : all, n, depth ? 0 : 8);
  auto fill = [](Values& x, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t c = 0; c < x.cols; ++c) x.at(r, c) = narrow_bf16(float(rand() % 5 - 2));
  };
  fill(a, 0, here);
  for (int64_t e = 0; e < groups; ++e)
    if (depth)
      fill(b, offsets[e], offsets[e + 1]);
    else if (offsets[e] < offsets[e + 1])
      fill(b, e * b.rows / groups, (e + 1) * b.rows / groups);
  matmul::Matmul<T, depth ? Major::MN : Major::K, kMajorB, matmul::StoreEpilogue<T, kGroups>, kGroups>::run(
      "matmul", *make_cuda_context(),
      {Gemm{.m = depth ? k : all,
            .n = n,
            .k = depth ? all : k,
            .a = a.data,
            .lda = a.stride,
            .b = b.data,
            .ldb = b.stride}},
      {matmul::make_map<T, matmul::view_of_d(kGroups)>("matmul", d.data, n, depth ? k : all, d.stride, 64,
                                                       groups)},
      {.count = groups, .offsets = offsets.data()});
  for (int64_t r = 0, e = 0; r < d.rows; ++r) {
    while (e < groups && r >= (depth ? (e + 1) * k : offsets[e + 1])) ++e;
    for (int64_t c = 0; c < d.stride; ++c) {
      float sum = 0;
      for (int64_t i = 0; !depth && e < groups && c < n && i < k; ++i)
        sum += widen_bf16(a.at(r, i)) * widen_bf16(trans_b ? b.at(e * n + c, i) : b.at(e * k + i, c));
      for (int64_t i = offsets[e]; depth && c < n && i < offsets[e + 1]; ++i)
        sum += widen_bf16(a.at(i, r % k)) * widen_bf16(b.at(i, c));
      if (d.at(r, c) == (e < groups && c < n ? narrow_bf16(sum) : 0xffff)) continue;
      printf("matmul: %ld groups, %ld columns, %ld, B %d: (%ld, %ld) is %g, not %g\n", long(groups), long(n),
             long(k), int(kMajorB), long(r), long(c), widen_bf16(d.at(r, c)), sum);
      return false;
    }
  }
  return true;
}
bool groups_are_exact(std::initializer_list<int> sizes, int64_t n, int64_t k) {
  return groups_are_exact<Major::K, Groups::rows>(sizes, n, k) &&
         groups_are_exact<Major::MN, Groups::rows>(sizes, n, k) &&
         groups_are_exact<Major::MN, Groups::depth>(sizes, n, k);
}

// Statistics of rows are written for tiles of columns that exist: of an odd number the last pair has one
// more.
bool statistics_are_inside(int64_t rows, int64_t cols) {
  using T = __nv_bfloat16;
  constexpr int64_t kDepth = 64;
  Values a(rows, kDepth, 0), b(cols, kDepth, 0);
  const int64_t tiles = (cols + matmul::kTileN - 1) / matmul::kTileN;
  std::vector<float2> parts(size_t((tiles + 1) * rows), make_float2(7, 7));
  std::vector<int64_t> target(size_t(rows), 0);
  std::vector<float> target_logit(target.size());
  matmul::Matmul<T, Major::K, Major::K, matmul::StatisticsEpilogue<T>>::run(
      "matmul", *make_cuda_context(),
      {Gemm{.m = rows, .n = cols, .k = kDepth, .a = a.data, .lda = a.stride, .b = b.data, .ldb = b.stride}},
      {parts.data(), target.data(), target_logit.data(), int(rows), int(cols), 1.0f});
  for (int64_t i = 0; i < (tiles + 1) * rows; ++i)
    if ((parts[size_t(i)].x == 7) != (i >= tiles * rows)) {
      printf("matmul: statistics of %ld x %ld end at %ld, not at %ld\n", long(rows), long(cols), long(i),
             long(tiles * rows));
      return false;
    }
  return true;
}
// The gated unit of such matmuls, of rows as they are or gathered: its columns are exact where they are
// kept, and it is as near as its dtype to that of them.
template <Major kMajorB, bool kGather>
bool gates_are_right(std::initializer_list<int> sizes, int64_t inner, int64_t k, bool keeps) {
  using T = __nv_bfloat16;
  constexpr bool trans_b = kMajorB == Major::K;
  std::vector<int32_t> offsets{0};
  for (int size : sizes) offsets.push_back(offsets.back() + size);
  const int64_t groups = int64_t(sizes.size()), here = offsets.back(), all = here + 70, n = 2 * inner;
  constexpr int kChoices = 3;
  Values a(kGather ? (all + kChoices - 1) / kChoices : all, k, 8),
      b(groups * (trans_b ? n : k), trans_b ? k : n, 0), z(all, n, 8), act(all, inner, 8);
  for (Values* x : {&a, &b})
    for (int64_t r = 0; r < (x == &b || kGather ? x->rows : here); ++r)
      for (int64_t c = 0; c < x->cols; ++c)
        x->at(r, c) = narrow_bf16(float(rand() % 5 - 2) * (x == &b ? 0.25f : 1));
  std::vector<int32_t> order;
  for (int64_t r = 0; r < here; ++r)
    order.push_back(kGather ? int32_t(rand() % (a.rows * kChoices)) : int32_t(r));
  auto map = [&](Values& x, int64_t first) {
    return matmul::make_ragged_tensor_map("matmul", x.data + first, matmul::kTensorMapType<T>, inner,
                                          x.stride, 64);
  };
  const GluOptions unit = {.kind = GluKind::swiglu_oai, .limit = 1.5f};
  matmul::Matmul<T, Major::K, kMajorB, matmul::GateEpilogue<T>, Groups::rows, 1, kGather>::run(
      "matmul", *make_cuda_context(),
      {Gemm{.m = all, .n = n, .k = k, .a = a.data, .lda = a.stride, .b = b.data, .ldb = b.stride}},
      {.act = map(act, 0), .gate = map(z, 0), .up = map(z, inner), .keeps = keeps, .unit = unit},
      {.count = groups,
       .offsets = offsets.data(),
       .halves = inner,
       .order = order.data(),
       .choices = kChoices});
  auto column = [&](int64_t r, int64_t e, int64_t c) {
    const int64_t row = kGather ? order[size_t(r)] / kChoices : r;
    float sum = 0;
    for (int64_t i = 0; i < k; ++i)
      sum += widen_bf16(a.at(row, i)) * widen_bf16(trans_b ? b.at(e * n + c, i) : b.at(e * k + i, c));
    return widen_bf16(narrow_bf16(sum));
  };
  for (int64_t r = 0, e = 0; r < all; ++r) {
    while (e < groups && r >= offsets[e + 1]) ++e;
    for (int64_t c = 0; c < z.stride; ++c)
      if (z.at(r, c) != (e < groups && c < n && keeps ? narrow_bf16(column(r, e, c)) : 0xffff)) {
        printf("matmul: kept column (%ld, %ld) is %g\n", long(r), long(c), widen_bf16(z.at(r, c)));
        return false;
      }
    for (int64_t c = 0; c < act.stride; ++c) {
      bool right = act.at(r, c) == 0xffff;
      if (e < groups && c < inner) {
        const double gate = std::min(1.5f, column(r, e, c)),
                     up = std::clamp(column(r, e, inner + c), -1.5f, 1.5f),
                     value = gate / (1 + ::exp(-1.702 * gate)) * (up + 1);
        right = ::fabs(widen_bf16(act.at(r, c)) - value) <= 0x1.01p-8 * ::fabs(value);
      }
      if (right) continue;
      printf("matmul: gated unit (%ld, %ld) is %g\n", long(r), long(c), widen_bf16(act.at(r, c)));
      return false;
    }
  }
  return true;
}
bool gates_are_right(std::initializer_list<int> sizes, int64_t inner, int64_t k) {
  return gates_are_right<Major::MN, false>(sizes, inner, k, true) &&
         gates_are_right<Major::K, false>(sizes, inner, k, false) &&
         gates_are_right<Major::K, true>(sizes, inner, k, true) &&
         gates_are_right<Major::K, true>(sizes, inner, k, false);
}

}  // namespace

// One tile; tails of each size; more tiles and steps than stages, and steps than two leads; second sources of
// less and more than a step. Empty groups, the first and the last too, groups of one row, of whole tiles and
// of an odd number of them; one group of all rows; none.
int main() {
  const bool matmuls = are_exact(256, 256, 64) && are_exact(328, 520, 200) && are_exact(8, 776, 392) &&
                       are_exact(328, 520, 200, 8) && are_exact(264, 264, 128, 72);
  const bool groups = groups_are_exact({0, 1, 300, 128, 0, 0, 257, 64, 0}, 520, 200) &&
                      groups_are_exact({413}, 264, 456) && groups_are_exact({0, 0}, 264, 72);
  const bool gates = gates_are_right({0, 1, 300, 128, 0, 72}, 264, 136) && gates_are_right({140}, 8, 456);
  return matmuls && groups && gates && statistics_are_inside(100, 520) && are_symmetric(8, 72) &&
                 are_symmetric(328, 200) && are_symmetric(776, 64)
             ? 0
             : 1;
}
