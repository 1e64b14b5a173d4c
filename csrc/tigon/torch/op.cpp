// Registers PyTorch's operators for the ops whose arguments have a list of fields (base/fields.h): their
// schemas, and one adaptor for all.
#include "tigon/base/op.h"

#include <algorithm>
#include <array>
#include <utility>

#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
namespace {

enum class Variant : int8_t { whole, infer, in_place };

// Writes the schema of a variant.
class Schema final : public Fields {
 public:
  explicit Schema(Variant variant) : variant_(variant) {}
  bool has_statistics = false, has_in_place = false;

  std::string text() const {
    return "(" + inputs_ + ") -> " + (count_ == 1 ? "Tensor" : "(" + results_ + ")");
  }
  void statistics(const char* name, std::initializer_list<Statistic>, int64_t, Role role) override {
    has_statistics = has_statistics || role == Role::statistics;
    if (role == Role::saved)
      add(inputs_, "Tensor ", name);
    else if (variant_ != Variant::infer)
      result(name);
  }
  void result_over(const char* name, Matrix& m, const char* input_name, const Matrix&, Role role,
                   const char*) override {
    has_in_place = true;
    if (variant_ != Variant::in_place) return field({name, role, m, {}});
    for (const char* type : {"", "?"}) {
      const std::string end = std::string(type) + " " + input_name;
      if (const size_t at = inputs_.find("Tensor" + end); at != std::string::npos)
        inputs_.insert(at + 6, alias());
    }
  }
  void list(const char* name, std::span<const Vector>&, const Listed& each) override {
    add(inputs_, "Tensor" + (each.updated ? alias() : "") + "[] ", name);
  }

 protected:
  void field(const Field& f) override {
    // The schema lists these after all inputs.
    if (f.role == Role::gradient) add(inputs_, "bool need_", f.name);
    has_statistics = has_statistics || f.role == Role::statistics;
    if (f.role == Role::gradient || f.role == Role::result)
      result(f.name);
    else if (f.role != Role::statistics)
      add(inputs_, "Tensor" + (f.expected.updated ? alias() : "") + (f.role == Role::optional ? "? " : " "),
          f.name);
    else if (variant_ != Variant::infer)
      result(f.name);
  }
  bool flag(const char* name, bool value) override { return add(inputs_, "bool ", name), value; }
  double float_number(const char* name, double value) override { return add(inputs_, "float ", name), value; }
  std::optional<double> optional_number(const char* name, std::optional<double> value) override {
    return add(inputs_, "float? ", name), value;
  }
  int64_t integer(const char* name, int64_t value) override { return add(inputs_, "int ", name), value; }

 private:
  static void add(std::string& list, const std::string& type, const char* name) {
    if (!list.empty()) list += ", ";
    list += type + name;
  }
  std::string alias() { return std::string("(") + char('a' + aliases_++) + "!)"; }
  void result(const char* name) { add(results_, "Tensor ", name), ++count_; }
  const Variant variant_;
  std::string inputs_, results_;
  int count_ = 0, aliases_ = 0;
};

// The most tensors that a call takes, and the most that it returns.
constexpr size_t kMostTensors = 20;

// Holds a tensor of the call, and the member that views it.
struct Held {
  const void* member = nullptr;
  OptionalTensor tensor;
  // The given tensor has no view, so this is a copy.
  bool copied = false;
  // The tensor holds several matrices along its first dimension.
  bool stacked = false;
};

struct HeldList {
  const char* name;
  TensorList tensors;
  std::vector<Vector> vectors;
  std::vector<Tensor> copies;
};

void set_layout(Strided& view, const Shape& shape) {
  // A tensor of more dimensions is refused when the view is made.
  view.dims = std::min(shape.dims, Strided::kMostDims);
  std::copy_n(shape.sizes, view.dims, view.sizes), std::copy_n(shape.strides, view.dims, view.strides);
}

// Takes the arguments off PyTorch's stack. All are owned before anything can throw.
class Arguments final : public Fields {
 public:
  Arguments(Variant variant, StableIValue* stack) : variant_(variant), stack_(stack) {}
  std::array<Held, kMostTensors> tensors;
  // Has a bit for each gradient.
  uint32_t needs = 0;
  std::vector<HeldList> lists;
  bool has_results = false;

  // Returns the tensor of Role::rows, else the first one; absent if lists are empty.
  OptionalTensor like() const {
    if (lists.empty()) return tensors[rows_].tensor;
    return lists[0].tensors.size() > 0 ? OptionalTensor(lists[0].tensors.tensor(0)) : std::nullopt;
  }
  void statistics(const char*, std::initializer_list<Statistic> list, int64_t, Role role) override {
    if (role == Role::saved) tensors.at(count_++) = {&list.begin()->vector, stack_.take<Tensor>()};
  }
  void result_over(const char* name, Matrix& m, const char*, const Matrix&, Role role, const char*) override {
    if (variant_ != Variant::in_place) field({name, role, m, {}});
  }
  void list(const char* name, std::span<const Vector>&, const Listed&) override {
    lists.push_back({name, stack_.take<TensorList>(), {}, {}});
  }

 protected:
  void field(const Field& f) override {
    has_results = has_results || f.role == Role::result;
    if (f.role == Role::result || f.role == Role::statistics) return;
    if (f.role == Role::gradient) {
      needs |= uint32_t(stack_.take<bool>()) << gradients_++;
    } else {
      if (f.role == Role::rows) rows_ = count_;
      Held& held = tensors.at(count_++);
      held.member = f.member;
      if (f.role == Role::optional)
        held.tensor = stack_.take<OptionalTensor>();
      else
        held.tensor = stack_.take<Tensor>();
      if (f.strided == nullptr || !held.tensor) return;
      const Shape shape(held.tensor->get());
      set_layout(*f.strided, shape);
      f.strided->swapped = shape.dims >= 3 && shape.strides[shape.dims - 3] < shape.strides[shape.dims - 2];
    }
  }
  bool flag(const char*, bool) override { return stack_.take<bool>(); }
  double float_number(const char*, double) override { return stack_.take<double>(); }
  std::optional<double> optional_number(const char*, std::optional<double>) override {
    return stack_.take<std::optional<double>>();
  }
  int64_t integer(const char*, int64_t) override { return stack_.take<int64_t>(); }

 private:
  const Variant variant_;
  Stack stack_;
  size_t count_ = 0, rows_ = 0;
  int gradients_ = 0;
};

// Makes views of the tensors, and allocates results.
class Views final : public Fields {
 public:
  Views(const char* op, Variant variant, Arguments& arguments, const Tensor& like)
      : Fields(nullptr, like.is_cuda()),
        op_(op),
        variant_(variant),
        tensors_(arguments.tensors),
        lists_(arguments.lists),
        needs_(arguments.needs),
        like_(like) {}

  void put_results(StableIValue* stack) {
    for (size_t i = 0; i < count_; ++i) stack[i] = torch::stable::detail::from(*results_[i]);
  }

  void statistics(const char* name, std::initializer_list<Statistic> list, int64_t size, Role role) override {
    const int64_t rows = int64_t(list.size());
    if (role == Role::saved) {
      Tensor& t = *tensors_[next_++].tensor;
      int64_t row = 0;
      for (const Statistic& s : list)
        s.vector = rows == 1 ? vector_of(op_, name, t) : row_of(op_, name, t, row++);
    } else if (variant_ != Variant::infer) {
      Tensor& t = add(rows == 1 ? make(like_, {size}, DType::f32) : make(like_, {rows, size}, DType::f32));
      auto* data = static_cast<float*>(data_of(op_, name, t));
      for (const Statistic& s : list) s.vector = {.data = data, .size = size}, data += size;
    }
  }
  void result_over(const char* name, Matrix& m, const char* input_name, const Matrix& input, Role role,
                   const char* refusal) override {
    const Expected e = {.rows = input.rows, .cols = input.cols, .dtype = input.dtype, .of = &input};
    if (variant_ != Variant::in_place) return field({name, role, m, e});
    const Held* from = held(&input);
    check_in_place(input_name, from != nullptr && from->copied, refusal);
    m = input;
  }
  void list(const char* name, std::span<const Vector>& list, const Listed& each) override {
    HeldList& held = lists_[next_list_++];
    held.vectors.resize(held.tensors.size());
    const DeviceId device(like_.get());
    const Shape first(like_.get());
    for (size_t i = 0; i < held.vectors.size(); ++i) {
      AtenTensorHandle t = held.tensors[i];
      if (!device.has(t)) check_same_device(op_, name, held.tensors.tensor(i), like_);
      const Shape shape(t);
      TIGON_CHECK(op_, each.size < 0 || (shape.has_sizes_of(first) && shape.is_contiguous()), name,
                  " must be contiguous and of one shape, got one of ", shape.numel, " elements that is not");
      TIGON_CHECK(op_, !each.updated || shape.is_dense(), name,
                  " must fill their memory without gaps or overlaps, got one of ", shape.numel,
                  " elements that does not");
      if (!each.updated && !shape.is_contiguous()) {
        held.copies.push_back(to_contiguous(op_, name, held.tensors.tensor(i)));
        t = held.copies.back().get();
      }
      held.vectors[i] = elements_of(op_, name, t, shape.numel);
    }
    list = held.vectors;
  }
  void rename(const char* op) override { op_ = op; }

 protected:
  void field(const Field& f) override {
    if (f.role == Role::statistics && variant_ == Variant::infer) return;
    if (f.role == Role::result || f.role == Role::statistics) return make_result(f, true);
    if (f.role == Role::gradient) return make_result(f, (needs_ >> gradients_++) & 1);
    Held& held = tensors_[next_++];
    if (!held.tensor) return;
    Tensor& t = *held.tensor;
    const AtenTensorHandle given = t.get();
    if (given != like_.get()) check_same_device(op_, f.name, t, like_);
    if (f.expected.leading != nullptr && f.vector != nullptr)
      *f.expected.leading = t.dim() == 2 ? t.size(0) : -t.dim();
    else if (f.expected.leading != nullptr) {
      TIGON_CHECK(op_, t.dim() >= 2, f.name, " must have at least two dimensions, got ", t.dim());
      *f.expected.leading = t.size(0), held.stacked = true;
    }
    if (f.strided != nullptr) {
      view(f, t);
    } else if (f.matrix != nullptr) {
      *f.matrix = rows_of(op_, f.name, t);
      if (f.expected.padded && f.matrix->rows == 1 && t.dim() == 2)
        f.matrix->stride = std::max(f.matrix->cols, t.stride(0));
    } else {
      *f.vector = f.expected.scalar ? scalar_of(op_, f.name, t)
                  : f.expected.flat ? torch_shim::flat(op_, f.name, t)
                                    : vector_of(op_, f.name, t);
    }
    held.copied = t.get() != given;
    if (f.expected.updated) check_in_place(f.name, held.copied, kDenseRows);
  }

 private:
  void check_in_place(const char* name, bool copied, const char* refusal) const {
    TIGON_CHECK(op_, !copied, name, refusal);
  }
  void view(const Field& f, Tensor& t) const {
    const int64_t dims = f.strided->dims, least = f.expected.rows;
    TIGON_CHECK(op_, dims == least || dims == least + 1, f.name, " must have ", least, " or ", least + 1,
                " dimensions, got ", t.dim());
    int64_t dense = 1;
    for (int64_t d = dims - 1; d >= dims - f.expected.cols; dense *= f.strided->sizes[d--])
      if (f.strided->sizes[d] > 1 && f.strided->strides[d] != dense) {
        t = to_contiguous(op_, f.name, t);
        set_layout(*f.strided, Shape(t.get()));
        break;
      }
    f.strided->data = data_of(op_, f.name, t), f.strided->dtype = dtype_of(op_, f.name, t.get());
  }
  Tensor& add(Tensor t) { return results_.at(count_++).emplace(std::move(t)); }
  const Held* held(const void* member) const {
    for (size_t i = 0; i < next_; ++i)
      if (tensors_[i].member == member && tensors_[i].tensor) return &tensors_[i];
    return nullptr;
  }
  // If `like` is stacked, a result with other columns has the sizes of one matrix.
  static Tensor make_matrix(const Held& like, const Expected& e) {
    const Tensor& t = *like.tensor;
    if (!e.other_cols) return make_like(t, e.dtype);
    return make_rows(t, e.cols, e.dtype, like.stacked);
  }
  void make_strided(const Field& f, const Tensor& like) {
    const Expected& e = f.expected;
    Strided& view = *f.strided = *static_cast<const Strided*>(e.of);
    const int64_t dims = view.dims;
    int64_t step = 1;
    for (int64_t d = dims - 1; d >= 0; step *= std::max<int64_t>(view.sizes[d--], 1)) view.strides[d] = step;
    if (e.swapped) {
      const int64_t inner = view.strides[dims - 2], size = std::max<int64_t>(view.sizes[dims - 3], 1);
      view.strides[dims - 3] = inner, view.strides[dims - 2] = inner * size;
    }
    Tensor& t = add(e.swapped ? empty_strided(like, view.sizes, view.strides, dims, e.dtype)
                              : make_like(like, e.dtype));
    view.data = data_of(op_, f.name, t), view.dtype = e.dtype;
  }
  void make_result(const Field& f, bool wanted) {
    const Expected& e = f.expected;
    const Held* like = held(e.of);
    // An absent input has no such result.
    if (!wanted || !e.wanted || (e.of != nullptr && like == nullptr)) {
      const bool of_parameter = f.vector != nullptr && e.of != nullptr && !e.scalar;
      add(nothing(like_, of_parameter ? dtype_of(op_, "x", like_) : e.dtype));
    } else if (f.strided != nullptr) {
      make_strided(f, *like->tensor);
    } else if (f.matrix != nullptr) {
      Tensor& t = add(like != nullptr ? make_matrix(*like, e)
                      : e.stack > 0   ? make(like_, {e.stack, e.rows / e.stack, e.cols}, e.dtype)
                                      : make(like_, {e.rows, e.cols}, e.dtype));
      *f.matrix = {.data = data_of(op_, f.name, t),
                   .dtype = e.dtype,
                   .rows = e.rows,
                   .cols = e.cols,
                   .stride = e.cols};
    } else {
      Tensor& t = add(!e.scalar         ? make(like_, {e.cols}, e.dtype)
                      : like != nullptr ? make_like(*like->tensor, e.dtype)
                                        : make(like_, {}, e.dtype));
      *f.vector = {.data = data_of(op_, f.name, t), .dtype = e.dtype, .size = e.cols};
    }
  }

  const char* op_;
  const Variant variant_;
  std::array<Held, kMostTensors>& tensors_;
  std::vector<HeldList>& lists_;
  std::array<OptionalTensor, kMostTensors> results_;
  const uint32_t needs_;
  // The tensor of Role::rows gives the results their device and sizes.
  const Tensor& like_;
  size_t next_ = 0, next_list_ = 0, count_ = 0;
  int gradients_ = 0;
};

void call(const Operator& op, const char* name, Variant variant, StableIValue* stack) {
  alignas(std::max_align_t) std::byte memory[kArgsBytes];
  AnyArgs& args = *op.make(memory);
  Arguments arguments(variant, stack);
  args.fields(arguments);
  const OptionalTensor like = arguments.like();
  if (!like) {
    TIGON_CHECK(name, !arguments.has_results, arguments.lists[0].name,
                " must have at least one tensor, got none");
    return;
  }
  Views views(name, variant, arguments, *like);
  args.fields(views);
  auto ctx = make_context(*like);
  args.run(*ctx);
  views.put_results(stack);
}

// PyTorch calls a kernel by its address only, so each place of the table needs a function.
struct Place {
  Operator op;
  Variant variant;
  const char* suffix;
  std::string schema;
  std::string name;  // the name in messages
};
const std::vector<Place>& places() {
  static const std::vector<Place> all = [] {
    std::vector<Place> found;
    for (const Operator& op : operators()) {
      alignas(std::max_align_t) std::byte memory[kArgsBytes];
      AnyArgs& args = *op.make(memory);
      auto add = [&](Variant variant, const char* suffix) {
        Schema schema(variant);
        args.fields(schema);
        std::string name = op.op;
        // The name of an in-place operator ends with an underscore.
        if (name.back() == '_') name.pop_back();
        found.push_back({op, variant, suffix, schema.text(), name});
        return std::pair(schema.has_statistics, schema.has_in_place);
      };
      const bool forward = op.direction == Direction::forward, backward = op.direction == Direction::backward;
      auto [has_statistics, has_in_place] = add(Variant::whole, backward ? "_bwd" : "");
      // Python attaches autograd to <op>. Eager calls of <op>_fwd stay free of that layer.
      if (forward) add(Variant::whole, "_fwd");
      if (has_statistics && forward) add(Variant::infer, "_infer");
      if (has_in_place) add(Variant::in_place, backward ? "_bwd_in_place" : "_in_place");
    }
    return found;
  }();
  return all;
}
constexpr size_t kMostPlaces = 200;
template <size_t i>
void call_place(StableIValue* stack, uint64_t, uint64_t) {
  const Place& place = places()[i];
  call(place.op, place.name.c_str(), place.variant, stack);
}
constexpr auto kKernels = []<size_t... i>(std::index_sequence<i...>) {
  return std::array<Kernel, kMostPlaces>{&call_place<i>...};
}(std::make_index_sequence<kMostPlaces>());

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  for (const Place& place : places()) define(m, place.op.op + (place.suffix + place.schema));
}
TIGON_TORCH_KERNELS(m) {
  for (size_t i = 0; i < places().size(); ++i)
    m.impl((std::string(places()[i].op.op) + places()[i].suffix).c_str(), kKernels.at(i));
}

}  // namespace tigon::torch_shim
