// The arguments of an op, declared once. Args::fields(f) names every member to f, in the order of the PyTorch schema: its role, and
// the sizes and dtype that it must have. Three readers follow the list: the checks of the entry (base/op.h), the schema, and the
// adaptor that makes views of tensors and allocates results (both torch/op.cpp).
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <type_traits>

#include "tigon/base/check.h"
#include "tigon/base/context.h"

namespace tigon {

enum class Role : int8_t {
  rows,      // the matrix of floats that the op works on; the other tensors are on its device
  input,     //
  optional,  // an input that may be absent
  saved,     // statistics of the forward, read by the backward
  statistics,  // for the backward: where none follows they are absent, and <op>_infer is the operator without them
  result,   //
  gradient  // a result that may be absent; PyTorch says by need_<name> whether it is wanted
};

// A tensor as it lies in memory. One that is absent has no dimensions.
struct Strided {
  static constexpr int64_t kMostDims = 6;  // one more than any that is taken
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t dims = 0, sizes[kMostDims] = {}, strides[kMostDims] = {};
  bool swapped = false;  // as given, the two dimensions before the last lie in memory in the other order

  constexpr explicit operator bool() const { return dims > 0; }
};

struct Statistic {
  const char* name;
  Vector& vector;
};

// What a field must be. Of a vector, `cols` is its size.
struct Expected {
  int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;
  bool or_f32 = false;           // or float32
  const Vector* like = nullptr;  // of its dtype, where it is there
  bool scalar = false;           // a tensor of one element and of any number of dimensions
  int64_t* leading =
      nullptr;        // takes the tensor's first dimension, which its results do not have; of a vector `flat`
  int64_t stack = 0;  // of a result: [stack, rows / stack, cols]; 0: two dimensions
  const void* of = nullptr;  // the member whose tensor has a result's sizes; null: [rows, cols]
  bool other_cols = false;   // of those sizes but for the last
  bool wanted = true;        // a result that is; else it is absent
  bool flat = false;         // all elements of a tensor of any shape
  bool updated = false;      // an input that is written
  bool padded = false;       // one row keeps the stride of its tensor
  bool swapped = false;      // a result whose two dimensions before the last lie in memory in the other order
};

// Of each tensor of a list, whose elements are taken in the order of memory.
struct Listed {
  bool updated = false;  // written: memory without gaps; else one that is not contiguous is copied
  int64_t size = -1;     // elements of each, which all have one dtype and, contiguous, one shape
};

struct Field {
  const char* name;
  Role role;
  Expected expected;
  void* member;
  Matrix* matrix = nullptr;  // or:
  Vector* vector = nullptr;
  Strided* strided = nullptr;  // of rows or one more dimensions, the last cols of them dense

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
  // Several matrices of equal sizes in one tensor, along its first dimension.
  void stacked_rows(const char* name, Matrix& x, int64_t& count) {
    field({name, Role::rows, x, {.cols = 1, .leading = &count}});
  }
  void stacked(const char* name, Matrix& m, int64_t& count, DType dtype) {
    field({name, Role::input, m, {.rows = m.rows, .cols = m.cols, .dtype = dtype, .leading = &count}});
  }
  // Of the sizes of x.
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
  // Of `rows` rows, in x's dtype or float32.
  void input_rows(const char* name, Matrix& m, int64_t rows, const Matrix& x) {
    field({name, Role::input, m, {.rows = rows, .cols = x.cols, .dtype = x.dtype, .or_f32 = true}});
  }
  // By column of x, in its dtype or float32, in that of `like` where that is there; may be absent.
  void parameter(const char* name, Vector& v, const Matrix& x, const Vector* like = nullptr) {
    parameter(name, v, x.cols, x.dtype, like);
  }
  void parameter(const char* name, Vector& v, int64_t size, DType dtype, const Vector* like = nullptr) {
    field({name, Role::optional, v, {.cols = size, .dtype = dtype, .or_f32 = true, .like = like}});
  }
  // A parameter that must be there.
  void coefficients(const char* name, Vector& v, int64_t size, DType dtype, const Vector* like = nullptr) {
    field({name, Role::input, v, {.cols = size, .dtype = dtype, .or_f32 = true, .like = like}});
  }
  void scalar(const char* name, Vector& v, DType dtype, Role role = Role::input) {
    const bool or_f32 = dtype != DType::f32;
    field({name, role, v, {.cols = 1, .dtype = dtype, .or_f32 = or_f32, .scalar = true}});
  }
  // Tensors of floats.
  virtual void list(const char* name, std::span<const Vector>& list, const Listed& each) = 0;
  // Of any size and dtype: the entry says what they must be.
  void input(const char* name, Matrix& m) { input(name, m, m); }
  void input(const char* name, Vector& v) { input(name, v, v.size, v.dtype); }
  void optional(const char* name, Matrix& m) { optional(name, m, m); }
  void optional(const char* name, Vector& v) { optional(name, v, v.size, v.dtype); }
  // Written in place: of any size and dtype, or of those of x.
  void updated(const char* name, Matrix& m, Role role = Role::optional) { updated(name, m, m, role); }
  void updated(const char* name, Matrix& m, const Matrix& x, Role role) {
    Expected e = sizes_of(x, x.dtype);
    e.updated = true;
    field({name, role, m, e});
  }
  void updated(const char* name, Vector& v) {
    field({name, Role::optional, v, {.cols = v.size, .updated = true}});
  }
  // Memory of the caller's whose rows lie further apart than they are long: a product's kernel goes by that, of one row too.
  void padded_rows(const char* name, Matrix& m, bool updated) {
    field({name, Role::input, m, {.cols = m.cols, .updated = updated, .padded = true}});
  }
  // Of `least` or one more dimensions; a tensor whose last `dense` ones are not dense is copied.
  void strided(const char* name, Strided& t, int64_t least, int64_t dense, Role role, bool updated = false) {
    field({name, role, t, {.rows = least, .cols = dense, .updated = updated}});
  }
  // All elements of a tensor of any shape. `rows`: of one of two dimensions, else minus their number.
  void flat(const char* name, Vector& v, Role role = Role::optional, int64_t* rows = nullptr) {
    field({name, role, v, {.cols = v.size, .dtype = v.dtype, .leading = rows, .flat = true}});
  }
  void flat(const char* name, Vector& v, int64_t size, DType dtype, bool updated = false) {
    field({name, Role::optional, v, {.cols = size, .dtype = dtype, .flat = true, .updated = updated}});
  }
  // One or several vectors of `size` numbers in float32: rows of one tensor.
  virtual void statistics(const char* name, std::initializer_list<Statistic> list, int64_t size,
                          Role role) = 0;
  void statistics(const char* name, std::initializer_list<Statistic> list, int64_t size) {
    statistics(name, list, size, Role::statistics);
  }
  void saved(const char* name, std::initializer_list<Statistic> list, int64_t size) {
    statistics(name, list, size, Role::saved);
  }
  // A number, flag or choice; an enum that has no such value is -1.
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
  // [rows, cols]: of the sizes of x's tensor but for its last dimension, and its first where that is one of several matrices.
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
  // A tensor without dimensions.
  void number(const char* name, Vector& v, DType dtype = DType::f32, bool wanted = true) {
    field({name, Role::result, v, {.cols = 1, .dtype = dtype, .scalar = true, .wanted = wanted}});
  }
  void number_if(bool wanted, const char* name, Vector& v) { number(name, v, DType::f32, wanted); }
  // A loss of every row, or of all.
  void rows_or_number(const char* name, bool by_row, Vector& rows, int64_t size, Vector& total) {
    by_row ? result(name, rows, size, DType::f32) : number(name, total);
  }
  // Of the sizes of a tensor.
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
  // Dense, of the sizes of t.
  void result_if(bool wanted, const char* name, Strided& result, const Strided& t, DType dtype,
                 bool swapped) {
    field({name, Role::result, result, {.dtype = dtype, .of = &t, .wanted = wanted, .swapped = swapped}});
  }
  // [count, rows, cols], the matrices one after the other.
  void stacked_result(const char* name, Matrix& m, int64_t count, int64_t rows, int64_t cols, DType dtype) {
    field({name, Role::result, m, {.rows = count * rows, .cols = cols, .dtype = dtype, .stack = count}});
  }
  // As `result`, or a gradient; <op>_in_place writes it over `input`.
  static constexpr const char* kDenseRows =
      " must have dense rows to be written in place, got a layout that needs a copy";
  static constexpr const char* kEvenRows =
      " must have a dense last dimension and evenly spaced rows with inplace=True, got other strides";
  virtual void result_over(const char* name, Matrix& m, const char* input_name, const Matrix& input,
                           Role role = Role::result, const char* refusal = kDenseRows) = 0;
  void gradient(const char* name, Matrix& m, const Matrix& x) {
    field({name, Role::gradient, m, sizes_of(x, x.dtype)});
  }
  // Of a parameter.
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
  // The name in messages of a call that has one of its own.
  virtual void rename(const char* op) { (void)op; }
  bool on_cuda() const { return on_cuda_; }
  // A rule of this op's own.
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
  const bool on_cuda_;      // where it is checked
};

}  // namespace tigon

// Declares an entry in tigon, and the same of both backends in tigon::cpu and tigon::cuda.
#define TIGON_API_ENTRY(entry, Args)                 \
  TIGON_API void entry(Context& ctx, const Args& a); \
  namespace cpu {                                    \
  void entry(Context& ctx, const Args& a);           \
  }                                                  \
  namespace cuda {                                   \
  void entry(Context& ctx, const Args& a);           \
  }
// Both directions of an op: TIGON_API_OP(rms_norm, RmsNorm) declares rms_norm_fwd(Context&, const RmsNormFwd&) and rms_norm_bwd.
#define TIGON_API_OP(op, Args)         \
  TIGON_API_ENTRY(op##_fwd, Args##Fwd) \
  TIGON_API_ENTRY(op##_bwd, Args##Bwd)
