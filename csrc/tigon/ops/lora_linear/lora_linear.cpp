#include "tigon/ops/lora_linear/lora_linear.h"

#include <algorithm>
#include <vector>

#include "tigon/base/matrix_gemm.h"
#include "tigon/base/op.h"
#include "tigon/ops/fp8_linear/fp8_linear.h"

namespace tigon {
namespace {

constexpr const char* kOp = "lora_linear";

Matrix columns_of(Matrix m, int64_t first, int64_t count) {
  m.data = static_cast<char*>(m.data) + first * int64_t(size_of(m.dtype)), m.cols = count;
  return m;
}

Matrix scratch(Context& ctx, DType dtype, int64_t rows, int64_t cols) {
  return {.data = ctx.scratch(size_of(dtype) * size_t(rows * cols)),
          .dtype = dtype,
          .rows = rows,
          .cols = cols,
          .stride = cols};
}

void copy(Context& ctx, std::span<const LoraCopy> list) {
  if (!list.empty()) TIGON_RUN(kOp, ctx, lora_copy, list);
}
void drop(Context& ctx, const LoraDropout& a) { TIGON_RUN(kOp, ctx, lora_dropout, a); }
void fill(Context& ctx, const Vector& bias, const Matrix& y) {
  on_device(kOp, ctx, [&] { cpu::lora_bias(ctx, bias, y); }, TIGON_ON_CUDA(cuda::lora_bias(ctx, bias, y)));
}

// Computes c += the sum of the matmuls, or c = the sum: as one GEMM if the device has such a kernel,
// otherwise one after the other.
void add_gemms(Context& ctx, std::vector<MatrixGemm>& gemms, bool add) {
  bool done = gemms.empty();
  if (!add && !done) on_device(kOp, ctx, [] {}, TIGON_ON_CUDA(done = cuda::lora_gemms(ctx, gemms)));
  // PyTorch's bf16 GEMM on the CPU that adds to a result is slower the longer its K is, so the base's goes
  // first there.
  if (ctx.device() == Device::cpu && !done && gemms[0].c.dtype == DType::bf16)
    std::reverse(gemms.begin(), gemms.end());
  for (MatrixGemm& p : gemms) {
    if (done) break;
    p.beta = float(add), add = true;
    gemm(ctx, p);
  }
}

int64_t total_columns(std::span<const LoraAdapter> adapters) {
  int64_t columns = 0;
  for (const LoraAdapter& l : adapters) columns += lora_columns(l.a.rows);
  return columns;
}

// Holds the adapters in x's dtype, with ranks filled up with zeros: each A is below the previous one, so that
// adapters of one x are one GEMM.
struct Packed {
  Matrix a;                    // [R, K]
  std::vector<Matrix> b;       // [N, columns of the adapter]
  std::vector<int64_t> first;  // column of each in t

  Packed(Context& ctx, const Matrix& x, std::span<const LoraAdapter> adapters, bool need_a, bool need_b) {
    auto as_is = [&](const Matrix& m, int64_t rank) {
      return m.dtype == x.dtype && lora_columns(rank) == rank;
    };
    const bool one = adapters.size() == 1 && as_is(adapters[0].a, adapters[0].a.rows);
    int64_t columns = total_columns(adapters), elements = need_a && !one ? columns * x.cols : 0;
    for (const LoraAdapter& l : adapters)
      if (need_b && !as_is(l.b, l.a.rows)) elements += l.b.rows * lora_columns(l.a.rows);
    char* memory =
        elements > 0 ? static_cast<char*>(ctx.scratch(size_of(x.dtype) * size_t(elements))) : nullptr;
    auto take = [&](int64_t rows, int64_t cols) {
      char* data = memory;
      // Each copy has whole 16-byte units, since columns are multiples of 8.
      memory += int64_t(size_of(x.dtype)) * rows * cols;
      return Matrix{.data = data, .dtype = x.dtype, .rows = rows, .cols = cols, .stride = cols};
    };
    std::vector<LoraCopy> copies;
    if (need_a) a = one ? adapters[0].a : take(columns, x.cols);
    columns = 0;
    for (const LoraAdapter& l : adapters) {
      const int64_t rank = l.a.rows, wide = lora_columns(rank);
      if (need_a && !one) copies.push_back({l.a, rows_from(a, columns, wide)});
      if (need_b) b.push_back(as_is(l.b, rank) ? l.b : take(l.b.rows, wide));
      if (need_b && b.back().data != l.b.data) copies.push_back({l.b, b.back()});
      first.push_back(columns);
      columns += wide;
    }
    copy(ctx, copies);
  }
};

// Calls fn(first adapter, its first column of t, columns, x or d(x)): adapters with dropout one by one, the
// others as many at once as are adjacent and have one scale. Those that `skip` selects are passed over.
template <class Skip, class Fn>
void for_each_run(Context& ctx, const Matrix& x, std::span<const LoraAdapter> adapters, const Vector& seed,
                  bool drops, const Packed& packed, const Skip& skip, const Fn& fn) {
  Matrix dropped{};
  for (size_t i = 0; i < adapters.size();) {
    const size_t begin = i;
    const int64_t first = packed.first[i];
    int64_t columns = 0;
    auto take = [&] { columns += lora_columns(adapters[i++].a.rows); };
    if (skip(adapters[begin])) {
      ++i;
      continue;
    }
    take();
    if (adapters[begin].dropout > 0.0) {
      if (drops) {
        if (dropped.data == nullptr) dropped = scratch(ctx, x.dtype, x.rows, x.cols);
        drop(ctx, {.from = x,
                   .to = dropped,
                   .p = adapters[begin].dropout,
                   .stream = uint32_t(begin),
                   .seed = seed});
      }
      fn(begin, first, columns, dropped);
    } else {
      while (i < adapters.size() && adapters[i].dropout == 0.0 &&
             adapters[i].scale == adapters[begin].scale && !skip(adapters[i]))
        take();
      fn(begin, first, columns, x);
    }
  }
}

void require_call(const char* op, const Matrix& x, std::span<const LoraBase> bases,
                  std::span<const LoraAdapter> adapters, const Vector& seed, const Matrix& t) {
  require_float(op, "x", x.dtype);
  TIGON_CHECK(op, x.cols >= 1, "x must have at least one column, got ", x.cols);
  TIGON_CHECK(op, !bases.empty(), "weight must be given, got none");
  for (const LoraBase& l : bases) {
    TIGON_CHECK(op, l.weight.rows >= 1, "weight must have at least one row, got ", l.weight.rows);
    require_matrix(op, "weight", l.weight, l.weight.rows, x.cols, l.scales ? DType::e4m3 : x.dtype);
    if (l.scales) {
      require_vector(op, "scales", l.scales, l.weight.rows, DType::f32);
      TIGON_CHECK(op, x.cols % kFp8Multiple == 0 && l.weight.rows % kFp8Multiple == 0,
                  "weight must have rows and columns by the multiple of ", kFp8Multiple, ", got [",
                  l.weight.rows, ", ", x.cols, "]");
    }
    if (l.bias) require_vector(op, "bias", l.bias, l.weight.rows, x.dtype);
  }
  bool drops = false;
  for (const LoraAdapter& l : adapters) {
    TIGON_CHECK(op, l.base >= 0 && l.base < int64_t(bases.size()), "an adapter's linear must be in [0, ",
                bases.size(), "), got ", l.base);
    require_float(op, "a", l.a.dtype);
    TIGON_CHECK(op, l.a.rows >= 1, "a must have at least one row, got ", l.a.rows);
    require_matrix(op, "a", l.a, l.a.rows, x.cols, adapters[0].a.dtype);
    require_matrix(op, "b", l.b, bases[size_t(l.base)].weight.rows, l.a.rows, l.a.dtype);
    TIGON_CHECK(op, l.dropout >= 0.0 && l.dropout < 1.0, "dropout must be in [0, 1), got ", l.dropout);
    drops = drops || l.dropout > 0.0;
  }
  if (drops) require_vector(op, "seed", seed, 1, DType::i64);
  require_matrix(op, "t", t, x.rows, total_columns(adapters), x.dtype);
}

}  // namespace

void lora_linear_fwd(Context& ctx, const LoraLinearFwd& a) {
  const char* op = "lora_linear";
  require_call(op, a.x, a.bases, a.adapters, a.seed, a.t);
  for (const LoraBase& l : a.bases) {
    require_result(op, "y", l.y, {.dtype = a.x.dtype, .rows = a.x.rows, .cols = l.weight.rows});
    if (!l.scales || l.y.data == nullptr) continue;
    require_matrix(op, "xq", a.xq, a.x.rows, a.x.cols, DType::e4m3);
    require_vector(op, "xs", a.xs, a.x.rows, DType::f32);
  }
  if (a.x.rows == 0) return;
  const bool need_b = std::any_of(a.bases.begin(), a.bases.end(), [](const LoraBase& l) { return l.y.data; });
  const Packed packed(ctx, a.x, a.adapters, !a.has_t, need_b);
  if (!a.has_t)
    for_each_run(
        ctx, a.x, a.adapters, a.seed, true, packed, [](const LoraAdapter&) { return false; },
        [&](size_t i, int64_t first, int64_t columns, const Matrix& x) {
          gemm(ctx, {.a = x,
                     .b = rows_from(packed.a, first, columns),
                     .c = columns_of(a.t, first, columns),
                     .trans_b = true,
                     .alpha = a.adapters[i].scale});
        });
  // The base's GEMM comes last: what it adds to was written once, and is read with the result anyway.
  for (size_t g = 0; g < a.bases.size(); ++g) {
    const LoraBase& l = a.bases[g];
    if (l.y.data == nullptr) continue;
    if (l.bias) fill(ctx, l.bias, l.y);
    std::vector<MatrixGemm> gemms;
    auto add = [&](const Matrix& from, const Matrix& weight) {
      gemms.push_back({.a = from, .b = weight, .c = l.y, .trans_b = true});
    };
    for (size_t i = 0; i < a.adapters.size(); ++i) {
      // The zeros after the rank are left out: times infinity they are NaN.
      const int64_t rank = a.adapters[i].a.rows;
      if (a.adapters[i].base == int64_t(g))
        add(columns_of(a.t, packed.first[i], rank), columns_of(packed.b[i], 0, rank));
    }
    if (!l.scales) add(a.x, l.weight);
    add_gemms(ctx, gemms, bool(l.bias));
    if (l.scales)
      fp8_linear_fwd(ctx, {.xq = a.xq,
                           .xs = a.xs,
                           .wq = l.weight,
                           .ws = l.scales,
                           .y = l.y,
                           .add = l.bias || !gemms.empty()});
  }
}

void lora_linear_bwd(Context& ctx, const LoraLinearBwd& a) {
  const char* op = "lora_linear_bwd";
  require_call(op, a.x, a.bases, a.adapters, a.seed, a.t);
  for (const LoraBase& l : a.bases) {
    if (l.y.data != nullptr) require_matrix(op, "dy", l.y, a.x.rows, l.weight.rows, a.x.dtype);
    if (l.transposed.data != nullptr)
      require_matrix(op, "transposed", l.transposed, a.x.cols, l.weight.rows, DType::e4m3);
    if (l.dyq.data == nullptr) continue;
    require_matrix(op, "dyq", l.dyq, a.x.rows, l.weight.rows, DType::e4m3);
    require_vector(op, "dys", l.dys, a.x.rows, DType::f32);
  }
  const DType gradient = !a.adapters.empty() && a.adapters[0].a.dtype == a.x.dtype ? a.x.dtype : DType::f32;
  for (const LoraAdapter& l : a.adapters)
    if (l.db.data != nullptr) require_matrix(op, "db", l.db, l.b.rows, l.b.cols, gradient);
  if (a.da.data != nullptr) require_matrix(op, "da", a.da, a.t.cols, a.x.cols, gradient);
  if (a.dx.data != nullptr) require_matrix(op, "dx", a.dx, a.x.rows, a.x.cols, a.x.dtype);

  auto absent = [&](const LoraAdapter& l) {
    return a.x.rows == 0 || a.bases[size_t(l.base)].y.data == nullptr;
  };
  std::vector<LoraCopy> zeros;
  auto zero = [&](const Matrix& m) { zeros.push_back({{.dtype = m.dtype, .cols = 0}, m}); };
  int64_t column = 0;
  bool any = false;
  for (const LoraAdapter& l : a.adapters) {
    const int64_t wide = lora_columns(l.a.rows);
    if (absent(l)) {
      if (l.db.data != nullptr) zero(l.db);
      if (a.da.data != nullptr) zero(rows_from(a.da, column, wide));
    }
    any = any || !absent(l);
    column += wide;
  }
  copy(ctx, zeros);
  if (a.x.rows == 0) return;

  const bool need_dt = any && (a.dx.data != nullptr || a.da.data != nullptr);
  const Packed packed(ctx, a.x, a.adapters, a.dx.data != nullptr, need_dt);
  const Matrix dt = need_dt ? scratch(ctx, a.x.dtype, a.x.rows, a.t.cols) : Matrix{};
  for (size_t i = 0; i < a.adapters.size(); ++i) {
    const LoraAdapter& l = a.adapters[i];
    if (absent(l)) continue;
    const Matrix& dy = a.bases[size_t(l.base)].y;
    if (need_dt) {
      const Matrix& b = packed.b[i];
      gemm(ctx, {.a = dy, .b = b, .c = columns_of(dt, packed.first[i], b.cols), .alpha = l.scale});
    }
    if (l.db.data != nullptr)
      gemm(ctx, {.a = dy, .b = columns_of(a.t, packed.first[i], l.a.rows), .c = l.db, .trans_a = true});
  }
  if (a.da.data != nullptr)
    for_each_run(ctx, a.x, a.adapters, a.seed, true, packed, absent,
                 [&](size_t, int64_t first, int64_t columns, const Matrix& x) {
                   gemm(ctx, {.a = columns_of(dt, first, columns),
                              .b = x,
                              .c = rows_from(a.da, first, columns),
                              .trans_a = true});
                 });
  if (a.dx.data == nullptr) return;
  bool add = false;
  Matrix undropped{};
  std::vector<MatrixGemm> gemms;
  for_each_run(
      ctx, a.x, a.adapters, a.seed, false, packed, absent,
      [&](size_t i, int64_t first, int64_t columns, const Matrix&) {
        MatrixGemm own{
            .a = columns_of(dt, first, columns), .b = rows_from(packed.a, first, columns), .c = a.dx};
        const double p = a.adapters[i].dropout;
        if (p == 0.0) return gemms.push_back(own);
        if (add && undropped.data == nullptr) undropped = scratch(ctx, a.x.dtype, a.x.rows, a.x.cols);
        if (add) own.c = undropped;
        gemm(ctx, own);
        drop(ctx, {.from = own.c, .to = a.dx, .p = p, .stream = uint32_t(i), .seed = a.seed, .add = add});
        add = true;
      });
  for (const LoraBase& l : a.bases)
    if (l.y.data != nullptr && !l.scales) gemms.push_back({.a = l.y, .b = l.weight, .c = a.dx});
  add_gemms(ctx, gemms, add);
  add = add || !gemms.empty();
  for (const LoraBase& l : a.bases) {
    if (l.y.data == nullptr || !l.scales) continue;
    Matrix wt = l.transposed;
    if (wt.data == nullptr) {
      wt = scratch(ctx, DType::e4m3, a.x.cols, l.weight.rows);
      fp8_transpose(ctx, {.q = l.weight, .qt = wt});
    }
    fp8_linear_bwd(ctx, {.dy = l.y,
                         .wt = wt,
                         .ws = l.scales,
                         .dyq = l.dyq,
                         .dys = l.dys,
                         .need_dweight = false,
                         .dx = a.dx,
                         .add = add});
    add = true;
  }
  if (!add) copy(ctx, std::vector<LoraCopy>{{{.dtype = a.dx.dtype}, a.dx}});
}

void dora_factors(Context& ctx, const DoraFactors& call) {
  auto run = [](Context& ctx, const DoraFactors& a) {
    const int64_t rows = a.weight.rows, cols = a.weight.cols;
    if (cols == 0) return;
    Matrix packed = a.a;
    if (packed.dtype != a.weight.dtype) {
      packed = scratch(ctx, a.weight.dtype, lora_columns(a.a.rows), cols);
      copy(ctx, std::vector<LoraCopy>{{a.a, packed}});
    }
    const DoraGemms gemms = {.cross = scratch(ctx, DType::f32, rows, packed.rows),
                             .gram = scratch(ctx, DType::f32, packed.rows, packed.rows)};
    gemm(ctx, {.a = a.weight, .b = packed, .c = gemms.cross, .trans_b = true});
    gemm(ctx, {.a = packed, .b = packed, .c = gemms.gram, .trans_b = true, .unrounded = true});
    on_device(
        kOp, ctx, [&] { cpu::dora_factors(ctx, a, gemms); },
        TIGON_ON_CUDA(cuda::dora_factors(ctx, a, gemms)));
  };
  run_op("dora_factors", ctx, call, run, run);
}
TIGON_OPERATOR(dora_factors, DoraFactors, "dora_factors", none)
TIGON_DEFINE_ENTRY(scale_rows, ScaleRows, "scale_rows", "scale_rows", none)

}  // namespace tigon
