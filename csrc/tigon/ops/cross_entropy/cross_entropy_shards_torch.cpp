// Adaptors of the pieces that tigon.parallel drives: statistics of a shard, the loss from all shards', the gradient.
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/cross_entropy/cross_entropy_shards.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::cross_entropy_shards_torch {
namespace {

constexpr const char* kOp = "cross_entropy";

// Logits of a shard and the options of the formula, in the order of the schemas.
struct Shard {
  Tensor logits, target;
  OptionalTensor bias, class_weight;
  int64_t ignore_index, first_class, classes;
  double label_smoothing, softcap, logit_scale, temperature, z_loss;

  static constexpr const char* kNames[] = {"logits",       "target",      "bias",        "class_weight",
                                           "ignore_index", "first_class", "classes",     "label_smoothing",
                                           "softcap",      "logit_scale", "temperature", "z_loss"};
  CrossEntropyRows rows() {
    check_devices(kOp, *this, logits);
    return {.logits = rows_of(kOp, "logits", logits),
            .target = vector_of(kOp, "target", target),
            .bias = vector_of(kOp, "bias", bias),
            .class_weight = vector_of(kOp, "class_weight", class_weight),
            .first_class = first_class,
            .classes = classes,
            .ignore_index = ignore_index,
            .logit_scale = float(logit_scale),
            .softcap = float(softcap),
            .temperature = float(temperature),
            .label_smoothing = float(label_smoothing),
            .z_loss = float(z_loss)};
  }
};

// Which statistics besides the first three, and which results; the bits of Python's tigon/parallel/rows.py.
CrossEntropyKinds kinds_of(int64_t bits) {
  return {.entropy = (bits & 1) != 0, .smoothing = (bits & 2) != 0, .predicted = (bits & 4) != 0};
}

// parts [kinds, rows] are written but for the predicted classes, which are the result.
std::tuple<Tensor> statistics(Shard shard, Tensor parts, int64_t kinds) {
  CrossEntropyRows a = shard.rows();
  const CrossEntropyKinds k = kinds_of(kinds);
  check_same_device(kOp, "parts", parts, shard.logits);
  a.row_max = row_of(kOp, "parts", parts, 0);
  a.log_sum = row_of(kOp, "parts", parts, 1);
  a.log_prob = row_of(kOp, "parts", parts, 2);
  if (k.entropy) a.entropy = row_of(kOp, "parts", parts, k.entropy_at());
  if (k.smoothing) a.smoothing = row_of(kOp, "parts", parts, k.smoothing_at());
  Tensor predicted = make_if(k.predicted, shard.logits, {a.logits.rows}, DType::i64);
  if (k.predicted) a.predicted = vector_of(kOp, "predicted", predicted);
  auto ctx = make_context(shard.logits);
  cross_entropy_rows(*ctx, a);
  return {predicted};
}

std::tuple<> gradient(Shard shard, Tensor dlogits, OptionalTensor scale, OptionalTensor entropy_scale,
                      Tensor log_share, OptionalTensor all_entropy, OptionalTensor weight_sum) {
  CrossEntropyRows a = shard.rows();
  check_same_device(kOp, "dlogits", dlogits, shard.logits);
  check_same_device(kOp, "log_share", log_share, shard.logits);
  a.dlogits = rows_of(kOp, "dlogits", dlogits);
  a.scale = vector_of(kOp, "scale", scale);
  a.entropy_scale = vector_of(kOp, "entropy_scale", entropy_scale);
  a.log_share = vector_of(kOp, "log_share", log_share);
  a.all_entropy = vector_of(kOp, "all_entropy", all_entropy);
  a.weight_sum = vector_of(kOp, "weight_sum", weight_sum);
  auto ctx = make_context(shard.logits);
  cross_entropy_rows(*ctx, a);
  return {};
}

// parts [shards, kinds, rows]. Results: loss, z_term, log_prob, lse, entropy, log_share; a row of numbers for each.
std::tuple<Tensor, Tensor> combine(Tensor parts, Tensor target, OptionalTensor class_weight,
                                   OptionalTensor shard_weight, OptionalTensor token_weight, int64_t shards,
                                   int64_t shard, int64_t kinds, int64_t classes, int64_t ignore_index,
                                   double label_smoothing, double z_loss) {
  check_same_device(kOp, "target", target, parts);
  const CrossEntropyKinds k = kinds_of(kinds);
  CrossEntropyCombine a = {.parts = rows_of(kOp, "parts", parts),
                           .kinds = k,
                           .shards = shards,
                           .shard = shard,
                           .target = vector_of(kOp, "target", target),
                           .class_weight = vector_of(kOp, "class_weight", class_weight),
                           .shard_weight = vector_of(kOp, "shard_weight", shard_weight),
                           .token_weight = vector_of(kOp, "token_weight", token_weight),
                           .classes = classes,
                           .ignore_index = ignore_index,
                           .label_smoothing = float(label_smoothing),
                           .z_loss = float(z_loss)};
  const int64_t rows = a.target.size;
  Tensor numbers = make(parts, {6, rows}, DType::f32);
  Tensor predicted = make_if(k.predicted, parts, {rows}, DType::i64);
  a.loss = row_of(kOp, "numbers", numbers, 0);
  a.z_term = row_of(kOp, "numbers", numbers, 1);
  a.log_prob = row_of(kOp, "numbers", numbers, 2);
  a.lse = row_of(kOp, "numbers", numbers, 3);
  Vector entropy = row_of(kOp, "numbers", numbers, 4);  // not written unless its parts are there
  if (k.entropy) a.entropy = entropy;
  a.log_share = row_of(kOp, "numbers", numbers, 5);
  if (k.predicted) a.predicted = vector_of(kOp, "predicted", predicted);
  auto ctx = make_context(parts);
  cross_entropy_combine(*ctx, a);
  return {numbers, predicted};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string shard = schema<Shard>() + ", ";
  define(m, "cross_entropy_shard_statistics(" + shard + "Tensor(a!) parts, int kinds) -> Tensor");
  define(m, "cross_entropy_shard_gradient(" + shard +
                "Tensor(a!) dlogits, Tensor? scale, Tensor? entropy_scale, Tensor log_share,"
                " Tensor? all_entropy, Tensor? weight_sum) -> ()");
  define(m,
         "cross_entropy_combine(Tensor parts, Tensor target, Tensor? class_weight, Tensor? shard_weight,"
         " Tensor? token_weight, int shards, int shard, int kinds, int classes, int ignore_index,"
         " float label_smoothing, float z_loss) -> (Tensor, Tensor)");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("cross_entropy_shard_statistics", boxed<&statistics>);
  m.impl("cross_entropy_shard_gradient", boxed<&gradient>);
  m.impl("cross_entropy_combine", boxed<&combine>);
}

}  // namespace tigon::torch_shim::cross_entropy_shards_torch
