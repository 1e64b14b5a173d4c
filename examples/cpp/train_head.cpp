// Trains a norm and a language-model head on fixed random features by gradient descent: RMSNorm, then the
// fused linear layer and cross-entropy, forward and backward, with the gradients the library returns. CPU,
// float32, no framework.
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include "tigon/base/make_context.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"
#include "tigon/ops/rms_norm/rms_norm.h"

namespace {

constexpr int64_t kTokens = 256, kHidden = 64, kVocab = 1000;
constexpr int kSteps = 20;
constexpr float kRate = 20.0f;

// A dense fp32 matrix that owns its memory.
struct Array {
  int64_t rows, cols;
  std::vector<float> data = std::vector<float>(size_t(rows * cols));

  tigon::Matrix matrix() { return {.data = data.data(), .rows = rows, .cols = cols, .stride = cols}; }
  tigon::Vector vector() { return {.data = data.data(), .size = rows * cols}; }
  void step(const Array& gradient) {
    for (size_t i = 0; i < data.size(); ++i) data[i] -= kRate * gradient.data[i];
  }
};

int run() {
  std::mt19937 bits(0);
  std::normal_distribution<float> normal;
  Array features{kTokens, kHidden}, norm{1, kHidden}, head{kVocab, kHidden};
  for (float& v : features.data) v = normal(bits);
  for (float& v : norm.data) v = 1.0f;
  for (float& v : head.data) v = 0.02f * normal(bits);
  std::vector<int64_t> labels(kTokens);
  for (int64_t& label : labels) label = int64_t(bits() % kVocab);
  labels[0] = -100;  // this token does not count

  Array hidden{kTokens, kHidden}, rstd{1, kTokens}, loss{1, kTokens}, total{1, 1}, scale{1, 1};
  Array dhidden{kTokens, kHidden}, dfeatures{kTokens, kHidden}, dnorm{1, kHidden}, dhead{kVocab, kHidden};
  float first = 0.0f;
  for (int step = 0; step < kSteps; ++step) {
    auto ctx = tigon::make_cpu_context();  // scratch memory lives as long as this
    tigon::rms_norm_fwd(
        *ctx, {.x = features.matrix(), .weight = norm.vector(), .y = hidden.matrix(), .rstd = rstd.vector()});
    tigon::linear_cross_entropy(
        *ctx, {.head = {.hidden = hidden.matrix(),
                        .weight = head.matrix(),
                        .dhidden = dhidden.matrix(),
                        .dweight = dhead.matrix()},
               .labels = {.target = {.data = labels.data(), .dtype = tigon::DType::i64, .size = kTokens}},
               .reduction = {.total = total.vector(), .scale = scale.vector()},
               .results = {.loss = loss.vector()}});
    tigon::rms_norm_bwd(*ctx, {.dy = dhidden.matrix(),
                               .x = features.matrix(),
                               .weight = norm.vector(),
                               .rstd = rstd.vector(),
                               .dx = dfeatures.matrix(),
                               .dweight = dnorm.vector()});
    if (step == 0) first = total.data[0];
    head.step(dhead);
    norm.step(dnorm);
  }
  std::printf("%lld tokens, %d steps: loss fell from %.4f to %.4f\n", static_cast<long long>(kTokens), kSteps,
              double(first), double(total.data[0]));
  return total.data[0] < first ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& e) {  // tigon::Error: which op, which argument, expected, given
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
