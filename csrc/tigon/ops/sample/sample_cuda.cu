// The CUDA backend of sample. A CTA has a row, and reads it once a pass, from memory and then from L2.
// Instructions per element: about 10 for the maximum, 12 for a sum of exponentials, 15 a step of a threshold.
// The race draws only for groups of four columns that can still win: some 8 per element, and 200 a group that
// draws.
#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/values.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/sample/sample.h"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "sample";
constexpr int kThreads = 512, kWarps = kThreads / 32;

TIGON_FN uint32_t bits_of(float x) { return __float_as_uint(x); }
TIGON_FN float float_of(uint32_t bits) { return __uint_as_float(bits); }
#include "tigon/base/ordered_key.inc"
#include "tigon/base/philox.inc"
#include "tigon/ops/sample/sample_math.inc"

// All threads of the CTA call each function, and get the same result.
template <class T>
class Row {
 public:
  __device__ Row(const T* logits, const Values& bias, int64_t columns, const SampleRow& r, double* sums,
                 uint64_t* best)
      : logits_(logits), bias_(bias), columns_(columns), r_(r), sums_(sums), best_(best) {}
  __device__ int64_t columns() const { return columns_; }
  __device__ float at(int64_t c) const {
    return sample_logit(widen(logits_[c]), bias_.data == nullptr ? 0.0f : bias_[c], r_);
  }

  __device__ uint64_t largest() {
    uint64_t best = 0;
    for_columns([&](float z, int64_t c) { best = max(best, sample_packed(z, c)); });
    return best_of_block(best);
  }
  __device__ double mass(uint32_t least, float top, float inverse) {
    float own = 0.0f;
    for_columns([&](float z, int64_t) { own += ordered_key(z) >= least ? expf((z - top) * inverse) : 0.0f; });
    double sum[1] = {double(own)};
    sum_block<kThreads>(sum, sums_);
    return sum[0];
  }
  __device__ void shares(const uint32_t (&keys)[3], SampleShare (&shares)[3], bool by_mass, float top,
                         float inverse) {
    int counts[3] = {};
    float masses[3] = {};
    for_columns([&](float z, int64_t) {
      const uint32_t key = ordered_key(z);
      if (key < keys[0]) return;
      const float mass = by_mass ? expf((z - top) * inverse) : 0.0f;
#pragma unroll
      for (int j = 0; j < 3; ++j) counts[j] += key >= keys[j], masses[j] += key >= keys[j] ? mass : 0.0f;
    });
    double sums[6];
#pragma unroll
    for (int j = 0; j < 3; ++j) sums[j] = double(counts[j]), sums[3 + j] = double(masses[j]);
    sum_block<kThreads>(sums, sums_);
#pragma unroll
    for (int j = 0; j < 3; ++j) shares[j] = {sums[j], sums[3 + j]};
  }
  __device__ uint64_t race(uint32_t least, float top, float inverse, const SampleRow& r) {
    uint64_t best = 0;
    for (int64_t c = 4 * int64_t(threadIdx.x); c < columns_; c += 4 * kThreads) {
      const int there = int(min(int64_t(4), columns_ - c));
      float z[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) z[j] = j < there ? at(c + j) : -INFINITY;
      best = sample_race_of_four(z, c, there, least, top, inverse, r, best);
    }
    return best_of_block(best);
  }

 private:
  template <class Fn>
  __device__ __forceinline__ void for_columns(const Fn& fn) const {
    for (int64_t c = threadIdx.x; c < columns_; c += kThreads) fn(at(c), c);
  }
  __device__ uint64_t best_of_block(uint64_t best) {
    auto join = [&] {
#pragma unroll
      for (int step = 16; step > 0; step >>= 1) best = max(best, __shfl_xor_sync(0xffffffffu, best, step));
    };
    join();
    if (threadIdx.x % 32 == 0) best_[threadIdx.x / 32] = best;
    __syncthreads();
    best = best_[threadIdx.x % kWarps];
    join();
    __syncthreads();
    return best;
  }

  const T* logits_;
  const Values& bias_;
  int64_t columns_;
  const SampleRow& r_;
  double* sums_;
  uint64_t* best_;
};

struct SampleParams {
  const void* logits;
  int64_t stride, columns;
  Values bias;
  const float *temperatures, *top_ps, *min_ps;
  const int64_t *top_ks, *seed;
  bool shared_seed;
  int64_t first_row;
  // Every row has these options, but for seed, stream and what the arrays above hold.
  SampleRow all;
  int64_t* ids;
  // Null means not wanted.
  float* log_prob;
};

template <class T>
__global__ __launch_bounds__(kThreads) void sample_kernel(const SampleParams p) {
  __shared__ double sums[kWarps * 6];
  __shared__ uint64_t best[kWarps];
  const int64_t t = blockIdx.x;
  SampleRow r = p.all;
  if (p.temperatures != nullptr) r.temperature = p.temperatures[t];
  if (p.top_ks != nullptr) r.top_k = p.top_ks[t];
  if (p.top_ps != nullptr) r.top_p = p.top_ps[t];
  if (p.min_ps != nullptr) r.min_p = p.min_ps[t];
  r.seed = uint64_t(p.seed[p.shared_seed ? 0 : t]), r.stream = p.shared_seed ? uint64_t(p.first_row + t) : 0u;
  Row<T> row(static_cast<const T*>(p.logits) + t * p.stride, p.bias, p.columns, r, sums, best);
  const Sampled found = sample_row(row, r, p.log_prob != nullptr);
  if (threadIdx.x != 0) return;
  p.ids[t] = found.id;
  if (p.log_prob != nullptr) p.log_prob[t] = found.log_prob;
}

}  // namespace

void sample(Context& ctx, const Sample& a) {
  const SampleParams p = {.logits = a.logits.data,
                          .stride = a.logits.stride,
                          .columns = a.logits.cols,
                          .bias = {a.bias.data, a.bias.dtype},
                          .temperatures = a.temperatures.as<float>(),
                          .top_ps = a.top_ps.as<float>(),
                          .min_ps = a.min_ps.as<float>(),
                          .top_ks = a.top_ks.as<int64_t>(),
                          .seed = a.seed.as<int64_t>(),
                          .shared_seed = a.seed.size == 1,
                          .first_row = a.first_row,
                          .all = {.scale = a.logit_scale,
                                  .softcap = a.softcap,
                                  .temperature = a.temperature,
                                  .top_k = a.top_k,
                                  .top_p = a.top_p,
                                  .min_p = a.min_p},
                          .ids = a.ids.as<int64_t>(),
                          .log_prob = a.need_log_prob ? a.log_prob.as<float>() : nullptr};
  dispatch_float(kOp, "logits", a.logits.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    launch(kOp, ctx, &sample_kernel<T>, {.blocks = a.logits.rows, .threads = kThreads}, p);
  });
}

}  // namespace tigon::cuda
