#include "tigon/base/cuda/gemm_cublaslt.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>

#include "tigon/base/aligned_rows.h"
#include "tigon/base/check.h"
#include "tigon/base/cuda/cublaslt_api.h"
#include "tigon/base/dynlib.h"
#include "tigon/base/gemm_pieces.h"
#include "tigon/base/lru_cache.h"

namespace tigon::cuda {
namespace lt {

const Api& api() {
  static const Api table = [] {
    void* lib = open_library({"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"});
    TIGON_CHECK("gemm", lib != nullptr,
                "cuBLASLt must be installed (looked for libcublasLt.so.13 and .12), found none");
    Api a{};
    auto bind = [&](auto& fn, const char* name) {
      fn = reinterpret_cast<std::remove_reference_t<decltype(fn)>>(find_symbol(lib, name));
      TIGON_CHECK("gemm", fn != nullptr, "cuBLASLt lacks the symbol ", name);
    };
    bind(a.create, "cublasLtCreate");
    bind(a.matmul_desc_create, "cublasLtMatmulDescCreate");
    bind(a.matmul_desc_set, "cublasLtMatmulDescSetAttribute");
    bind(a.matmul_desc_destroy, "cublasLtMatmulDescDestroy");
    bind(a.layout_create, "cublasLtMatrixLayoutCreate");
    bind(a.layout_destroy, "cublasLtMatrixLayoutDestroy");
    bind(a.preference_create, "cublasLtMatmulPreferenceCreate");
    bind(a.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    bind(a.preference_destroy, "cublasLtMatmulPreferenceDestroy");
    bind(a.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    bind(a.algo_check, "cublasLtMatmulAlgoCheck");
    bind(a.algo_get, "cublasLtMatmulAlgoConfigGetAttribute");
    bind(a.matmul, "cublasLtMatmul");
    return a;
  }();
  return table;
}

}  // namespace lt

namespace {

void check(lt::Status status, const char* call) {
  TIGON_CHECK("gemm", status == 0, call, " failed with cublasStatus_t ", status);
}

int data_type(DType t) {
  if (t == DType::e4m3) return lt::kR8FE4M3;
  return t == DType::f32 ? lt::kR32F : t == DType::bf16 ? lt::kR16BF : lt::kR16F;
}

// Returns the largest power of two up to `most` that divides `bits`.
uint32_t alignment(uintptr_t bits, uint32_t most = 256) {
  uint32_t a = most;
  while (bits % a != 0) a /= 2;
  return a;
}

// Says how the kernel of a GEMM is chosen: any; one that does not split sums along K; or one that does not
// and also has the algorithm that the weight uses for every number of rows.
enum class Choice : int8_t { any, unsplit, batch_invariant };

// Holds everything that the choice depends on.
struct Problem {
  Gemm g;
  Choice choice = Choice::any;
  std::array<uint32_t, 3> align{};  // of a, b and c

  Problem(const Gemm& gemm, Choice c) : g(gemm), choice(c) {
    auto of = [&](const void* p, int64_t stride, DType t) {
      auto bits = reinterpret_cast<uintptr_t>(p);
      return choice == Choice::batch_invariant ? alignment(bits | uintptr_t(stride) * size_of(t), 16)
                                               : alignment(bits);
    };
    align = {of(g.a, g.lda, g.ab_dtype), of(g.b, g.ldb, g.ab_dtype), of(g.c, g.ldc, g.c_dtype)};
  }
  auto key() const {
    int flags = int(g.trans_a) | int(g.trans_b) << 1 | int(g.beta != 0.0f) << 2 | int(g.fast_sums) << 3 |
                int(choice) << 4;
    return std::tuple(g.m, g.n, g.k, g.lda, g.ldb, g.ldc, int(g.ab_dtype) * 16 + int(g.c_dtype), flags,
                      align);
  }
};

// Row major C = A B is column major C^T = B^T A^T, so our B is cuBLASLt's A.
class Description {
 public:
  explicit Description(const Gemm& g) {
    const lt::Api& api = lt::api();
    check(api.matmul_desc_create(&desc_, lt::kCompute32F, lt::kR32F), "cublasLtMatmulDescCreate");
    try {
      set(lt::kDescTransA, g.trans_b ? lt::kOpT : lt::kOpN);
      set(lt::kDescTransB, g.trans_a ? lt::kOpT : lt::kOpN);
      if (g.ab_dtype != DType::e4m3) return;
      set(lt::kDescScaleModeA, lt::kScaleOuterVector);
      set(lt::kDescScaleModeB, lt::kScaleOuterVector);
      set(lt::kDescScalesA, g.b_scales);
      set(lt::kDescScalesB, g.a_scales);
      set(lt::kDescFastSums, int8_t(g.fast_sums));
    } catch (...) {
      api.matmul_desc_destroy(desc_);
      throw;
    }
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;
  ~Description() { lt::api().matmul_desc_destroy(desc_); }
  operator lt::MatmulDesc() const { return desc_; }

 private:
  template <class T>
  void set(int attribute, T value) {
    check(lt::api().matmul_desc_set(desc_, attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  }
  lt::MatmulDesc desc_ = nullptr;
};

struct Plan {
  explicit Plan(const Gemm& g) : desc(g) {}
  // Takes the kernel of `other`, a plan for another number of rows, if that is given and accepts this number.
  Plan(const Problem& q, lt::Handle handle, const Plan* other = nullptr);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    for (lt::Layout layout : {a, b, c})
      if (layout != nullptr) lt::api().layout_destroy(layout);
  }

  const Description desc;
  lt::Layout a = nullptr, b = nullptr, c = nullptr;
  lt::Algo algo{};
  size_t workspace = 0;
};

// Holds what the GEMMs of a device share. A step has some ten GEMMs, and a new number of rows changes most of
// them.
struct DeviceGemms {
  DeviceGemms() { check(lt::api().create(&handle), "cublasLtCreate"); }

  lt::Handle handle = nullptr;
  LruCache<decltype(std::declval<Problem>().key()), Plan> plans{256};
};

// Keeps what cublaslt_kernels() returns.
struct Described {
  std::mutex mutex;
  std::set<std::string> lines;
};
Described& described() {
  static auto& all = *new Described;
  return all;
}

DeviceGemms& gemms_of(int device) {
  static std::mutex mutex;
  // These are never destroyed: cuBLASLt may be unloaded first when the program ends.
  static auto& devices = *new std::map<int, DeviceGemms>;
  std::lock_guard lock(mutex);
  return devices.try_emplace(device).first->second;
}

int attribute(const lt::Algo& algo, int which) {
  int value = 0;
  size_t written = 0;
  lt::api().algo_get(&algo, which, &value, which == lt::kAlgoCluster ? sizeof(uint16_t) : sizeof value,
                     &written);
  return value;
}

constexpr int64_t kManyClasses = 16384;
bool makes_logits(const Gemm& g) { return g.trans_b && !g.trans_a && g.n >= kManyClasses; }

// Returns the index of the kernel to use. It is the heuristic's first, except for two GEMMs of a loss head on
// Hopper, for which the heuristic ranks a faster tile lower: logits with tiles of 176 or 168 x 128, and fp32
// weight gradients with tiles of 128 x 160.
int choose(const Gemm& g, const lt::HeuristicResult* results, int found) {
  constexpr int64_t kManyRows = 256, kManyColumns = 1024;
  auto place = [&](int wanted) {
    for (int i = 0; i < found; ++i) {
      if (attribute(results[i].algo, lt::kAlgoTile) == wanted && results[i].state == 0) return i;
    }
    return 0;
  };
  if (g.ab_dtype == DType::f32) return 0;
  if (makes_logits(g) && g.m >= kManyRows && g.k >= kManyColumns) {
    int i = place(lt::kTile176x128);
    return i > 0 ? i : place(lt::kTile168x128);
  }
  bool dweight = g.trans_a && !g.trans_b && g.m >= kManyClasses && g.k >= kManyRows && g.n >= kManyColumns;
  if (dweight && (g.c_dtype == DType::f32 || g.k <= 4096)) return place(lt::kTile128x160);
  return 0;
}

// Delegates to the other constructor, so that the destructor runs if this one throws from here on.
Plan::Plan(const Problem& q, lt::Handle handle, const Plan* other) : Plan(q.g) {
  const lt::Api& api = lt::api();
  const Gemm& g = q.g;
  auto layout = [&](lt::Layout& l, DType t, int64_t rows, int64_t cols, int64_t ld) {
    check(api.layout_create(&l, data_type(t), uint64_t(cols), uint64_t(rows), ld),
          "cublasLtMatrixLayoutCreate");
  };
  layout(a, g.ab_dtype, g.trans_b ? g.n : g.k, g.trans_b ? g.k : g.n, g.ldb);
  layout(b, g.ab_dtype, g.trans_a ? g.k : g.m, g.trans_a ? g.m : g.k, g.lda);
  layout(c, g.c_dtype, g.m, g.n, g.ldc);
  lt::HeuristicResult checked{};
  if (other != nullptr && api.algo_check(handle, desc, a, b, c, c, &other->algo, &checked) == 0) {
    algo = other->algo, workspace = checked.workspace_size;
    return;
  }
  lt::Preference pref = nullptr;
  check(api.preference_create(&pref), "cublasLtMatmulPreferenceCreate");
  size_t most_workspace = kGemmWorkspace;
  // Split-K partial sums are never added in 16 bits.
  uint32_t reductions = q.choice == Choice::any ? lt::kReduceInComputeType : lt::kReduceNone;
  const auto& [align_b, align_a, align_c] = q.align;
  api.preference_set(pref, lt::kPrefMaxWorkspace, &most_workspace, sizeof most_workspace);
  api.preference_set(pref, lt::kPrefReductions, &reductions, sizeof reductions);
  api.preference_set(pref, lt::kPrefAlignA, &align_a, sizeof align_a);
  api.preference_set(pref, lt::kPrefAlignB, &align_b, sizeof align_b);
  api.preference_set(pref, lt::kPrefAlignC, &align_c, sizeof align_c);
  api.preference_set(pref, lt::kPrefAlignD, &align_c, sizeof align_c);
  std::array<lt::HeuristicResult, 16> results{};
  int found = 0;
  lt::Status status =
      api.heuristic(handle, desc, a, b, c, c, pref, int(results.size()), results.data(), &found);
  api.preference_destroy(pref);
  TIGON_CHECK("gemm", status == 0 && found > 0, "cuBLASLt has no kernel for a ", g.m, " x ", g.n, " x ", g.k,
              " matmul of ", name_of(g.ab_dtype), " into ", name_of(g.c_dtype), " (cublasStatus_t ", status,
              ")");
  const lt::HeuristicResult& best = results[size_t(choose(g, results.data(), found))];
  algo = best.algo;
  workspace = best.workspace_size;
}

// Returns the kernel for GEMMs with a weight and this many rows. It adds along K in one order whatever the
// number of rows: all have the algorithm that the heuristic picks for many rows, and the tile that it picks
// for the nearest number of rows from 1024 to 8192.
std::shared_ptr<const Plan> weight_plan(DeviceGemms& gemms, const Problem& q) {
  constexpr int64_t kFewest = 1024, kMost = 8192, kRows = 128, kVector = 8;
  Problem of = q;
  of.choice = Choice::unsplit;
  of.g.lda = (of.g.k + kVector - 1) / kVector * kVector,
  of.g.ldc = (of.g.n + kVector - 1) / kVector * kVector;
  auto at = [&](int64_t rows) {
    of.g.m = rows;
    return gemms.plans.get(of.key(), [&] { return std::make_shared<const Plan>(of, gemms.handle); });
  };
  std::shared_ptr<const Plan> many = at(kMost),
                              plan = at(std::clamp((q.g.m + kRows - 1) / kRows * kRows, kFewest, kMost));
  if (attribute(plan->algo, lt::kAlgoId) != attribute(many->algo, lt::kAlgoId)) plan = many;
  auto is = [&](int which) { return attribute(plan->algo, which); };
  TIGON_CHECK(
      "gemm", is(lt::kAlgoSplitK) <= 1 && is(lt::kAlgoReduction) == 0,
      "deterministic matmuls must have a kernel that does not split its sums, and cuBLASLt has none for ",
      q.g.n, " x ", q.g.k, " in ", name_of(q.g.ab_dtype));
  std::ostringstream line;
  line << "[*, " << q.g.k << "] x [" << q.g.k << ", " << q.g.n << "]" << (q.g.trans_b ? "^T " : " ")
       << name_of(q.g.ab_dtype) << " to " << name_of(q.g.c_dtype) << ": algorithm " << is(lt::kAlgoId)
       << ", tile " << is(lt::kAlgoTile) << ", stages " << is(lt::kAlgoStages) << ", cluster "
       << is(lt::kAlgoCluster);
  std::lock_guard lock(described().mutex);
  described().lines.insert(line.str());
  return plan;
}

void run_piece(Context& ctx, const Gemm& g, Choice choice, int device, GemmWorkspace& workspace) {
  DeviceGemms& gemms = gemms_of(device);
  lt::Handle handle = gemms.handle;
  const Problem q(g, choice);
  std::shared_ptr<const Plan> plan = gemms.plans.get(q.key(), [&] {
    std::shared_ptr<const Plan> algorithm;
    if (choice == Choice::batch_invariant) algorithm = weight_plan(gemms, q);
    return std::make_shared<const Plan>(q, handle, algorithm.get());
  });
  workspace.kernel.reserve(ctx, plan->workspace);
  // A plan is shared between calls, but scales belong to one call.
  std::optional<Description> own;
  if (g.ab_dtype == DType::e4m3) own.emplace(g);
  check(lt::api().matmul(handle, own ? *own : plan->desc, &g.alpha, g.b, plan->a, g.a, plan->b, &g.beta, g.c,
                         plan->c, g.c, plan->c, &plan->algo, workspace.kernel.data, workspace.kernel.size,
                         ctx.stream()),
        "cublasLtMatmul");
}

// Copies rows of an operand to 16-byte boundaries if they begin elsewhere: the kernels for other alignments
// add in another order.
void align(Context& ctx, Matrix from, const void*& data, int64_t& stride, GemmWorkspace::Buffer& buffer) {
  from.data = const_cast<void*>(data), from.stride = stride;
  if (rows_are_aligned(from)) return;
  Matrix to = from;
  to.stride = aligned_stride(from);
  to.data = buffer.reserve(ctx, size_t(to.rows * to.stride) * size_of(to.dtype));
  copy_rows(ctx, from, to);
  data = to.data, stride = to.stride;
}

}  // namespace

void cublaslt_gemm(Context& ctx, const Gemm& given, int device, GemmWorkspace& workspace) {
  Gemm g = given;
  if (g.m == 0 || g.n == 0) return;
  // Without a split of K, and with an odd vocabulary cut for few rows as for many, a row of logits is bitwise
  // equal whatever the number of other rows. Other GEMMs have that only in a deterministic context.
  const Choice choice = ctx.deterministic && !g.trans_a && !g.reduce_rows ? Choice::batch_invariant
                        : makes_logits(g)                                 ? Choice::unsplit
                                                                          : Choice::any;
  if (choice == Choice::batch_invariant) {
    align(ctx, {.dtype = g.ab_dtype, .rows = g.m, .cols = g.k}, g.a, g.lda, workspace.a);
    align(ctx, {.dtype = g.ab_dtype, .rows = g.trans_b ? g.n : g.k, .cols = g.trans_b ? g.k : g.n}, g.b,
          g.ldb, workspace.b);
  }
  GemmPieces pieces = choice == Choice::any ? gemm_pieces(g) : gemm_pieces(g, 0);
  for (int i = 0; i < pieces.count; ++i) run_piece(ctx, pieces.piece[size_t(i)], choice, device, workspace);
}

std::string cublaslt_kernels() {
  std::lock_guard lock(described().mutex);
  std::string all;
  for (const std::string& line : described().lines) all += line + "\n";
  return all;
}

}  // namespace tigon::cuda
