#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/divergence/divergence.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::divergence_torch {
namespace {

constexpr const char* kOp = "divergence";
enum Reduction : int64_t { none = 0, sum = 1, batchmean = 2, mean = 3 };

// Tensors are replaced by copies where a view does not fit, so they must outlive the call.
struct Inputs {
  Tensor teacher;
  OptionalTensor labels;
  static constexpr const char* kNames[] = {"teacher", "labels"};
};
struct Options {
  DivergenceKind kind;
  double beta;
  float temperature;
  bool log_probs;
  int64_t ignore_index;
  static constexpr const char* kNames[] = {"kind", "beta", "temperature", "log_probs", "ignore_index"};
};

DivergenceRows arguments(Tensor& student, Inputs& in, const Options& o) {
  check_devices(kOp, in, student);
  DivergenceBeta beta = divergence_beta(o.kind, o.beta);
  return {.student = rows_of(kOp, "student", student),
          .teacher = rows_of(kOp, "teacher", in.teacher),
          .labels = vector_of(kOp, "labels", in.labels),
          .kind = o.kind,
          .ignore_index = o.ignore_index,
          .beta = beta.beta,
          .temperature = o.temperature,
          .factor = float(beta.factor),
          .log_probs = o.log_probs};
}

// Rows, then their sum where one number is asked for. Means divide by the rows that count: on the device where labels say.
Tensor run(DivergenceRows a, const Tensor& student, int64_t reduction) {
  Tensor rows = make(student, {a.student.rows}, DType::f32);
  a.loss = vector_of(kOp, "loss", rows);
  auto ctx = make_context(student);
  Vector scale;
  if (reduction == Reduction::mean) a.factor /= float(a.student.cols);
  if (reduction == Reduction::batchmean || reduction == Reduction::mean) {
    scale = {.data = ctx->scratch_of<float>(1), .dtype = DType::f32, .size = 1};
    CrossEntropyScale counting = {.target = a.labels, .ignore_index = a.ignore_index, .mean = bool(a.labels)};
    if (!a.labels) counting.has_host_denominator = true, counting.host_denominator = double(a.student.rows);
    counting.scale = scale;
    cross_entropy_scale(*ctx, counting);
    a.scale = scale;
  }
  divergence_rows(*ctx, a);
  if (reduction == Reduction::none) return rows;
  Tensor total = make(student, {}, DType::f32);
  cross_entropy_total(*ctx, {.loss = a.loss, .scale = scale, .total = scalar_of(kOp, "loss", total)});
  return total;
}

std::tuple<Tensor, Tensor> forward(Tensor student, Inputs in, int64_t reduction, Options options,
                                   bool need_dstudent) {
  DivergenceRows a = arguments(student, in, options);
  Tensor dstudent = need_dstudent ? make_like(student, a.student.dtype) : nothing(student, a.student.dtype);
  if (need_dstudent) a.dstudent = rows_of(kOp, "dstudent", dstudent);
  return {run(a, student, reduction), dstudent};
}

// The gradient takes the place of the student.
Tensor forward_inplace(Tensor student, Inputs in, int64_t reduction, Options options) {
  const void* memory = student.data_ptr();
  DivergenceRows a = arguments(student, in, options);
  TIGON_CHECK(kOp, student.data_ptr() == memory,
              "student must have a dense last dimension and evenly spaced rows with inplace=True, got other "
              "strides");
  a.dstudent = a.student;
  return run(a, student, reduction);
}

// The gradient of unreduced losses, from the inputs.
Tensor backward(Tensor dloss, Tensor student, Inputs in, Options options) {
  check_same_device(kOp, "dloss", dloss, student);
  DivergenceRows a = arguments(student, in, options);
  Tensor dstudent = make_like(student, a.student.dtype), rows = make(student, {a.student.rows}, DType::f32);
  a.dstudent = rows_of(kOp, "dstudent", dstudent);
  a.loss = vector_of(kOp, "loss", rows);
  a.scale = vector_of(kOp, "dloss", dloss);
  auto ctx = make_context(student);
  divergence_rows(*ctx, a);
  return dstudent;
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs = schema<Inputs>() + ", int reduction, " + schema<Options>();
  define_forward(m, "divergence",
                 "(Tensor student, " + inputs + ", bool need_dstudent) -> (Tensor loss, Tensor dstudent)");
  define(m, "divergence_inplace(Tensor(a!) student, " + inputs + ") -> Tensor");
  define(m, "divergence_bwd(Tensor dloss, Tensor student, " + schema<Inputs, Options>() + ") -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "divergence", boxed<&forward>);
  m.impl("divergence_inplace", boxed<&forward_inplace>);
  m.impl("divergence_bwd", boxed<&backward>);
}

}  // namespace tigon::torch_shim::divergence_torch
