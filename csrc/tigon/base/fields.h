// Declares the arguments of an op once. Args::fields(f) names every member to f, in the order of the PyTorch
// schema, with its role and the sizes and dtype that it must have. The list has three readers: the checks of
// the entry (base/op.h), the schema, and the adaptor that makes views of tensors and allocates results (both
// torch/op.cpp).
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <type_traits>

#include "tigon/base/check.h"
#include "tigon/base/context.h"

namespace tigon {

enum class Role : int8_t {
  // The op works on this matrix of floats. All other tensors must be on its device.
  rows,
  input,
  // This input may be absent.
  optional,
  // The forward wrote these statistics and the backward reads them.
  saved,
  // The forward writes these statistics for a backward. If no backward follows they are absent, and
  // <op>_infer is the operator without them.
  statistics,
  result,
  // This result may be absent. PyTorch says by need_<name> whether it is wanted.
  gradient
};

// Describes a tensor as it lies in memory. An absent tensor has no dimensions.
struct Strided {
  // One more than any op takes.
  static constexpr int64_t kMostDims = 6;
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t dims = 0, sizes[kMostDims] = {}, strides[kMostDims] = {};
  // The given tensor has its second and third dimension from the end swapped in memory.
  bool swapped = false;

  constexpr explicit operator bool() const { return dims > 0; }
};

struct Statistic {
  const char* name;
  Vector& vector;
};

// Says what a field must be. For a vector, `cols` is its size.
struct Expected {
  int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;
  // float32 is accepted too.
  bool or_f32 = false;
  // If this vector is present, the field must have its dtype.
  const Vector* like = nullptr;
  // The tensor has one element and any number of dimensions.
  bool scalar = false;
  // Receives the first dimension of the tensor, which its results do not have; for a `flat` vector the number
  // of rows.
  int64_t* leading = nullptr;
  // A result has the sizes [stack, rows / stack, cols]; 0 means two dimensions.
  int64_t stack = 0;
  // A result has the sizes of this member's tensor; null means [rows, cols].
  const void* of = nullptr;
  // All sizes but the last are those of `of`.
  bool other_cols = false;
  // A result is allocated; otherwise it is absent.
  bool wanted = true;
  // The vector holds all elements of a tensor of any shape.
  bool flat = false;
  // The op writes this input.
  bool updated = false;
  // A single row keeps the stride of its tensor.
  bool padded = false;
  // The result has its second and third dimension from the end swapped in memory.
  bool swapped = false;
};

// Says what each tensor of a list must be. Elements are taken in the order of memory.
struct Listed {
  // The op writes the tensors, which must then be dense. Otherwise a tensor that is not contiguous is copied.
  bool updated = false;
  // Each tensor has this many elements. All have one dtype, and one shape if they are contiguous.
  int64_t size = -1;
};

struct Field {
  const char* name;
  Role role;
  Expected expected;
  void* member;
  // Exactly one of the next three is set.
  Matrix* matrix = nullptr;
  Vector* vector = nullptr;
  // The tensor has `rows` dimensions or one more, and the last `cols` of them are dense.
  Strided* strided = nullptr;

  Field(const char* n, Role r, Matrix& m, const Expected& e)
      : name(n), role(r), expected(e), member(&m), matrix(&m) {}
  Field(const char* n, Role r, Vector& v, const Expected& e)
      : name(n), role(r), expected(e), member(&v), vector(&v) {}
  Field(const char* n, Role r, Strided& t, const Expected& e)
      : name(n), role(r), expected(e), member(&t), strided(&t) {}
};

class Fields {
 public:
  explicit Fields(const char* checked_op = nullptr, bool on_cuda = false)
      : checked_op_(checked_op), on_cuda_(on_cuda) {}
  virtual ~Fields() = default;

  void rows(const char* name, Matrix& x, int64_t least_cols = 1) {
    field({name, Role::rows, x, {.cols = least_cols}});
  }
  // One tensor holds several matrices of equal sizes along its first dimension.
  void stacked_rows(const char* name, Matrix& x, int64_t& count) {
    field({name, Role::rows, x, {.cols = 1, .leading = &count}});
  }
  void stacked(const char* name, Matrix& m, int64_t& count, DType dtype) {
    field({name, Role::input, m, {.rows = m.rows, .cols = m.cols, .dtype = dtype, .leading = &count}});
  }
  // The matrix has the sizes of x.
  void input(const char* name, Matrix& m, const Matrix& x, DType dtype) {
    field({name, Role::input, m, sizes_of(x, dtype)});
  }
  void input(const char* name, Matrix& m, const Matrix& x) { input(name, m, x, x.dtype); }
  void input(const char* name, Matrix& m, int64_t rows, int64_t cols, DType dtype) {
    field({name, Role::input, m, {.rows = rows, .cols = cols, .dtype = dtype}});
  }
  void optional(const char* name, Matrix& m, int64_t rows, int64_t cols, DType dtype) {
    field({name, Role::optional, m, {.rows = rows, .cols = cols, .dtype = dtype}});
  }
  void optional(const char* name, Matrix& m, const Matrix& x) {
    field({name, Role::optional, m, sizes_of(x, x.dtype)});
  }
  void optional(const char* name, Vector& v, int64_t size, DType dtype) {
    field({name, Role::optional, v, {.cols = size, .dtype = dtype}});
  }
  void input(const char* name, Vector& v, int64_t size, DType dtype) {
    field({name, Role::input, v, {.cols = size, .dtype = dtype}});
  }
  // The matrix has `rows` rows of x's width, in x's dtype or float32.
  void input_rows(const char* name, Matrix& m, int64_t rows, const Matrix& x) {
    field({name, Role::input, m, {.rows = rows, .cols = x.cols, .dtype = x.dtype, .or_f32 = true}});
  }
  // A parameter has an element per column of x, in x's dtype or float32, or in the dtype of `like` if that is
  // present. It may be absent.
  void parameter(const char* name, Vector& v, const Matrix& x, const Vector* like = nullptr) {
    parameter(name, v, x.cols, x.dtype, like);
  }
  void parameter(const char* name, Vector& v, int64_t size, DType dtype, const Vector* like = nullptr) {
    field({name, Role::optional, v, {.cols = size, .dtype = dtype, .or_f32 = true, .like = like}});
  }
  // A parameter that must be present.
  void coefficients(const char* name, Vector& v, int64_t size, DType dtype, const Vector* like = nullptr) {
    field({name, Role::input, v, {.cols = size, .dtype = dtype, .or_f32 = true, .like = like}});
  }
  void scalar(const char* name, Vector& v, DType dtype, Role role = Role::input) {
    const bool or_f32 = dtype != DType::f32;
    field({name, role, v, {.cols = 1, .dtype = dtype, .or_f32 = or_f32, .scalar = true}});
  }
  // Each tensor of the list holds floats.
  virtual void list(const char* name, std::span<const Vector>& list, const Listed& each) = 0;
  // Any size and dtype is accepted here: the entry says what they must be.
  void input(const char* name, Matrix& m) { input(name, m, m); }
  void input(const char* name, Vector& v) { input(name, v, v.size, v.dtype); }
  void optional(const char* name, Matrix& m) { optional(name, m, m); }
  void optional(const char* name, Vector& v) { optional(name, v, v.size, v.dtype); }
  // The op writes the tensor in place. It has any size and dtype, or those of x.
  void updated(const char* name, Matrix& m, Role role = Role::optional) { updated(name, m, m, role); }
  void updated(const char* name, Matrix& m, const Matrix& x, Role role) {
    Expected e = sizes_of(x, x.dtype);
    e.updated = true;
    field({name, role, m, e});
  }
  void updated(const char* name, Vector& v) {
    field({name, Role::optional, v, {.cols = v.size, .updated = true}});
  }
  // The caller's rows lie further apart in memory than they are long. The GEMM kernel is chosen by their
  // stride, even for one row.
  void padded_rows(const char* name, Matrix& m, bool updated) {
    field({name, Role::input, m, {.cols = m.cols, .updated = updated, .padded = true}});
  }
  // The tensor has `least` dimensions or one more. It is copied if its last `dense` ones are not dense.
  void strided(const char* name, Strided& t, int64_t least, int64_t dense, Role role, bool updated = false) {
    field({name, role, t, {.rows = least, .cols = dense, .updated = updated}});
  }
  // The vector holds all elements of a tensor of any shape. `rows` receives the rows of a tensor of two
  // dimensions, else minus the number of its dimensions.
  void flat(const char* name, Vector& v, Role role = Role::optional, int64_t* rows = nullptr) {
    field({name, role, v, {.cols = v.size, .dtype = v.dtype, .leading = rows, .flat = true}});
  }
  void flat(const char* name, Vector& v, int64_t size, DType dtype, bool updated = false) {
    field({name, Role::optional, v, {.cols = size, .dtype = dtype, .flat = true, .updated = updated}});
  }
  // The statistics are vectors of `size` floats in float32: the rows of one tensor.
  virtual void statistics(const char* name, std::initializer_list<Statistic> list, int64_t size,
                          Role role) = 0;
  void statistics(const char* name, std::initializer_list<Statistic> list, int64_t size) {
    statistics(name, list, size, Role::statistics);
  }
  void saved(const char* name, std::initializer_list<Statistic> list, int64_t size) {
    statistics(name, list, size, Role::saved);
  }
  // Names a number, flag or choice. An enum that has no such value becomes -1.
  template <class T>
  void option(const char* name, T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      value = flag(name, value);
    } else if constexpr (std::is_floating_point_v<T>) {
      value = T(float_number(name, double(value)));
    } else if constexpr (std::is_same_v<T, std::optional<double>>) {
      value = optional_number(name, value);
    } else {
      const int64_t given = integer(name, int64_t(value));
      value = int64_t(T(given)) == given ? T(given) : T(-1);
    }
  }
  void eps(float& value) {
    option("eps", value);
    require(value >= 0.0f, "eps must be >= 0, got ", value);
  }
  void result(const char* name, Matrix& m, const Matrix& x, DType dtype) {
    field({name, Role::result, m, sizes_of(x, dtype)});
  }
  void result(const char* name, Matrix& m, const Matrix& x) { result(name, m, x, x.dtype); }
  void result(const char* name, Matrix& m, int64_t rows, int64_t cols, DType dtype) {
    field({name, Role::result, m, {.rows = rows, .cols = cols, .dtype = dtype}});
  }
  void result(const char* name, Vector& v, int64_t size, DType dtype) {
    field({name, Role::result, v, {.cols = size, .dtype = dtype}});
  }
  // The result has [rows, cols]. Its tensor has the sizes of x's tensor except the last, and except the first
  // if that counts several matrices.
  void result(const char* name, Matrix& m, const Matrix& x, int64_t rows, int64_t cols, DType dtype,
              Role role = Role::result) {
    field({name, role, m, {.rows = rows, .cols = cols, .dtype = dtype, .of = &x, .other_cols = true}});
  }
  void result(const char* name, Matrix& m, const Matrix& x, int64_t rows, int64_t cols) {
    result(name, m, x, rows, cols, x.dtype);
  }
  void result_if(bool wanted, const char* name, Vector& v, int64_t size, DType dtype = DType::f32) {
    field({name, Role::result, v, {.cols = size, .dtype = dtype, .wanted = wanted}});
  }
  // The result is a tensor without dimensions.
  void number(const char* name, Vector& v, DType dtype = DType::f32, bool wanted = true) {
    field({name, Role::result, v, {.cols = 1, .dtype = dtype, .scalar = true, .wanted = wanted}});
  }
  void number_if(bool wanted, const char* name, Vector& v) { number(name, v, DType::f32, wanted); }
  // The result is a loss of every row, or one of all rows.
  void rows_or_number(const char* name, bool by_row, Vector& rows, int64_t size, Vector& total) {
    by_row ? result(name, rows, size, DType::f32) : number(name, total);
  }
  // The result has the sizes of a given tensor.
  void result_if(bool wanted, const char* name, Vector& v, const Vector& of, Role role = Role::result) {
    field({name, role, v, {.cols = of.size, .scalar = true, .of = &of, .wanted = wanted}});
  }
  void result_if(bool wanted, const char* name, Matrix& m, const Matrix& x, Role role = Role::result) {
    Expected e = sizes_of(x, x.dtype);
    e.wanted = wanted;
    field({name, role, m, e});
  }
  void result_if(bool wanted, const char* name, Matrix& m, int64_t rows, int64_t cols, DType dtype,
                 Role role = Role::result) {
    field({name, role, m, {.rows = rows, .cols = cols, .dtype = dtype, .wanted = wanted}});
  }
  // The result is dense and has the sizes of t.
  void result_if(bool wanted, const char* name, Strided& result, const Strided& t, DType dtype,
                 bool swapped) {
    field({name, Role::result, result, {.dtype = dtype, .of = &t, .wanted = wanted, .swapped = swapped}});
  }
  // The result is [count, rows, cols]: the matrices follow one another.
  void stacked_result(const char* name, Matrix& m, int64_t count, int64_t rows, int64_t cols, DType dtype) {
    field({name, Role::result, m, {.rows = count * rows, .cols = cols, .dtype = dtype, .stack = count}});
  }
  // Names a result or a gradient that <op>_in_place writes over `input`.
  static constexpr const char* kDenseRows =
      " must have dense rows to be written in place, got a layout that needs a copy";
  static constexpr const char* kEvenRows =
      " must have a dense last dimension and evenly spaced rows with inplace=True, got other strides";
  virtual void result_over(const char* name, Matrix& m, const char* input_name, const Matrix& input,
                           Role role = Role::result, const char* refusal = kDenseRows) = 0;
  void gradient(const char* name, Matrix& m, const Matrix& x) {
    field({name, Role::gradient, m, sizes_of(x, x.dtype)});
  }
  // Names the gradient of a parameter.
  void gradient(const char* name, Vector& v, const char* of, const Vector& parameter) {
    require(!v || parameter, name, " must be absent when ", of, " is, got [", v.size, "]");
    gradient(name, v, parameter.size, parameter.dtype, &parameter);
  }
  void scalar_gradient(const char* name, Vector& v, const Vector& of) {
    field({name, Role::gradient, v, {.cols = 1, .dtype = of.dtype, .scalar = true, .of = &of}});
  }
  void gradient(const char* name, Vector& v, int64_t size, DType dtype, const Vector* sizes_of = nullptr) {
    field({name, Role::gradient, v, {.cols = size, .dtype = dtype, .of = sizes_of}});
  }
  // Sets the name in messages of a call that has a name of its own.
  virtual void rename(const char* op) { (void)op; }
  bool on_cuda() const { return on_cuda_; }
  // States a rule of this op.
  template <class... Parts>
  void require(bool holds, const Parts&... parts) const {
    if (checked_op_ != nullptr && !holds) [[unlikely]]
      detail::fail(checked_op_, {parts...});
  }

 protected:
  virtual void field(const Field& f) = 0;
  virtual bool flag(const char*, bool value) { return value; }
  virtual double float_number(const char*, double value) { return value; }
  virtual std::optional<double> optional_number(const char*, std::optional<double> value) { return value; }
  virtual int64_t integer(const char*, int64_t value) { return value; }

 private:
  static Expected sizes_of(const Matrix& x, DType dtype) {
    return {.rows = x.rows, .cols = x.cols, .dtype = dtype, .of = &x};
  }
  const char* checked_op_;  // null: nothing is checked
  // True if the call that is checked runs on CUDA.
  const bool on_cuda_;
};

}  // namespace tigon

// Declares an entry in tigon and the entries of both backends, in tigon::cpu and tigon::cuda.
#define TIGON_API_ENTRY(entry, Args)                 \
  TIGON_API void entry(Context& ctx, const Args& a); \
  namespace cpu {                                    \
  void entry(Context& ctx, const Args& a);           \
  }                                                  \
  namespace cuda {                                   \
  void entry(Context& ctx, const Args& a);           \
  }
// Declares both directions of an op: TIGON_API_OP(rms_norm, RmsNorm) declares rms_norm_fwd(Context&, const
// RmsNormFwd&) and rms_norm_bwd.
#define TIGON_API_OP(op, Args)         \
  TIGON_API_ENTRY(op##_fwd, Args##Fwd) \
  TIGON_API_ENTRY(op##_bwd, Args##Bwd)
