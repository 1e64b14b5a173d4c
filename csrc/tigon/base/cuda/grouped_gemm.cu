// Runs grouped GEMM on sm_90a with the kernels of matmul/.
#include "tigon/base/grouped_gemm.h"

#include "tigon/base/cuda/matmul/epilogue_gate.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {
namespace {

using matmul::Groups;
using matmul::Major;

constexpr const char* kOp = "grouped_gemm";

template <class T, Major kMajorA, Major kMajorB, Groups kGroups, int kSources = 1>
using Matmul = matmul::Matmul<T, kMajorA, kMajorB, matmul::StoreEpilogue<T, kGroups>, kGroups, kSources>;

// Returns g's matmuls with `rows` rows: the second one follows the first along K.
template <int kSources>
std::array<Gemm, kSources> sources_of(const GroupedGemm& g, int64_t rows, int64_t cols) {
  std::array<Gemm, kSources> sources;
  const Matrix *a[] = {&g.a, &g.a2}, *b[] = {&g.b, &g.b2};
  for (int i = 0; i < kSources; ++i)
    sources[i] = Gemm{.m = rows,
                      .n = cols,
                      .k = a[i]->cols,
                      .a = a[i]->data,
                      .lda = a[i]->stride,
                      .b = b[i]->data,
                      .ldb = b[i]->stride};
  return sources;
}

template <class T, Major kMajorA, Major kMajorB, Groups kGroups, int kSources = 1>
void run(Context& ctx, const GroupedGemm& g) {
  constexpr bool depth = kGroups == Groups::depth;
  const CUtensorMap d = matmul::make_map<T, matmul::view_of_d(kGroups)>(
      kOp, g.c.data, g.c.cols, depth ? g.a.cols : g.c.rows, g.c.stride, 64, g.groups);
  auto sources = sources_of<kSources>(g, depth ? g.a.cols : g.a.rows, g.c.cols);
  if (depth) sources[0].k = g.a.rows;
  Matmul<T, kMajorA, kMajorB, kGroups, kSources>::run(kOp, ctx, sources, {d},
                                                      {.count = g.groups, .offsets = g.offsets});
}

template <class T>
void run(Context& ctx, const GroupedGemm& g) {
  if (g.reduce_rows) return run<T, Major::MN, Major::MN, Groups::depth>(ctx, g);
  dispatch_bool(g.a2.data != nullptr, [&](auto second) {
    constexpr int kSources = second ? 2 : 1;
    g.trans_b ? run<T, Major::K, Major::K, Groups::rows, kSources>(ctx, g)
              : run<T, Major::K, Major::MN, Groups::rows, kSources>(ctx, g);
  });
}

template <class T, Major kMajorB, bool kGather, int kSources>
void run_gated(Context& ctx, const GroupedGemm& g, const GroupedGate& gate) {
  const int64_t inner = gate.act.cols;
  auto map = [&](const Matrix& m, int64_t first) {
    return matmul::make_ragged_tensor_map(kOp, m.row<T>(0) + first, matmul::kTensorMapType<T>, inner,
                                          m.stride, 64);
  };
  // A tensor map needs memory even if nothing is stored through it.
  const bool keeps = g.c.data != nullptr;
  const Matrix& kept = keeps ? g.c : gate.act;
  matmul::Matmul<T, Major::K, kMajorB, matmul::GateEpilogue<T>, Groups::rows, kSources, kGather>::run(
      kOp, ctx, sources_of<kSources>(g, gate.act.rows, 2 * inner),
      {.act = map(gate.act, 0),
       .gate = map(kept, 0),
       .up = map(kept, keeps ? inner : 0),
       .keeps = keeps,
       .unit = gate.unit},
      {.count = g.groups,
       .offsets = g.offsets,
       .halves = inner,
       .order = gate.order.as<int32_t>(),
       .choices = g.a.rows > 0 ? gate.act.rows / g.a.rows : 1});
}

template <class T>
void run_gated(Context& ctx, const GroupedGemm& g, const GroupedGate& gate) {
  dispatch_bool(g.a2.data != nullptr, [&](auto second) {
    constexpr int kSources = second ? 2 : 1;
    gate.order  ? run_gated<T, Major::K, true, kSources>(ctx, g, gate)
    : g.trans_b ? run_gated<T, Major::K, false, kSources>(ctx, g, gate)
                : run_gated<T, Major::MN, false, kSources>(ctx, g, gate);
  });
}

void check_rows(const Matrix& m) {
  TIGON_CHECK(kOp, m.rows <= matmul::kRagged, "there must be at most ", matmul::kRagged, " rows, got ",
              m.rows);
}

}  // namespace

bool fits(const GroupedGemm& g) {
  for (const Matrix* m : {&g.a, &g.b, &g.c, &g.a2, &g.b2})
    if (!matmul::is_tma_matrix(m->data, m->stride) || m->cols % 8 != 0) return false;
  return g.a.dtype != DType::f32;
}

bool has_grouped_gemm() { return Matmul<__nv_bfloat16, Major::K, Major::K, Groups::rows>::is_available(kOp); }

void grouped_gemm(Context& ctx, const GroupedGemm& g) {
  TIGON_CHECK(kOp, has_grouped_gemm(), "there is a grouped GEMM for sm_90a only");
  TIGON_CHECK(kOp, fits(g), "rows must be of 16 bits and whole vectors of 16 bytes");
  check_rows(g.a);
  if (g.c.cols == 0 || (g.a.rows == 0 && !g.reduce_rows)) return;
  g.a.dtype == DType::f16 ? run<__half>(ctx, g) : run<__nv_bfloat16>(ctx, g);
}

bool has_grouped_gate(const GroupedGemm& g, const GroupedGate& gate) {
  const Matrix& act = gate.act;
  return has_grouped_gemm() && fits(g) && matmul::is_tma_matrix(act.data, act.stride) && act.cols % 8 == 0 &&
         matmul::has_gate_epilogue(gate.unit.kind) && (!gate.order || (g.trans_b && act.cols <= 1024));
}

void grouped_gated_gemm(Context& ctx, const GroupedGemm& g, const GroupedGate& gate) {
  check_rows(gate.act);
  if (gate.act.rows == 0 || gate.act.cols == 0) return;
  g.a.dtype == DType::f16 ? run_gated<__half>(ctx, g, gate) : run_gated<__nv_bfloat16>(ctx, g, gate);
}

}  // namespace tigon::cuda
