// What every <op>_torch.cpp uses: tensors of the LibTorch Stable ABI as views of the core, a Context backed by PyTorch
// (its stream, caching allocator, thread pool and CPU matrix product), and allocation of results.
// Only stable headers here: an ATen or c10 header would tie the binary to one PyTorch release.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
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
Device device_of(const char* op, const Tensor& t);

// Throws what PyTorch says of a failed call of its C interface, or otherwise() where it is too old to tell.
[[noreturn]] void fail_torch(const std::string& otherwise);
template <class Otherwise>
void check_torch(AOTITorchError status, const Otherwise& otherwise) {
  if (status != TORCH_SUCCESS) [[unlikely]]
    fail_torch(otherwise());
}

// Throws unless `t` lives where `like` does.
void check_same_device(const char* op, const char* name, const Tensor& t, const Tensor& like);

// Where the elements of `t` are: never null, so that an empty tensor is not taken for one that is absent. Throws where its
// storage was freed (resized to 0, as FSDP does between uses).
void* data_of(const char* op, const char* name, const Tensor& t);
void* data_of(const char* op, const char* name, AtenTensorHandle t, int64_t numel);
// All of them, in the order of memory.
Vector elements_of(const char* op, const char* name, AtenTensorHandle t, int64_t numel);
Tensor to_contiguous(const char* op, const char* name, const Tensor& t);

// [..., C] as rows x C without a copy where the leading dimensions collapse to one stride and the last is dense;
// otherwise `t` is replaced by a contiguous copy first.
Matrix rows_of(const char* op, const char* name, Tensor& t);
Matrix rows_of(const char* op, const char* name, OptionalTensor& t);
// 1-D dense vector; a strided one is replaced by a copy first.
Vector vector_of(const char* op, const char* name, Tensor& t);
Vector vector_of(const char* op, const char* name, OptionalTensor& t);
// All elements, of any shape; replaced by a contiguous copy where it is not.
Vector flat(const char* op, const char* name, Tensor& t);
Vector flat(const char* op, const char* name, OptionalTensor& t);
// A row of [n, C].
Vector row_of(const char* op, const char* name, Tensor& t, int64_t row);
// One element, any number of dimensions.
Vector scalar_of(const char* op, const char* name, const Tensor& t);

// Uninitialised result on the device of `like`.
Tensor empty_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides, int64_t dims,
                     DType dtype);
Tensor empty(const Tensor& like, const int64_t* sizes, int64_t dims, DType dtype);
Tensor make(const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype);
Tensor make_like(const Tensor& like, DType dtype);  // contiguous, same sizes
Tensor nothing(const Tensor& like, DType dtype);    // 0 elements: a result that was not asked for
inline Tensor make_if(bool wanted, const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype) {
  return wanted ? make(like, sizes, dtype) : nothing(like, dtype);
}

// The context of a call whose tensors live where `t` does. Switches to t's device until destroyed.
std::unique_ptr<Context> make_context(const Tensor& t);

// A struct of an operator's parameters: kNames has the names of its members, in their order, as the schema does.
template <class T>
concept Parameters = requires { std::size(T::kNames); };
template <Parameters T>
auto members_of(T& p) {
  constexpr size_t kCount = std::size(T::kNames);
  static_assert(kCount >= 2 && kCount <= 12);
#define TIGON_MEMBERS(count, ...)  \
  if constexpr (kCount == count) { \
    auto& [__VA_ARGS__] = p;       \
    return std::tie(__VA_ARGS__);  \
  }
  TIGON_MEMBERS(2, a, b)
  TIGON_MEMBERS(3, a, b, c)
  TIGON_MEMBERS(4, a, b, c, d)
  TIGON_MEMBERS(5, a, b, c, d, e)
  TIGON_MEMBERS(6, a, b, c, d, e, f)
  TIGON_MEMBERS(7, a, b, c, d, e, f, g)
  TIGON_MEMBERS(8, a, b, c, d, e, f, g, h)
  TIGON_MEMBERS(9, a, b, c, d, e, f, g, h, i)
  TIGON_MEMBERS(10, a, b, c, d, e, f, g, h, i, j)
  TIGON_MEMBERS(11, a, b, c, d, e, f, g, h, i, j, k)
  TIGON_MEMBERS(12, a, b, c, d, e, f, g, h, i, j, k, l)
#undef TIGON_MEMBERS
}
template <class T>
constexpr const char* kTypeName = std::is_same_v<T, Tensor>                  ? "Tensor "
                                  : std::is_same_v<T, OptionalTensor>        ? "Tensor? "
                                  : std::is_same_v<T, std::optional<double>> ? "float? "
                                  : std::is_same_v<T, bool>                  ? "bool "
                                  : std::is_floating_point_v<T>              ? "float "
                                                                             : "int ";
// "Tensor x, float eps": the parameters of all structs.
template <Parameters... Structs>
std::string schema() {
  std::string text;
  auto add = [&]<class T, class... Members>(std::type_identity<T>,
                                            std::type_identity<std::tuple<Members&...>>) {
    size_t i = 0;
    ((text += (text.empty() ? "" : ", ") + std::string(kTypeName<Members>) + T::kNames[i++]), ...);
  };
  (add(std::type_identity<Structs>{}, std::type_identity<decltype(members_of(std::declval<Structs&>()))>{}),
   ...);
  return text;
}
// Throws unless the tensors among them live where `like` does.
template <Parameters T>
void check_devices(const char* op, T& p, const Tensor& like) {
  size_t i = 0;
  auto check = [&](const char* name, const auto& member) {
    if constexpr (std::is_same_v<decltype(member), const Tensor&>)
      check_same_device(op, name, member, like);
    else if constexpr (std::is_same_v<decltype(member), const OptionalTensor&>)
      if (member) check_same_device(op, name, *member, like);
  };
  std::apply([&](auto&... member) { (check(T::kNames[i++], member), ...); }, members_of(p));
}

// The arguments of a boxed call, taken in the order of the schema.
class Stack {
 public:
  explicit Stack(const StableIValue* next) : next_(next) {}
  template <class T>
  T take() {
    if constexpr (requires(Stack& s) { T::take(s); })
      return T::take(*this);
    else if constexpr (Parameters<T>)
      return take_members<T>(std::type_identity<decltype(members_of(std::declval<T&>()))>{});
    else if constexpr (std::is_enum_v<T>) {
      int64_t value = take<int64_t>();
      return int64_t(T(value)) == value ? T(value) : T(-1);  // -1: no kind, as every operator checks
    } else if constexpr (std::is_same_v<T, float>)
      return float(take<double>());
    else
      return torch::stable::detail::to<T>(*next_++);
  }

 private:
  template <class T, class... Members>
  T take_members(std::type_identity<std::tuple<Members&...>>) {
    return {take<Members>()...};
  }
  const StableIValue* next_;
};

// A list argument of thousands of tensors: handles, where a Tensor each would be an allocation more.
class TensorList {
 public:
  static TensorList take(Stack& stack);
  TensorList(TensorList&&) noexcept = default;
  TensorList& operator=(TensorList&&) = delete;
  ~TensorList();
  size_t size() const { return handles_.size(); }
  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }
  Tensor tensor(size_t i) const;  // that may outlive the list

 private:
  std::vector<AtenTensorHandle> handles_;
  TensorList() = default;
};

// Sizes and strides, borrowed from a tensor.
struct Shape {
  int64_t dims, numel = 1;
  const int64_t *sizes, *strides;
  explicit Shape(AtenTensorHandle t);
  bool is_contiguous() const;
  // Whether the elements fill one stretch of memory, each once, in any order of dimensions.
  bool is_dense() const;
  bool has_sizes_of(const Shape& other) const;
  // Of the same sizes: whether each element is at the same place.
  bool has_strides_of(const Shape& other) const;
};

struct DeviceId {
  int32_t type, index;
  explicit DeviceId(AtenTensorHandle t);
  bool is_cpu() const;
  bool has(AtenTensorHandle t) const;
};

// TORCH_BOX for kernels whose parameters may be such structs, and whose result is a tensor, a tuple or nothing.
template <auto* kernel>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  [stack]<class Result, class... Arguments>(Result (*)(Arguments...)) {
    Stack next(stack);
    std::tuple<Arguments...> arguments{next.take<Arguments>()...};
    if constexpr (std::is_void_v<Result>)
      std::apply(kernel, std::move(arguments));
    else if constexpr (std::is_same_v<Result, Tensor>)
      stack[0] = torch::stable::detail::from(std::apply(kernel, std::move(arguments)));
    else
      torch::stable::detail::box_from_tuple(stack, std::apply(kernel, std::move(arguments)));
  }(kernel);
}

using Library = torch::stable::detail::StableLibrary;
using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);
void define(Library& m, const std::string& schema);
// A forward operator by two names, schema and kernel: <op>, to which Python attaches autograd, and <op>_fwd, so that eager calls stay
// free of that layer. Where a backward needs more than callers see, <op>_infer is the forward without it.
void define_forward(Library& m, const std::string& op, const std::string& signature);
void implement_forward(Library& m, const std::string& op, Kernel kernel);

}  // namespace tigon::torch_shim

// Each <op>_torch.cpp defines its schemas once and the same adaptor for both devices:
//   TIGON_TORCH_SCHEMAS(m) { define_forward(m, "op", "(...) -> ..."), define(m, "op_bwd(...) -> ..."); }
//   TIGON_TORCH_KERNELS(m) { implement_forward(m, "op", TORCH_BOX(&forward)), m.impl("op_bwd", TORCH_BOX(&backward)); }
#define TIGON_TORCH_SCHEMAS(m) STABLE_TORCH_LIBRARY_FRAGMENT(tigon, m)
#define TIGON_TORCH_KERNELS(m)                                               \
  static void tigon_kernels(torch::stable::detail::StableLibrary&);          \
  STABLE_TORCH_LIBRARY_IMPL(tigon, CPU, library) { tigon_kernels(library); } \
  STABLE_TORCH_LIBRARY_IMPL(tigon, CUDA, library) {                          \
    if (::tigon::built_with_cuda()) tigon_kernels(library);                  \
  }                                                                          \
  void tigon_kernels(torch::stable::detail::StableLibrary& m)
