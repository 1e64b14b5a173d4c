#include "tigon/torch/shim.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <vector>

#include "tigon/base/dynlib.h"
#include "tigon/torch/context.h"

// PyTorch >= 2.13 tells why a call of its C interface failed. This is null in older ones.
extern "C" [[gnu::weak]] const char* torch_exception_get_what_without_backtrace();
// These are Python's functions, null if no Python is running.
extern "C" [[gnu::weak]] int PyGILState_Ensure();
extern "C" [[gnu::weak]] void PyGILState_Release(int);

namespace tigon::torch_shim {

namespace {

std::optional<DType> known_dtype(ScalarType t) {
  switch (t) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Double: return DType::f64;
    case ScalarType::Short: return DType::i16;
    case ScalarType::Int: return DType::i32;
    case ScalarType::Long: return DType::i64;
    case ScalarType::Byte:
    case ScalarType::Bool: return DType::u8;
    case ScalarType::Float8_e4m3fn: return DType::e4m3;
    default: return std::nullopt;
  }
}

ScalarType torch_dtype(DType t) {
  switch (t) {
    case DType::f32: return ScalarType::Float;
    case DType::bf16: return ScalarType::BFloat16;
    case DType::f16: return ScalarType::Half;
    case DType::f64: return ScalarType::Double;
    case DType::i32: return ScalarType::Int;
    case DType::i64: return ScalarType::Long;
    case DType::u8: return ScalarType::Byte;
    case DType::i16: return ScalarType::Short;
    case DType::e4m3: return ScalarType::Float8_e4m3fn;
  }
  return ScalarType::Byte;
}

}  // namespace

DType dtype_of(const char* op, const char* name, ScalarType t) {
  auto known = known_dtype(t);
  TIGON_CHECK(op, known.has_value(), name,
              " must be a float32, bfloat16, float16 or integer tensor, got ScalarType ", int(t));
  return *known;
}
DType dtype_of(const char* op, const char* name, const Tensor& t) {
  return dtype_of(op, name, t.scalar_type());
}
DType dtype_of(const char* op, const char* name, AtenTensorHandle t) {
  int32_t type = 0;
  check_torch(aoti_torch_get_dtype(t, &type), [] { return "the tensor has no dtype"; });
  // The ids are kept here, because PyTorch's own conversion makes a call for each dtype that it tries.
  static const int32_t f32 = aoti_torch_dtype_float32(), bf16 = aoti_torch_dtype_bfloat16();
  if (type == f32) return DType::f32;
  if (type == bf16) return DType::bf16;
  return dtype_of(op, name, torch::stable::detail::to<ScalarType>(torch::stable::detail::from(type)));
}

static int32_t device_type(AtenTensorHandle t) {
  int32_t type = 0;
  check_torch(aoti_torch_get_device_type(t, &type), [] { return "the tensor has no device"; });
  return type;
}
static int32_t device_index(AtenTensorHandle t) {
  int32_t index = 0;
  check_torch(aoti_torch_get_device_index(t, &index), [] { return "the tensor has no device"; });
  return index;
}
DeviceId::DeviceId(AtenTensorHandle t) : type(device_type(t)), index(device_index(t)) {}
bool DeviceId::is_cpu() const {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  return type == cpu;
}
bool DeviceId::has(AtenTensorHandle t) const {
  return device_type(t) == type && (is_cpu() || device_index(t) == index);
}

void check_same_device(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  auto print = [](const Tensor& x) {
    return x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : "cpu";
  };
  TIGON_CHECK(op, DeviceId(like.get()).has(t.get()), name, " must be on ", print(like), ", got ", print(t));
}

void* data_of(const char* op, const char* name, const Tensor& t) {
  return data_of(op, name, t.get(), t.numel());
}
void* data_of(const char* op, const char* name, AtenTensorHandle t, int64_t numel) {
  static char empty;
  if (numel == 0) return &empty;
  int64_t bytes = 0;
  check_torch(aoti_torch_get_storage_size(t, &bytes), [] { return "the storage has no size"; });
  TIGON_CHECK(
      op, bytes > 0, name,
      " was freed: its storage is empty (FSDP frees parameters outside of the forward and backward of their "
      "module, a hook or untyped_storage().resize_(0) does too)");
  void* data = nullptr;
  check_torch(aoti_torch_get_data_ptr(t, &data), [] { return "the tensor has no data"; });
  return data;
}

Vector elements_of(const char* op, const char* name, AtenTensorHandle t, int64_t numel) {
  return {.data = data_of(op, name, t, numel), .dtype = dtype_of(op, name, t), .size = numel};
}

TensorList TensorList::take(Stack& stack) {
  const auto list = stack.take<StableListHandle>();
  auto failed = [] { return "the list cannot be read"; };
  TensorList taken;
  try {
    size_t size = 0;
    check_torch(torch_list_size(list, &size), failed);
    taken.handles_.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element;
      check_torch(torch_list_get_item(list, i, &element), failed);
      taken.handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(element));
    }
  } catch (...) {
    torch_delete_list(list);
    throw;
  }
  check_torch(torch_delete_list(list), failed);
  return taken;
}
TensorList::~TensorList() {
  if (handles_.empty()) return;
  // A call has given up the GIL, and PyTorch would take it again for every tensor that only Python holds.
  // Here it is taken once.
  const int state = PyGILState_Ensure != nullptr ? PyGILState_Ensure() : 0;
  for (AtenTensorHandle t : handles_) aoti_torch_delete_tensor_object(t);
  if (PyGILState_Release != nullptr) PyGILState_Release(state);
}
Tensor TensorList::tensor(size_t i) const {
  AtenTensorHandle copy = nullptr;
  check_torch(aoti_torch_new_tensor_handle(handles_[i], &copy), [] { return "the tensor has no handle"; });
  return Tensor(copy);
}

Shape::Shape(AtenTensorHandle t) {
  int64_t *size = nullptr, *stride = nullptr;
  auto failed = [] { return "the tensor has no sizes"; };
  check_torch(aoti_torch_get_dim(t, &dims), failed);
  check_torch(aoti_torch_get_sizes(t, &size), failed);
  check_torch(aoti_torch_get_strides(t, &stride), failed);
  sizes = size, strides = stride;
  for (int64_t d = 0; d < dims; ++d) numel *= sizes[d];
}
bool Shape::is_contiguous() const {
  int64_t expected = 1;
  for (int64_t d = dims; d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (strides[d] != expected) return numel == 0;
    expected *= sizes[d];
  }
  return true;
}
bool Shape::is_dense() const {
  if (is_contiguous()) return true;
  std::vector<std::pair<int64_t, int64_t>> ordered;  // stride and size
  for (int64_t d = 0; d < dims; ++d)
    if (sizes[d] > 1) ordered.emplace_back(strides[d], sizes[d]);
  std::sort(ordered.begin(), ordered.end());
  int64_t expected = 1;
  for (auto [stride, size] : ordered) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}
bool Shape::has_sizes_of(const Shape& other) const {
  return std::equal(sizes, sizes + dims, other.sizes, other.sizes + other.dims);
}
bool Shape::has_strides_of(const Shape& other) const {
  for (int64_t d = 0; d < dims; ++d)
    if (sizes[d] > 1 && strides[d] != other.strides[d]) return false;
  return true;
}

Matrix rows_of(const char* op, const char* name, Tensor& t) {
  int64_t dims = t.dim();
  TIGON_CHECK(op, dims >= 1, name, " must have at least one dimension, got 0");
  // Returns the stride between rows, or -1.
  auto collapsed_stride = [&]() -> int64_t {
    int64_t cols = t.size(dims - 1);
    if (cols > 1 && t.stride(dims - 1) != 1) return -1;
    int64_t stride = cols, expected = -1;
    for (int64_t d = dims - 2; d >= 0; --d) {
      if (t.size(d) == 1) continue;
      if (expected < 0)
        stride = t.stride(d);
      else if (t.stride(d) != expected)
        return -1;
      expected = t.stride(d) * t.size(d);
    }
    return stride;
  };
  int64_t stride = t.numel() == 0 ? t.size(dims - 1) : collapsed_stride();
  if (stride < 0) {
    t = to_contiguous(op, name, t);
    stride = t.size(dims - 1);
  }
  int64_t cols = t.size(dims - 1);
  return {.data = data_of(op, name, t),
          .dtype = dtype_of(op, name, t),
          .rows = cols == 0 ? 0 : t.numel() / cols,
          .cols = cols,
          .stride = stride};
}

Vector vector_of(const char* op, const char* name, Tensor& t) {
  TIGON_CHECK(op, t.dim() == 1, name, " must have one dimension, got ", t.dim());
  if (t.size(0) > 1 && t.stride(0) != 1) t = to_contiguous(op, name, t);
  return {.data = data_of(op, name, t), .dtype = dtype_of(op, name, t), .size = t.size(0)};
}

Vector flat(const char* op, const char* name, Tensor& t) {
  if (!t.is_contiguous()) t = to_contiguous(op, name, t);
  return {.data = data_of(op, name, t), .dtype = dtype_of(op, name, t), .size = t.numel()};
}

Vector row_of(const char* op, const char* name, Tensor& t, int64_t row) {
  Matrix rows = rows_of(op, name, t);
  TIGON_CHECK(op, rows.rows > row || rows.cols == 0, name, " must have more than ", row, " rows, got ",
              rows.rows);
  auto* first = static_cast<char*>(rows.data);
  return {.data = first + row * rows.stride * int64_t(size_of(rows.dtype)),
          .dtype = rows.dtype,
          .size = rows.cols};
}

Vector scalar_of(const char* op, const char* name, const Tensor& t) {
  TIGON_CHECK(op, t.numel() == 1, name, " must have one element, got ", t.numel());
  return {.data = data_of(op, name, t), .dtype = dtype_of(op, name, t), .size = 1};
}

void fail_torch(const std::string& otherwise) {
  const char* reason = torch_exception_get_what_without_backtrace != nullptr
                           ? torch_exception_get_what_without_backtrace()
                           : nullptr;
  throw std::runtime_error(reason != nullptr && *reason != 0 ? reason : otherwise);
}

// Programs recognise a failed allocation of PyTorch's by these words.
static std::string out_of_memory(const Tensor& like, size_t bytes) {
  std::string size = std::to_string(bytes) + " bytes";
  return like.is_cuda() ? "CUDA out of memory. Tried to allocate " + size
                        : "DefaultCPUAllocator: can't allocate memory: you tried to allocate " + size;
}

Tensor to_contiguous(const char* op, const char* name, const Tensor& t) {
  (void)data_of(op, name, t);
  StableIValue stack[2] = {torch::stable::detail::from(t),
                           torch::stable::detail::from(torch::headeronly::MemoryFormat::Contiguous)};
  check_torch(torch_call_dispatcher("aten::contiguous", "", stack, TORCH_ABI_VERSION),
              [&] { return out_of_memory(t, size_t(t.numel()) * t.element_size()); });
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Page faults in fresh CPU memory cost several times what a kernel does, and large pages make them few. This
// asks for large pages before the first touch; it does nothing if the system has none.
static void prefer_large_pages(const Tensor& t, size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = uintptr_t(1) << 21;
  auto begin = reinterpret_cast<uintptr_t>(t.data_ptr()), end = begin + bytes;
  begin = (begin + kPage - 1) / kPage * kPage, end = end / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

Tensor empty_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides, int64_t dims,
                     DType dtype) {
  AtenTensorHandle handle = nullptr;
  int32_t device = like.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  check_torch(aoti_torch_empty_strided(dims, sizes, strides, int32_t(torch_dtype(dtype)), device,
                                       like.get_device_index(), &handle),
              [&] {
                size_t bytes = size_of(dtype);
                for (int64_t d = 0; d < dims; ++d) bytes *= size_t(sizes[d]);
                return out_of_memory(like, bytes);
              });
  return Tensor(handle);
}

Tensor empty(const Tensor& like, const int64_t* sizes, int64_t dims, DType dtype) {
  // PyTorch's own operators take no more dimensions.
  std::array<int64_t, 64> strides;
  TIGON_CHECK("empty", dims <= int64_t(strides.size()), "tensors must have at most ", strides.size(),
              " dimensions, got ", dims);
  int64_t step = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[size_t(d)] = step;
    step *= sizes[d] > 1 ? sizes[d] : 1;
  }
  Tensor t = empty_strided(like, sizes, strides.data(), dims, dtype);
  if (!like.is_cuda()) prefer_large_pages(t, size_t(t.numel()) * size_of(dtype));
  return t;
}

Tensor make(const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype) {
  return empty(like, sizes.begin(), int64_t(sizes.size()), dtype);
}
Tensor make_like(const Tensor& like, DType dtype) {
  auto sizes = like.sizes();
  return empty(like, sizes.data(), int64_t(sizes.size()), dtype);
}
Tensor make_rows(const Tensor& like, int64_t cols, DType dtype, bool skip_first) {
  std::vector<int64_t> sizes(like.sizes().begin() + skip_first, like.sizes().end());
  sizes.back() = cols;
  return empty(like, sizes.data(), int64_t(sizes.size()), dtype);
}
Tensor nothing(const Tensor& like, DType dtype) { return make(like, {0}, dtype); }

std::unique_ptr<Context> make_context(const Tensor& t) {
  std::unique_ptr<Context> ctx = t.is_cuda() ? make_cuda_context(t) : make_cpu_context(t);
  ctx->deterministic = deterministic();
  return ctx;
}

void define(Library& m, const std::string& schema) { m.def(schema.c_str()); }
}  // namespace tigon::torch_shim

// Defines the namespace; each op adds its fragment.
STABLE_TORCH_LIBRARY(tigon, m) { (void)m; }
