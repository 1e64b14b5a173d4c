// Products of groups of rows on sm_90a, by the kernels of matmul/.
#include "tigon/base/grouped_gemm.h"

#include "tigon/base/cuda/matmul/epilogue_store.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"

namespace tigon::cuda {
namespace {

using matmul::Groups;
using matmul::Major;

constexpr const char* kOp = "grouped_gemm";

template <class T, Major kMajorA, Major kMajorB, Groups kGroups>
using Product = matmul::Matmul<T, kMajorA, kMajorB, matmul::StoreEpilogue<T, kGroups>, kGroups>;

template <class T, Major kMajorA, Major kMajorB, Groups kGroups>
void run(Context& ctx, const GroupedGemm& g) {
  constexpr bool depth = kGroups == Groups::depth;
  const CUtensorMap d = matmul::make_map<T, matmul::view_of_d(kGroups)>(
      kOp, g.c.data, g.c.cols, depth ? g.a.cols : g.c.rows, g.c.stride, 64, g.groups);
  Product<T, kMajorA, kMajorB, kGroups>::run(kOp, ctx,
                                             {Gemm{.m = depth ? g.a.cols : g.a.rows,
                                                   .n = g.c.cols,
                                                   .k = depth ? g.a.rows : g.a.cols,
                                                   .a = g.a.data,
                                                   .lda = g.a.stride,
                                                   .b = g.b.data,
                                                   .ldb = g.b.stride}},
                                             {d}, {.count = g.groups, .offsets = g.offsets});
}

template <class T>
void run(Context& ctx, const GroupedGemm& g) {
  if (g.over_rows) return run<T, Major::MN, Major::MN, Groups::depth>(ctx, g);
  g.trans_b ? run<T, Major::K, Major::K, Groups::rows>(ctx, g)
            : run<T, Major::K, Major::MN, Groups::rows>(ctx, g);
}

bool fits(const GroupedGemm& g) {
  for (const Matrix* m : {&g.a, &g.b, &g.c})
    if (!matmul::is_tma_matrix(m->data, m->stride) || m->cols % 8 != 0) return false;
  return g.a.dtype != DType::f32;
}

}  // namespace

bool has_grouped_gemm() {
  return Product<__nv_bfloat16, Major::K, Major::K, Groups::rows>::is_available(kOp);
}

void grouped_gemm(Context& ctx, const GroupedGemm& g) {
  TIGON_CHECK(kOp, has_grouped_gemm(), "there is a product of groups for sm_90a only");
  TIGON_CHECK(kOp, fits(g), "rows must be of 16 bits and whole vectors of 16 bytes");
  TIGON_CHECK(kOp, g.a.rows <= matmul::kRagged, "there must be at most ", matmul::kRagged, " rows, got ",
              g.a.rows);
  if (g.c.cols == 0 || (g.a.rows == 0 && !g.over_rows)) return;
  g.a.dtype == DType::f16 ? run<__half>(ctx, g) : run<__nv_bfloat16>(ctx, g);
}

}  // namespace tigon::cuda
