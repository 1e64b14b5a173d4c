#include <cmath>
#include <vector>

#include "tigon/ops/adamw/adamw.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::adamw_torch {
namespace {

constexpr const char* kOp = "adamw";

// Returns "param 3" and the like, for messages.
std::string name_at(const char* name, size_t i) { return std::string(name) + " " + std::to_string(i); }

// Returns a copy of `t` with the strides of `like`.
Tensor laid_out(const Tensor& t, const Tensor& like) {
  auto sizes = like.sizes(), strides = like.strides();
  Tensor copy =
      empty_strided(like, sizes.data(), strides.data(), int64_t(sizes.size()), dtype_of(kOp, "grad", t));
  StableIValue stack[3] = {torch::stable::detail::from(copy), torch::stable::detail::from(t),
                           torch::stable::detail::from(false)};
  check_torch(torch_call_dispatcher("aten::copy_", "", stack, TORCH_ABI_VERSION),
              [] { return "aten::copy_ failed"; });
  // Takes and drops the returned handle.
  torch::stable::detail::to<Tensor>(stack[0]);
  return copy;
}

// Makes views of the tensors of a call, those of the i-th parameter under its strides.
class Views {
 public:
  explicit Views(Tensor like) : like_(std::move(like)), device_(like_.get()) {}
  const Tensor& like() const { return like_; }

  Vector param(const TensorList& list, size_t i, const Shape& shape) const {
    require_here("param", list, i, i);
    TIGON_CHECK(kOp, shape.is_dense(), name_at("param", i),
                " must fill its memory without gaps or overlaps (dense strides in any order), got a view "
                "that does not: step a contiguous copy");
    return elements_of(kOp, "param", list[i], shape.numel);
  }
  Vector grad(const TensorList& list, const TensorList& params, size_t i, const Shape& param) {
    require_here("grad", list, i, i);
    const Shape shape(list[i]);
    require_sizes("grad", shape, param, i);
    if (shape.has_strides_of(param)) return elements_of(kOp, "grad", list[i], shape.numel);
    copies_.push_back(laid_out(list.tensor(i), params.tensor(i)));
    return elements_of(kOp, "grad", copies_.back().get(), shape.numel);
  }
  // Returns the k-th tensor of the list, which belongs to the i-th parameter.
  Vector state(const char* name, const TensorList& list, size_t k, size_t i, const Shape& param) const {
    require_here(name, list, k, i);
    const Shape shape(list[k]);
    require_sizes(name, shape, param, i);
    TIGON_CHECK(kOp, shape.has_strides_of(param), name_at(name, i),
                " must have the strides of its param, got others: the param was given another memory layout "
                "after its state was made");
    return elements_of(kOp, name, list[k], shape.numel);
  }
  // Returns the absmax of the blocks of the i-th parameter.
  Vector absmax(const TensorList& list, size_t k, size_t i) const {
    require_here("absmax", list, k, i);
    const Shape shape(list[k]);
    TIGON_CHECK(kOp, shape.is_contiguous(), name_at("absmax", i), " must have its elements without gaps");
    return elements_of(kOp, "absmax", list[k], shape.numel);
  }
  // Returns the step of the i-th parameter, or of all `size`.
  Vector step(const TensorList& list, size_t i, size_t size) const {
    const Shape shape(list[i]);
    TIGON_CHECK(kOp, shape.numel == int64_t(size) && shape.is_contiguous(), name_at("step", i), " must have ",
                size, " elements without gaps, got ", shape.numel);
    const Vector done = elements_of(kOp, "step", list[i], shape.numel);
    TIGON_CHECK(kOp, done.dtype == DType::f32, name_at("step", i), " must be float32, got ",
                name_of(done.dtype));
    if (!DeviceId(list[i]).is_cpu()) require_here("step", list, i, i);
    return done;
  }
  // True if the host counts steps that the tensors keep, for a GPU.
  bool counts_for_device(const TensorList& steps, size_t i) const { return !device_.has(steps[i]); }
  Vector scalar(const char* name, const OptionalTensor& t) const {
    if (!t.has_value()) return {};
    check_same_device(kOp, name, *t, like_);
    return scalar_of(kOp, name, *t);
  }

 private:
  const Tensor like_;
  const DeviceId device_;
  std::vector<Tensor> copies_;

  void require_here(const char* name, const TensorList& list, size_t k, size_t i) const {
    if (!device_.has(list[k])) check_same_device(kOp, name_at(name, i).c_str(), list.tensor(k), like_);
  }
  static void require_sizes(const char* name, const Shape& shape, const Shape& param, size_t i) {
    TIGON_CHECK(kOp, shape.has_sizes_of(param), name_at(name, i), " must have the sizes of its param of ",
                param.numel, " elements, got others of ", shape.numel,
                ": the param was resized or replaced after its state was made");
  }
};

// Returns the next place in a list that holds tensors only for those parameters that need them.
size_t next_of(const char* name, const TensorList& list, size_t& used) {
  TIGON_CHECK(kOp, used < list.size(), name, " must have one tensor for each param that needs it, got ",
              list.size());
  return used++;
}

// A group has lr (NaN: the next of lrs), beta1, beta2, eps, weight_decay, decoupled, maximize and amsgrad.
constexpr size_t kHyperparameters = 8;

void step(StableIValue* stack, uint64_t, uint64_t) {
  Stack arguments(stack);
  auto list = [&] { return arguments.take<TensorList>(); };
  TensorList params = list(), grads = list(), exp_avgs = list(), exp_avg_sqs = list(),
             max_exp_avg_sqs = list(), extras = list(), absmaxes = list(), steps = list();
  const auto first = arguments.take<std::vector<int64_t>>(),
             group_sizes = arguments.take<std::vector<int64_t>>();
  const auto hyperparameters = arguments.take<std::vector<double>>();
  TensorList lrs = list();
  const auto rounding = arguments.take<int64_t>(), moment_rounding = arguments.take<int64_t>(),
             seed = arguments.take<int64_t>();
  const OptionalTensor clip = arguments.take<OptionalTensor>(), grad_scale = arguments.take<OptionalTensor>(),
                       found_inf = arguments.take<OptionalTensor>();
  const size_t n = params.size();
  const bool joined = steps.size() == 1;  // one tensor for all
  for (size_t size : {grads.size(), exp_avgs.size(), exp_avg_sqs.size(), joined ? n : steps.size(),
                      first.empty() ? n : first.size()})
    TIGON_CHECK(kOp, size == n, "lists must have ", n, " tensors each, got one of ", size);
  TIGON_CHECK(kOp, hyperparameters.size() == kHyperparameters * group_sizes.size(),
              "hyperparameters must be ", kHyperparameters, " a group, got ", hyperparameters.size());
  for (int64_t given : {rounding, moment_rounding})
    TIGON_CHECK(kOp, given >= 0 && given < kAdamwRoundings, "roundings must be one of 0 to ",
                kAdamwRoundings - 1, ", got ", given);
  if (n == 0) return;
  const auto mode = AdamwRounding(rounding);
  Views views(params.tensor(0));
  std::vector<AdamwGroup> groups;
  std::vector<AdamwTensor> tensors(n);
  // Points to the steps that the core was given as numbers.
  std::vector<float*> counted;
  Vector done;
  size_t i = 0, used_lrs = 0, used_most = 0, used_extras = 0, used_absmaxes = 0;
  for (size_t g = 0; g < group_sizes.size(); ++g) {
    const double* h = &hyperparameters[kHyperparameters * g];
    const float* lr = nullptr;
    if (std::isnan(h[0])) {
      const Vector v = views.scalar("lr", lrs.tensor(next_of("lrs", lrs, used_lrs)));
      TIGON_CHECK(kOp, v.dtype == DType::f32, "lr must be float32, got ", name_of(v.dtype));
      lr = v.as<float>();
    }
    groups.push_back({h[0], lr, h[1], h[2], h[3], h[4], h[5] != 0.0, h[6] != 0.0});
    TIGON_CHECK(kOp, group_sizes[g] >= 0 && size_t(group_sizes[g]) <= n - i,
                "group_sizes must sum up to the number of params, ", n);
    for (const size_t end = i + size_t(group_sizes[g]); i < end; ++i) {
      AdamwTensor& t = tensors[i];
      const Shape shape(params[i]);
      t.param = views.param(params, i, shape);
      t.grad = views.grad(grads, params, i, shape);
      t.exp_avg = views.state("exp_avg", exp_avgs, i, i, shape);
      t.exp_avg_sq = views.state("exp_avg_sq", exp_avg_sqs, i, i, shape);
      if (h[7] != 0.0)
        t.max_exp_avg_sq = views.state("max_exp_avg_sq", max_exp_avg_sqs,
                                       next_of("max_exp_avg_sqs", max_exp_avg_sqs, used_most), i, shape);
      if (is_half(t.param.dtype) && mode == AdamwRounding::split)
        t.low = views.state("param_low", extras, next_of("extras", extras, used_extras), i, shape);
      if (is_half(t.param.dtype) && mode == AdamwRounding::master)
        t.master = views.state("master_param", extras, next_of("extras", extras, used_extras), i, shape);
      for (auto [moment, absmax] :
           {std::pair{&t.exp_avg, &t.avg_absmax}, std::pair{&t.exp_avg_sq, &t.root_absmax}})
        if (moment->dtype == DType::u8)
          *absmax = views.absmax(absmaxes, next_of("absmaxes", absmaxes, used_absmaxes), i);
      if (i == 0 || !joined) done = views.step(steps, i, joined ? n : 1);
      float* at = done.as<float>() + (joined ? i : 0);
      if (views.counts_for_device(steps, joined ? 0 : i))
        t.steps = int64_t(*at), counted.push_back(at);
      else
        t.step = {at, DType::f32, 1};
      t.first = first.empty() ? 0 : first[i];
      t.group = int64_t(g);
    }
  }
  TIGON_CHECK(kOp, i == n, "group_sizes must sum up to the number of params, ", n, ", got ", i);
  auto ctx = make_context(views.like());
  adamw(*ctx, {.tensors = tensors,
               .groups = groups,
               .rounding = mode,
               .moment_rounding = AdamwRounding(moment_rounding),
               .seed = uint64_t(seed),
               .clip = views.scalar("clip", clip),
               .grad_scale = views.scalar("grad_scale", grad_scale),
               .found_inf = views.scalar("found_inf", found_inf)});
  for (float* at : counted) *at += 1.0f;
}

}  // namespace

// `first` is empty if nothing is drawn from it. Params, moments, extras (what a rounding needs in addition)
// and steps are updated in place. max_exp_avg_sqs, extras and absmaxes (of exp_avg and
// exp_avg_sq, if they are uint8) hold tensors only for the params that have them, in the order of params. A
// group's tensors are adjacent.
TIGON_TORCH_SCHEMAS(m) {
  define(m,
         "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
         "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] extras, Tensor(f!)[] absmaxes, Tensor(g!)[] steps, "
         "int[] first, int[] group_sizes, float[] hyperparameters, Tensor[] lrs, int rounding, "
         "int moment_rounding, int seed, Tensor? clip, Tensor? grad_scale, Tensor? found_inf) -> ()");
}
TIGON_TORCH_KERNELS(m) { m.impl("adamw_", &step); }

}  // namespace tigon::torch_shim::adamw_torch
