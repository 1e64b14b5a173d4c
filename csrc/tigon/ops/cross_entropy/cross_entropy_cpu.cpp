#include <algorithm>
#include <cmath>

#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/require.h"
#include "tigon/base/simd/lanes.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/cross_entropy/cross_entropy_labels.h"
#include "tigon/ops/cross_entropy/cross_entropy_shards.h"

namespace tigon::cpu {
namespace {

// Holds a call, and what its rows share.
struct CrossEntropyCall {
  const CrossEntropyRows& a;
  int64_t cols, classes;  // columns here, and of the whole row
  // True if the row has more columns in other shards.
  bool shard;
  const float* class_weight;  // begins at the first column
  // Hold the sum of the columns' class_weight, or cols, and the same for all classes.
  double weight_sum, all_weights;
  // Say how logits become z: z = top * tanh(inner * x / softcap), or inner * x; dz/dx = gain * slope.
  float inner, top, gain;
  bool plain;    // true if z is the logit
  bool entropy;  // true if it or its gradient is wanted
};
struct CrossEntropyRowResults {
  float loss, lse, target_logit, log_prob, entropy;
  int64_t predicted;
  float row_max, log_sum, smoothing;
};
struct CrossEntropyTable {
  // Holds functions by the dtype of logits, for row r.
  ByDtype<void (*)(const CrossEntropyCall& c, int64_t r, CrossEntropyRowResults& out)> row;
  void (*rescale)(void* grad, DType dtype, float factor, int64_t n);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/cross_entropy/cross_entropy_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

constexpr const char* kOp = "cross_entropy";
constexpr int64_t kElementsPerTask = 32768;

#include "tigon/ops/cross_entropy/cross_entropy_labels.inc"
#include "tigon/ops/cross_entropy/cross_entropy_shards.inc"

// Sums f(i) over i < n in double, in an order that depends on n only.
template <class F>
double ordered_sum(int64_t n, const F& f) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += double(f(i));
  return total;
}

double value_of(const Vector& v) {
  switch (v.dtype) {
    case DType::f64: return *v.as<double>();
    case DType::i64: return double(*v.as<int64_t>());
    case DType::i32: return double(*v.as<int32_t>());
    default: return double(*v.as<float>());
  }
}

}  // namespace

void cross_entropy_rows(Context& ctx, const CrossEntropyRows& a) {
  int64_t rows = a.logits.rows, cols = a.logits.cols;
  const int64_t* target = a.target.as<int64_t>();
  for (int64_t r = 0; r < rows && a.classes == 0; ++r)
    TIGON_CHECK(kOp, target[r] == a.ignore_index || (target[r] >= 0 && target[r] < cols),
                "target must be in [0, ", cols, ") or ", a.ignore_index, " (ignored), got ", target[r],
                " in row ", r);

  const bool shard = a.classes > 0;
  const float* class_weight = a.class_weight.as<float>();
  if (class_weight != nullptr && shard) class_weight += a.first_class;
  const double weight_sum =
      class_weight ? ordered_sum(cols, [&](int64_t i) { return class_weight[i]; }) : double(cols);
  const float gain = a.logit_scale / a.temperature, inner = a.softcap > 0.0f ? a.logit_scale : gain;
  const CrossEntropyCall call = {.a = a,
                                 .cols = cols,
                                 .classes = shard ? a.classes : cols,
                                 .shard = shard,
                                 .class_weight = class_weight,
                                 .weight_sum = weight_sum,
                                 .all_weights = !shard         ? weight_sum
                                                : a.weight_sum ? double(*a.weight_sum.as<float>())
                                                               : double(a.classes),
                                 .inner = inner,
                                 .top = a.softcap / a.temperature,
                                 .gain = gain,
                                 .plain = !a.bias && inner == 1.0f && a.softcap == 0.0f,
                                 .entropy = a.entropy || a.entropy_scale};
  auto run = TIGON_SELECT(cross_entropy_table).row[a.logits.dtype];
  int64_t group = std::max<int64_t>(1, kElementsPerTask / cols);
  parallel(ctx, (rows + group - 1) / group, [&](int64_t task) {
    for (int64_t r = task * group, end = std::min(rows, r + group); r < end; ++r) {
      CrossEntropyRowResults out = {};
      run(call, r, out);
      put(a.loss, r, out.loss), put(a.lse, r, out.lse), put(a.target_logit, r, out.target_logit);
      put(a.log_prob, r, out.log_prob), put(a.entropy, r, out.entropy), put(a.row_max, r, out.row_max);
      put(a.log_sum, r, out.log_sum), put(a.smoothing, r, out.smoothing);
      if (a.predicted) a.predicted.as<int64_t>()[r] = out.predicted;
    }
  });
}

void cross_entropy_scale(Context&, const CrossEntropyScale& a) {
  const float* weight = a.class_weight.as<float>();
  double divisor = a.host_denominator;
  if (a.denominator) {
    divisor = value_of(a.denominator);
  } else if (a.mean) {
    divisor = ordered_sum(a.target.size, [&](int64_t r) {
      int64_t y = a.target.dtype == DType::u8 ? a.target.as<uint8_t>()[r] : a.target.as<int64_t>()[r];
      if (y == a.ignore_index) return 0.0f;
      if (weight == nullptr) return 1.0f;
      // The row pass refuses a label out of range.
      return y >= 0 && y < a.class_weight.size ? weight[y] : 0.0f;
    });
  }
  *a.scale.as<float>() = float(1.0 / divisor);
}

void cross_entropy_total(Context&, const CrossEntropyTotal& a) {
  const float* loss = a.loss.as<float>();
  double total = ordered_sum(a.loss.size, [&](int64_t r) { return loss[r]; });
  *a.total.as<float>() = float(total * (a.scale ? double(*a.scale.as<float>()) : 1.0));
}

void cross_entropy_rescale(Context& ctx, const CrossEntropyRescale& a) {
  float factor = *a.factor.as<float>();
  if (factor == 1.0f) return;
  auto run = TIGON_SELECT(cross_entropy_table).rescale;
  int64_t group = std::max<int64_t>(1, kElementsPerTask / a.grad.cols);
  parallel(ctx, (a.grad.rows + group - 1) / group, [&](int64_t task) {
    for (int64_t r = task * group, end = std::min(a.grad.rows, r + group); r < end; ++r)
      run(element_at(a.grad, r, 0), a.grad.dtype, factor, a.grad.cols);
  });
}

void cross_entropy_label_targets(Context&, const CrossEntropyLabels& a) {
  for (int64_t row = 0; row < a.target.size; ++row) label_target(a, row);
}

void cross_entropy_label_scores(Context& ctx, const CrossEntropyLabels& a) {
  dispatch_float(kOp, "logits", a.logits.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    parallel(ctx, a.chosen.size, [&](int64_t i) { label_scores<T>(a, i, [](T x) { return to_float(x); }); });
  });
}

void cross_entropy_label_gradient(Context& ctx, const CrossEntropyLabels& a) {
  dispatch_float(kOp, "dlogits", a.dlogits.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    parallel(ctx, a.chosen.size, [&](int64_t i) {
      for (int64_t k = 0; k < a.count; ++k)
        if (label_has_gradient(a, i, k))
          a.dlogits.row<T>(i)[labels_of(a, i)[k]] = from_float<T>(float(label_gradient(a, i, k)));
    });
  });
}

void cross_entropy_label_results(Context& ctx, const CrossEntropyLabels& a) {
  parallel(ctx, a.target.size, [&](int64_t row) {
    for (int64_t k = 0; k < a.count; ++k) label_result(a, row, k);
  });
}

void cross_entropy_renormalize(Context& ctx, const CrossEntropyRenormalize& a) {
  dispatch_float(kOp, "dlogits", a.dlogits.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    parallel(ctx, a.target.size, [&](int64_t r) {
      renormalize_row<T>(a, r, [](float x) { return from_float<T>(x); }, [](T x) { return to_float(x); });
    });
  });
}

void cross_entropy_combine(Context& ctx, const CrossEntropyCombine& a) {
  constexpr int64_t kRowsPerTask = 1024;
  const int64_t rows = a.target.size;
  parallel(ctx, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t r = task * kRowsPerTask, end = std::min(rows, r + kRowsPerTask); r < end; ++r)
      combine_row(a, r);
  });
}

}  // namespace tigon::cpu
