// A CUDA call inside PyTorch uses PyTorch's current stream and caching allocator. libtorch_cuda is not
// linked: the one function used here is looked up in the running process, so that the same binary loads with
// a CPU-only PyTorch.
#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "tigon/base/dynlib.h"
#include "tigon/torch/context.h"
#if TIGON_WITH_CUDA
#include "tigon/base/cuda/gemm_cublaslt.h"
#endif

namespace tigon::torch_shim {

#if TIGON_WITH_CUDA
namespace {

void* current_stream(int32_t device) {
  using Fn = AOTITorchError (*)(int32_t, void**);
  static const Fn fn = reinterpret_cast<Fn>(
      find_symbol(loaded_library("libtorch_cuda.so"), "aoti_torch_get_current_cuda_stream"));
  TIGON_CHECK("context", fn != nullptr, "libtorch_cuda.so must be loaded for CUDA tensors, found none");
  void* stream = nullptr;
  check_torch(fn(device, &stream), [] { return "aoti_torch_get_current_cuda_stream failed"; });
  return stream;
}

class TorchCudaContext final : public Context {
 public:
  explicit TorchCudaContext(const Tensor& like)
      : guard_(like.get_device_index()), stream_(current_stream(like.get_device_index())), like_(like) {}
  Device device() const override { return Device::cuda; }
  void* stream() const override { return stream_; }
  Executor& executor() override { return executor_; }
  // Blocks of the caching allocator are 512-byte aligned and ordered by the stream, so freeing them after the
  // launch is safe.
  void* scratch(size_t bytes) override {
    blocks_.push_back(make(like_, {int64_t(bytes > 0 ? bytes : 1)}, DType::u8));
    return blocks_.back().data_ptr();
  }
  void gemm(const Gemm& g) override {
    cuda::cublaslt_gemm(*this, g, like_.get_device_index(), gemm_workspace_);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
  InlineExecutor executor_;
  Tensor like_;
  std::vector<Tensor> blocks_;
  cuda::GemmWorkspace gemm_workspace_;
};

}  // namespace

std::unique_ptr<Context> make_cuda_context(const Tensor& t) { return std::make_unique<TorchCudaContext>(t); }
std::string gemm_kernels() { return cuda::cublaslt_kernels(); }
bool has_matmul_kernels(int capability) { return cuda::has_matmul_kernels(capability); }
#else
std::string gemm_kernels() { return {}; }
bool has_matmul_kernels(int) { return false; }
std::unique_ptr<Context> make_cuda_context(const Tensor&) {
  detail::fail("context",
               {"this build of Tigon has no CUDA backend (rebuild with nvcc and -DTIGON_CUDA=ON)"});
}
#endif

}  // namespace tigon::torch_shim

// Returns the lines of tigon.env() about GEMM, valid until the thread's next call.
extern "C" TIGON_API const char* tigon_gemm_kernels() {
  static thread_local std::string lines;
  return (lines = tigon::torch_shim::gemm_kernels()).c_str();
}
extern "C" TIGON_API bool tigon_has_matmul_kernels(int capability) {
  return tigon::torch_shim::has_matmul_kernels(capability);
}
