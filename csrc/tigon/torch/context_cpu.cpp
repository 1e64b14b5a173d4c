// A CPU call inside PyTorch uses PyTorch's thread pool, its allocator for scratch, and its GEMM. There is one
// pool per process, since a second OpenMP runtime costs milliseconds per call.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "tigon/base/dispatch.h"
#include "tigon/base/gemm_cpu.h"
#include "tigon/torch/context.h"

// PyTorch offers this entry to compiled graphs. Calling it avoids the dispatcher, which takes no numbers from
// here. It is null if this PyTorch does not have it.
extern "C" [[gnu::weak]] AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self,
                                                                 AtenTensorHandle mat1, AtenTensorHandle mat2,
                                                                 double beta, double alpha);

namespace {

std::atomic<bool> onednn_is_there = false;

}  // namespace

// Python calls this once it knows that PyTorch has oneDNN's linear operator in the form used here.
extern "C" TIGON_API void tigon_enable_onednn() { onednn_is_there = true; }

namespace tigon::torch_shim {
namespace {

using torch::headeronly::ScalarType;

// MKL, PyTorch's choice for float32, runs at half of oneDNN's rate on AMD (Zen 5: 150 against 280 GF/s on two
// cores).
bool prefers_onednn() {
#if defined(__x86_64__)
  static const bool amd = __builtin_cpu_is("amd");
  return amd && onednn_is_there;
#else
  return false;
#endif
}

// oneDNN's bf16 GEMM on AMX multiplies what follows a row of A, up to a multiple of 32 elements, by zeros.
// That gives NaN if the next row, or the memory after the matrix, holds a NaN or an infinity there.
constexpr int64_t kAmxColumns = 32;
bool reads_past_rows(const Gemm& g) {
#if defined(__x86_64__)
  static const bool amx_bf16 = [] {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1) != 0;
  }();
  return amx_bf16 && g.ab_dtype == DType::bf16 && !g.trans_a && !g.padded_a && g.k % kAmxColumns != 0;
#else
  return false;
#endif
}

class TorchExecutor final : public Executor {
 public:
  int threads() const override { return int(torch::stable::get_num_threads()); }
  void run(int64_t tasks, void (*fn)(void*, int64_t), void* arg) override {
    torch::stable::parallel_for(0, tasks, 1, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) fn(arg, i);
    });
  }
};

class TorchCpuContext final : public Context {
 public:
  explicit TorchCpuContext(const Tensor& like) : like_(like) {}
  Device device() const override { return Device::cpu; }
  void* stream() const override { return nullptr; }
  Executor& executor() override { return executor_; }
  void* scratch(size_t bytes) override {
    blocks_.push_back(make(like_, {int64_t(std::max<size_t>(bytes, 1)) + 255}, DType::u8));
    auto address = reinterpret_cast<uintptr_t>(blocks_.back().data_ptr());
    return reinterpret_cast<void*>((address + 255) / 256 * 256);
  }

  // aten::mm and addmm write their operands' dtype. A wider result is summed here, with one rounding per GEMM
  // for bf16. float16 goes through float32, since aten's own float16 GEMM is two orders of magnitude slower
  // on machines without fp16 arithmetic. GEMMs that must not be rounded go through float32 too. float32 GEMMs
  // of some size are oneDNN's if MKL is slow.
  void gemm(const Gemm& g) override {
    constexpr int64_t kWorthwhile = int64_t(1) << 24;
    if (g.m == 0 || g.n == 0) return;
    if (deterministic) return cpu::builtin_gemm(*this, g);
    if (g.unrounded && is_half(g.ab_dtype) && g.c_dtype == DType::f32) return unrounded_gemm(g);
    if (g.ab_dtype == DType::f16) return widened_gemm(g);
    if (g.ab_dtype == DType::f32 && g.m * g.n * g.k >= kWorthwhile && prefers_onednn()) return onednn(g);
    const bool plain = g.beta == 0.0f && g.alpha == 1.0f;
    // addmm adds with one rounding less.
    const bool adds = is_half(g.ab_dtype) && aoti_torch_cpu_addmm_out != nullptr;
    if (g.ab_dtype == g.c_dtype && (plain || adds)) return mm(g, g.c, g.ldc);
    size_t first = blocks_.size();
    void* ab = scratch(size_of(g.ab_dtype) * size_t(g.m * g.n));
    Gemm alone = g;
    alone.alpha = 1.0f, alone.beta = 0.0f;
    mm(alone, ab, g.n);
    add(ab, g.ab_dtype, g);
    blocks_.resize(first, like_);
  }

 private:
  static Tensor view(const void* data, int64_t rows, int64_t cols, int64_t ld, bool transposed, DType dtype) {
    auto type = dtype == DType::f32    ? ScalarType::Float
                : dtype == DType::bf16 ? ScalarType::BFloat16
                                       : ScalarType::Half;
    int64_t sizes[2] = {rows, cols}, strides[2] = {transposed ? 1 : ld, transposed ? ld : 1};
    return torch::stable::from_blob(const_cast<void*>(data), {sizes, 2}, {strides, 2},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU, -1), type);
  }

  // Touches the fresh pages of a large result before the GEMM does: page faults inside its tiles cost a third
  // of a GEMM (128256x2048 bf16, K 1024: 0.95 -> 0.69 s + 0.03 s). Pages that are already mapped stay as they
  // are.
  void fault_in(void* data, size_t bytes) {
#ifdef MADV_POPULATE_WRITE
    constexpr uintptr_t kPage = uintptr_t(1) << 21, kTask = 8 * kPage;
    auto begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage,
         end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
    if (begin + kTask > end) return;
    parallel(*this, int64_t((end - begin + kTask - 1) / kTask), [&](int64_t task) {
      uintptr_t first = begin + uintptr_t(task) * kTask;
      madvise(reinterpret_cast<void*>(first), std::min(kTask, end - first), MADV_POPULATE_WRITE);
    });
#endif
  }

  // Rows of A without zeros after them are copied, a few at a time, to memory that has them.
  void mm(const Gemm& g, void* c, int64_t ldc) {
    if (!reads_past_rows(g)) return call_mm(g, c, ldc);
    constexpr int64_t kElements = int64_t(1) << 18, kLeastRows = 64;
    const int64_t lda = (g.k + kAmxColumns - 1) / kAmxColumns * kAmxColumns,
                  most = std::min(g.m, std::max(kLeastRows, kElements / lda));
    const size_t first = blocks_.size();
    auto* rows = scratch_of<uint16_t>(most * lda);
    Gemm piece = g;
    piece.a = rows, piece.lda = lda;
    for (int64_t begin = 0; begin < g.m; begin += most) {
      piece.m = std::min(most, g.m - begin);
      parallel(*this, piece.m, [&](int64_t r) {
        std::copy_n(static_cast<const uint16_t*>(g.a) + (begin + r) * g.lda, g.k, rows + r * lda);
        std::fill_n(rows + r * lda + g.k, lda - g.k, uint16_t(0));
      });
      call_mm(piece, static_cast<char*>(c) + begin * ldc * int64_t(size_of(g.ab_dtype)), ldc);
    }
    blocks_.resize(first, like_);
  }
  void call_mm(const Gemm& g, void* c, int64_t ldc) {
    if (g.beta == 0.0f) fault_in(c, size_of(g.ab_dtype) * size_t((g.m - 1) * ldc + g.n));
    const Tensor a = view(g.a, g.m, g.k, g.lda, g.trans_a, g.ab_dtype),
                 b = view(g.b, g.k, g.n, g.ldb, g.trans_b, g.ab_dtype),
                 to = view(c, g.m, g.n, ldc, false, g.ab_dtype);
    if (g.beta != 0.0f || g.alpha != 1.0f) {
      check_torch(aoti_torch_cpu_addmm_out(to.get(), to.get(), a.get(), b.get(), g.beta, g.alpha),
                  [] { return "aten::addmm failed"; });
      return;
    }
    StableIValue stack[3] = {torch::stable::detail::from(a), torch::stable::detail::from(b),
                             torch::stable::detail::from(to)};
    check_torch(torch_call_dispatcher("aten::mm", "out", stack, TORCH_ABI_VERSION),
                [] { return "aten::mm failed"; });
    // Takes and drops the returned handle.
    torch::stable::detail::to<Tensor>(stack[0]);
  }

  // Computes X W^T with W = op(B)^T in a tensor of PyTorch's. The copy costs a tenth of the time that is
  // saved.
  void onednn(const Gemm& g) {
    StableIValue stack[6] = {
        torch::stable::detail::from(view(g.a, g.m, g.k, g.lda, g.trans_a, g.ab_dtype)),
        torch::stable::detail::from(view(g.b, g.n, g.k, g.ldb, !g.trans_b, g.ab_dtype)),
        torch::stable::detail::from(OptionalTensor()),
        torch::stable::detail::from(std::string("none")),
        torch::stable::detail::from(std::vector<int64_t>()),
        torch::stable::detail::from(std::optional<std::string>("")),
    };
    check_torch(torch_call_dispatcher("mkldnn::_linear_pointwise", "", stack, TORCH_ABI_VERSION),
                [] { return "mkldnn::_linear_pointwise failed"; });
    Tensor ab = torch::stable::detail::to<Tensor>(stack[0]);
    add(ab.data_ptr(), DType::f32, g);
  }

  // Computes the columns of the result in pieces, so that few rows of op(B) are in float32 at a time.
  void unrounded_gemm(const Gemm& g) {
    constexpr int64_t kPiece = 8192;
    for (int64_t n = 0; n < g.n; n += kPiece) {
      Gemm piece = g;
      piece.n = std::min(kPiece, g.n - n);
      piece.b = static_cast<const char*>(g.b) + n * (g.trans_b ? g.ldb : 1) * int64_t(size_of(g.ab_dtype));
      piece.c = static_cast<float*>(g.c) + n;
      widened_gemm(piece);
    }
  }

  void widened_gemm(const Gemm& g) {
    size_t first = blocks_.size();
    auto wide = [&](const void* p, int64_t rows, int64_t cols, int64_t ld) {
      float* out = scratch_of<float>(rows * cols);
      parallel(*this, rows, [&](int64_t r) {
        cpu::widen(static_cast<const uint16_t*>(p) + r * ld, g.ab_dtype, out + r * cols, cols);
      });
      return out;
    };
    Gemm w = g;
    w.ab_dtype = DType::f32;
    w.lda = g.trans_a ? g.m : g.k;
    w.ldb = g.trans_b ? g.k : g.n;
    w.a = wide(g.a, g.trans_a ? g.k : g.m, w.lda, g.lda);
    w.b = wide(g.b, g.trans_b ? g.n : g.k, w.ldb, g.ldb);
    gemm(w);
    blocks_.resize(first, like_);
  }

  // Computes C = alpha ab, or C += alpha ab if beta is 1.
  void add(const void* ab, DType dtype, const Gemm& g) {
    dispatch_float("gemm", "matmul", dtype, [&](auto p) {
      using P = typename decltype(p)::type;
      dispatch_float("gemm", "result", g.c_dtype, [&](auto c) {
        using C = typename decltype(c)::type;
        parallel(*this, g.m, [&](int64_t r) {
          const P* from = static_cast<const P*>(ab) + r * g.n;
          C* to = static_cast<C*>(g.c) + r * g.ldc;
          if (g.beta == 0.0f)
            for (int64_t i = 0; i < g.n; ++i) to[i] = from_float<C>(g.alpha * to_float(from[i]));
          else
            for (int64_t i = 0; i < g.n; ++i)
              to[i] = from_float<C>(to_float(to[i]) + g.alpha * to_float(from[i]));
        });
      });
    });
  }

  TorchExecutor executor_;
  Tensor like_;
  std::vector<Tensor> blocks_;
};

}  // namespace

std::unique_ptr<Context> make_cpu_context(const Tensor& t) { return std::make_unique<TorchCpuContext>(t); }

}  // namespace tigon::torch_shim
