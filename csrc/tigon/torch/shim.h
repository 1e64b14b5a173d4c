// PyTorch's operators use this interface: tensors of the LibTorch Stable ABI as views of the core, a Context
// backed by PyTorch (its stream, caching allocator, thread pool and CPU GEMM), and allocation of results. It
// includes stable headers only: an ATen or c10 header would tie the binary to one PyTorch release.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tigon/base/check.h"
#include "tigon/base/error.h"
#include "tigon/base/make_context.h"

namespace tigon::torch_shim {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

using torch::headeronly::ScalarType;
DType dtype_of(const char* op, const char* name, ScalarType t);
DType dtype_of(const char* op, const char* name, const Tensor& t);
DType dtype_of(const char* op, const char* name, AtenTensorHandle t);

// Throws what PyTorch says of a failed call of its C interface, or otherwise() if this PyTorch is too old to
// tell.
[[noreturn]] void fail_torch(const std::string& otherwise);
template <class Otherwise>
void check_torch(AOTITorchError status, const Otherwise& otherwise) {
  if (status != TORCH_SUCCESS) [[unlikely]]
    fail_torch(otherwise());
}

// Throws unless `t` is on the device of `like`.
void check_same_device(const char* op, const char* name, const Tensor& t, const Tensor& like);

// Returns the address of the elements of `t`. It is never null, so that an empty tensor is not taken for an
// absent one. Throws if the storage was freed (resized to 0, as FSDP does between uses).
void* data_of(const char* op, const char* name, const Tensor& t);
void* data_of(const char* op, const char* name, AtenTensorHandle t, int64_t numel);
// Returns all elements in the order of memory.
Vector elements_of(const char* op, const char* name, AtenTensorHandle t, int64_t numel);
Tensor to_contiguous(const char* op, const char* name, const Tensor& t);

// Returns [..., C] as rows x C without a copy if the leading dimensions collapse to one stride and the last
// is dense. Otherwise `t` is first replaced by a contiguous copy.
Matrix rows_of(const char* op, const char* name, Tensor& t);
// Returns a 1-D dense vector. A strided `t` is first replaced by a copy.
Vector vector_of(const char* op, const char* name, Tensor& t);
// Returns all elements of any shape. A `t` that is not contiguous is first replaced by a copy.
Vector flat(const char* op, const char* name, Tensor& t);
// Returns a row of [n, C].
Vector row_of(const char* op, const char* name, Tensor& t, int64_t row);
// Returns the one element of a tensor with any number of dimensions.
Vector scalar_of(const char* op, const char* name, const Tensor& t);

// Returns an uninitialised result on the device of `like`.
Tensor empty_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides, int64_t dims,
                     DType dtype);
Tensor empty(const Tensor& like, const int64_t* sizes, int64_t dims, DType dtype);
Tensor make(const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype);
Tensor make_like(const Tensor& like, DType dtype);  // contiguous, of the same sizes
// Returns a result with the sizes of `like`, with `cols` as the last one, and without the first if
// `skip_first`.
Tensor make_rows(const Tensor& like, int64_t cols, DType dtype, bool skip_first = false);
// Returns a tensor of 0 elements: a result that was not asked for.
Tensor nothing(const Tensor& like, DType dtype);

// Returns the context of a call on the device of `t`, and switches to that device until destroyed.
std::unique_ptr<Context> make_context(const Tensor& t);

// Takes the arguments of a boxed call in the order of the schema.
class Stack {
 public:
  explicit Stack(const StableIValue* next) : next_(next) {}
  template <class T>
  T take() {
    if constexpr (requires(Stack& s) { T::take(s); })
      return T::take(*this);
    else
      return torch::stable::detail::to<T>(*next_++);
  }

 private:
  const StableIValue* next_;
};

// A list argument may have thousands of tensors. It holds handles: a Tensor each would be one more
// allocation.
class TensorList {
 public:
  static TensorList take(Stack& stack);
  TensorList(TensorList&&) noexcept = default;
  TensorList& operator=(TensorList&&) = delete;
  ~TensorList();
  size_t size() const { return handles_.size(); }
  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }
  // The returned tensor may outlive the list.
  Tensor tensor(size_t i) const;

 private:
  std::vector<AtenTensorHandle> handles_;
  TensorList() = default;
};

// Borrows sizes and strides from a tensor.
struct Shape {
  int64_t dims, numel = 1;
  const int64_t *sizes, *strides;
  explicit Shape(AtenTensorHandle t);
  bool is_contiguous() const;
  // True if the elements fill one stretch of memory, each once, in any order of dimensions.
  bool is_dense() const;
  bool has_sizes_of(const Shape& other) const;
  // Compares two tensors of the same sizes: true if each element is at the same place.
  bool has_strides_of(const Shape& other) const;
};

struct DeviceId {
  int32_t type, index;
  explicit DeviceId(AtenTensorHandle t);
  bool is_cpu() const;
  bool has(AtenTensorHandle t) const;
};

using Library = torch::stable::detail::StableLibrary;
using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);
void define(Library& m, const std::string& schema);

}  // namespace tigon::torch_shim

// Registers schemas, and the kernels of both devices:
//   TIGON_TORCH_SCHEMAS(m) { define(m, "op(...) -> ..."); }
//   TIGON_TORCH_KERNELS(m) { m.impl("op", TORCH_BOX(&call)); }
#define TIGON_TORCH_SCHEMAS(m) STABLE_TORCH_LIBRARY_FRAGMENT(tigon, m)
#define TIGON_TORCH_KERNELS(m)                                               \
  static void tigon_kernels(torch::stable::detail::StableLibrary&);          \
  STABLE_TORCH_LIBRARY_IMPL(tigon, CPU, library) { tigon_kernels(library); } \
  STABLE_TORCH_LIBRARY_IMPL(tigon, CUDA, library) {                          \
    if (::tigon::built_with_cuda()) tigon_kernels(library);                  \
  }                                                                          \
  void tigon_kernels(torch::stable::detail::StableLibrary& m)
