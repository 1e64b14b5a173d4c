#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tigon/ops/adamw/adamw.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = "adamw";
using Tensors = std::vector<Tensor>;

// "param 3" and the like, for messages.
std::string name_at(const char* name, size_t i) { return std::string(name) + " " + std::to_string(i); }

// Whether the elements fill one stretch of memory, each once.
bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (auto [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

bool same_sizes(const Tensor& t, const Tensor& like) {
  auto a = t.sizes(), b = like.sizes();
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}
bool same_layout(const Tensor& t, const Tensor& like) {
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) != like.stride(d)) return false;
  return true;
}

// A copy of `t` with the strides of `like`.
Tensor laid_out(const Tensor& t, const Tensor& like) {
  auto sizes = like.sizes(), strides = like.strides();
  Tensor copy =
      empty_strided(like, sizes.data(), strides.data(), int64_t(sizes.size()), dtype_of(kOp, "grad", t));
  StableIValue stack[3] = {torch::stable::detail::from(copy), torch::stable::detail::from(t),
                           torch::stable::detail::from(false)};
  check_torch(torch_call_dispatcher("aten::copy_", "", stack, TORCH_ABI_VERSION),
              [] { return "aten::copy_ failed"; });
  torch::stable::detail::to<Tensor>(stack[0]);  // takes and drops the returned handle
  return copy;
}

// The tensors of a call, the i-th of each kind under its parameter's strides.
class Views {
 public:
  explicit Views(const Tensor& like) : like_(like) {}

  Vector param(const Tensor& t, size_t i) {
    require_here("param", t, i);
    TIGON_CHECK(kOp, is_dense(t), name_at("param", i),
                " must fill its memory without gaps or overlaps (dense strides in any order), got a view "
                "that does not: step a contiguous copy");
    return flat("param", t);
  }
  Vector grad(const Tensor& t, const Tensor& param, size_t i) {
    require_here("grad", t, i);
    require_sizes("grad", t, param, i);
    if (same_layout(t, param)) return flat("grad", t);
    copies_.push_back(laid_out(t, param));
    return flat("grad", copies_.back());
  }
  Vector state(const char* name, const Tensor& t, const Tensor& param, size_t i) {
    require_here(name, t, i);
    require_sizes(name, t, param, i);
    TIGON_CHECK(kOp, same_layout(t, param), name_at(name, i),
                " must have the strides of its param, got others: the param was given another memory layout "
                "after its state was made");
    return flat(name, t);
  }
  Vector scalar(const char* name, const OptionalTensor& t) const {
    if (!t.has_value()) return {};
    check_same_device(kOp, name, *t, like_);
    return scalar_of(kOp, name, *t);
  }

 private:
  const Tensor& like_;
  Tensors copies_;

  static Vector flat(const char* name, const Tensor& t) {
    return {.data = data_of(kOp, name, t), .dtype = dtype_of(kOp, name, t), .size = t.numel()};
  }
  void require_here(const char* name, const Tensor& t, size_t i) const {
    if (t.is_cuda() == like_.is_cuda() && t.get_device_index() == like_.get_device_index()) return;
    check_same_device(kOp, name_at(name, i).c_str(), t, like_);
  }
  static void require_sizes(const char* name, const Tensor& t, const Tensor& param, size_t i) {
    TIGON_CHECK(kOp, same_sizes(t, param), name_at(name, i), " must have the sizes of its param of ",
                param.numel(), " elements, got others of ", t.numel(),
                ": the param was resized or replaced after its state was made");
  }
};

// The next tensor of a list that holds some only for those who need them.
const Tensor& next_of(const char* name, const Tensors& list, size_t& used) {
  TIGON_CHECK(kOp, used < list.size(), name, " must have one tensor for each param that needs it, got ",
              list.size());
  return list[used++];
}

constexpr size_t kHyperparameters = 8;
struct GroupOptions {
  AdamwGroup group;
  bool amsgrad;
};
// lr (NaN: the next of lrs), beta1, beta2, eps, weight_decay, decoupled, maximize, amsgrad.
GroupOptions group_of(const double* h, const Tensors& lrs, size_t& used, const Views& views) {
  AdamwGroup g{.lr = h[0],
               .beta1 = h[1],
               .beta2 = h[2],
               .eps = h[3],
               .weight_decay = h[4],
               .decoupled = h[5] != 0.0,
               .maximize = h[6] != 0.0};
  if (std::isnan(h[0])) {
    Vector lr = views.scalar("lr", next_of("lrs", lrs, used));
    TIGON_CHECK(kOp, lr.dtype == DType::f32, "lr must be float32, got ", name_of(lr.dtype));
    g.lr_on_device = lr.as<float>();
  }
  return {g, h[7] != 0.0};
}

std::tuple<> step(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
                  Tensors max_exp_avg_sqs, Tensors extras, Tensors steps, std::vector<int64_t> first,
                  std::vector<int64_t> group_sizes, std::vector<double> hyperparameters, Tensors lrs,
                  int64_t rounding, int64_t seed, OptionalTensor clip, OptionalTensor grad_scale,
                  OptionalTensor found_inf) {
  const size_t n = params.size();
  for (size_t size : {grads.size(), exp_avgs.size(), exp_avg_sqs.size(), steps.size(), first.size()})
    TIGON_CHECK(kOp, size == n, "lists must have ", n, " tensors each, got one of ", size);
  TIGON_CHECK(kOp, hyperparameters.size() == kHyperparameters * group_sizes.size(),
              "hyperparameters must be ", kHyperparameters, " a group, got ", hyperparameters.size());
  TIGON_CHECK(kOp, rounding >= 0 && rounding < kAdamwRoundings, "rounding must be one of 0 to ",
              kAdamwRoundings - 1, ", got ", rounding);
  if (n == 0) return {};
  const auto mode = AdamwRounding(rounding);
  const Tensor& like = params[0];
  (void)device_of(kOp, like);
  Views views(like);
  std::vector<AdamwGroup> groups;
  std::vector<AdamwTensor> tensors(n);
  size_t i = 0, used_lrs = 0, used_most = 0, used_extras = 0;
  for (size_t g = 0; g < group_sizes.size(); ++g) {
    auto [group, amsgrad] = group_of(&hyperparameters[kHyperparameters * g], lrs, used_lrs, views);
    groups.push_back(group);
    TIGON_CHECK(kOp, group_sizes[g] >= 0 && size_t(group_sizes[g]) <= n - i,
                "group_sizes must sum up to the number of params, ", n);
    for (const size_t end = i + size_t(group_sizes[g]); i < end; ++i) {
      AdamwTensor& t = tensors[i];
      const Tensor& p = params[i];
      t.param = views.param(p, i);
      t.grad = views.grad(grads[i], p, i);
      t.exp_avg = views.state("exp_avg", exp_avgs[i], p, i);
      t.exp_avg_sq = views.state("exp_avg_sq", exp_avg_sqs[i], p, i);
      if (amsgrad)
        t.max_exp_avg_sq = views.state("max_exp_avg_sq",
                                       next_of("max_exp_avg_sqs", max_exp_avg_sqs, used_most), p, i);
      if (is_half(t.param.dtype) && mode == AdamwRounding::split)
        t.low = views.state("param_low", next_of("extras", extras, used_extras), p, i);
      if (is_half(t.param.dtype) && mode == AdamwRounding::master)
        t.master = views.state("master_param", next_of("extras", extras, used_extras), p, i);
      Vector done = scalar_of(kOp, "step", steps[i]);
      TIGON_CHECK(kOp, done.dtype == DType::f32, name_at("step", i), " must be float32, got ",
                  name_of(done.dtype));
      if (steps[i].is_cuda() || !like.is_cuda())
        t.step = views.state("step", steps[i], steps[i], i);
      else
        t.steps = int64_t(*done.as<float>());
      t.first = first[i];
      t.group = int64_t(g);
    }
  }
  TIGON_CHECK(kOp, i == n, "group_sizes must sum up to the number of params, ", n, ", got ", i);
  auto ctx = make_context(like);
  adamw(*ctx, {.tensors = tensors,
               .groups = groups,
               .rounding = mode,
               .seed = uint64_t(seed),
               .clip = views.scalar("clip", clip),
               .grad_scale = views.scalar("grad_scale", grad_scale),
               .found_inf = views.scalar("found_inf", found_inf)});
  for (size_t k = 0; k < n; ++k)  // those the core was given as numbers
    if (!tensors[k].step) *static_cast<float*>(steps[k].data_ptr()) += 1.0f;
  return {};
}

}  // namespace

// In place: params, moments, extras (what the rounding needs besides) and steps. max_exp_avg_sqs and extras hold tensors only
// for params that have them, in the order of params; a group's tensors are adjacent.
TIGON_TORCH_SCHEMAS(m) {
  define(m,
         "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
         "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] extras, Tensor(f!)[] steps, int[] first, "
         "int[] group_sizes, float[] hyperparameters, Tensor[] lrs, int rounding, int seed, Tensor? clip, "
         "Tensor? grad_scale, Tensor? found_inf) -> ()");
}
TIGON_TORCH_KERNELS(m) { m.impl("adamw_", &boxed<&step>); }

}  // namespace tigon::torch_shim
