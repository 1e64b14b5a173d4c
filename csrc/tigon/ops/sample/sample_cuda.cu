// The CUDA backend of sample. A CTA has a row, and reads it once a pass, from memory and then from L2. A
// thread reads 16 bytes at a time, and the same columns whatever the row's alignment, so that sums keep their
// order. Once few entries lie between the bounds of a threshold, they are listed in shared memory and the
// remaining steps read the list. Instructions per element: about 6 for the maximum, 12 for a sum of
// exponentials, 15 a step of a threshold. The race draws only for groups of four columns that can still win:
// some 8 per element, and 200 a group that draws.
#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/values.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/sample/sample.h"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "sample";
constexpr int kThreads = 1024, kWarps = kThreads / 32;
// A list may have this many entries.
constexpr int kListed = 4096;

TIGON_FN uint32_t bits_of(float x) { return __float_as_uint(x); }
TIGON_FN float float_of(uint32_t bits) { return __uint_as_float(bits); }
#include "tigon/base/ordered_key.inc"
#include "tigon/base/philox.inc"
#include "tigon/ops/sample/sample_math.inc"

// The shared memory of a CTA.
struct SampleMemory {
  double sums[kWarps * 6];
  uint64_t best[kWarps];
  int listed;
  float list[kListed];
};

// All threads of the CTA call each function, and get the same result.
template <class T>
class Row {
 public:
  __device__ Row(const T* logits, const Values& bias, int64_t columns, const SampleRow& r,
                 SampleMemory& memory)
      : logits_(logits), bias_(bias), columns_(columns), r_(r), memory_(memory) {}
  __device__ int64_t columns() const { return columns_; }
  __device__ float at(int64_t c) const { return logit(widen(logits_[c]), c); }

  __device__ uint64_t largest() {
    uint32_t key = 0;
    int64_t column = 0;
    for_columns([&](float z, int64_t c) {
      const uint32_t other = ordered_key(z);
      if (other > key) key = other, column = c;
    });
    return best_of_block(key == 0u ? 0u : uint64_t(key) << 32 | (0xffffffffu - uint32_t(column)));
  }
  __device__ double mass(uint32_t least, float top, float inverse) {
    float own = 0.0f;
    for_columns([&](float z, int64_t) { own += ordered_key(z) >= least ? expf((z - top) * inverse) : 0.0f; });
    double sum[1] = {double(own)};
    sum_block<kThreads>(sum, memory_.sums);
    return sum[0];
  }
  __device__ void reset() { is_listed_ = false; }
  // Lists the entries with keys in [low, high), of which there are `count`. `above` is the share from `high`
  // on.
  __device__ void narrow(uint32_t low, uint32_t high, double count, const SampleShare& above) {
    if (is_listed_ || count > double(kListed)) return;
    is_listed_ = true, above_ = above;
    if (threadIdx.x == 0) memory_.listed = 0;
    __syncthreads();
    for_columns([&](float z, int64_t) {
      const uint32_t key = ordered_key(z);
      if (key >= low && key < high) memory_.list[atomicAdd(&memory_.listed, 1)] = z;
    });
    __syncthreads();
  }
  __device__ void shares(const uint32_t (&keys)[3], SampleShare (&shares)[3], bool by_mass, float top,
                         float inverse) {
    double sums[6] = {};
    if (is_listed_) {
      // The list has no fixed order, so masses are rounded to multiples of 2^-40, whose sums are exact.
      for (int i = int(threadIdx.x); i < memory_.listed; i += kThreads) {
        const float z = memory_.list[i];
        const double mass = by_mass ? rint(double(expf((z - top) * inverse)) * 0x1p40) * 0x1p-40 : 0.0;
#pragma unroll
        for (int j = 0; j < 3; ++j)
          if (ordered_key(z) >= keys[j]) sums[j] += 1.0, sums[3 + j] += mass;
      }
    } else {
      int counts[3] = {};
      float masses[3] = {};
      for_columns([&](float z, int64_t) {
        const uint32_t key = ordered_key(z);
        if (key < keys[0]) return;
        const float mass = by_mass ? expf((z - top) * inverse) : 0.0f;
#pragma unroll
        for (int j = 0; j < 3; ++j) counts[j] += key >= keys[j], masses[j] += key >= keys[j] ? mass : 0.0f;
      });
#pragma unroll
      for (int j = 0; j < 3; ++j) sums[j] = double(counts[j]), sums[3 + j] = double(masses[j]);
    }
    sum_block<kThreads>(sums, memory_.sums);
    const SampleShare above = is_listed_ ? above_ : SampleShare{0.0, 0.0};
#pragma unroll
    for (int j = 0; j < 3; ++j) shares[j] = {above.count + sums[j], above.mass + sums[3 + j]};
  }
  __device__ uint64_t race(uint32_t least, float top, float inverse, const SampleRow& r) {
    uint64_t best = 0;
    for_groups([&](const float (&z)[N], int64_t c, int there) {
#pragma unroll
      for (int j = 0; j < N; j += 4)
        best = sample_race_of_four(z + j, c + j, min(4, there - j), least, top, inverse, r, best);
    });
    return best_of_block(best);
  }

 private:
  static constexpr int N = 16 / sizeof(T);

  __device__ float logit(float x, int64_t c) const {
    return sample_logit(x, bias_.data == nullptr ? 0.0f : bias_[c], r_);
  }
  // Calls fn(z, column, there) for groups of N columns, of which the last has `there`.
  template <class Fn>
  __device__ __forceinline__ void for_groups(const Fn& fn) const {
    const bool is_aligned = reinterpret_cast<uintptr_t>(logits_) % 16 == 0;
    for (int64_t c = N * int64_t(threadIdx.x); c < columns_; c += N * kThreads) {
      const int there = int(min(int64_t(N), columns_ - c));
      float z[N];
      if (is_aligned && there == N) {
        const Vec<T, N> x = load<T, N>(logits_ + c);
#pragma unroll
        for (int j = 0; j < N; ++j) z[j] = logit(x[j], c + j);
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) z[j] = j < there ? at(c + j) : 0.0f;
      }
      fn(z, c, there);
    }
  }
  template <class Fn>
  __device__ __forceinline__ void for_columns(const Fn& fn) const {
    for_groups([&](const float (&z)[N], int64_t c, int there) {
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (j < there) fn(z[j], c + j);
    });
  }
  __device__ uint64_t best_of_block(uint64_t best) {
    auto join = [&] {
#pragma unroll
      for (int step = 16; step > 0; step >>= 1) best = max(best, __shfl_xor_sync(0xffffffffu, best, step));
    };
    join();
    if (threadIdx.x % 32 == 0) memory_.best[threadIdx.x / 32] = best;
    __syncthreads();
    best = memory_.best[threadIdx.x % kWarps];
    join();
    __syncthreads();
    return best;
  }

  const T* logits_;
  const Values& bias_;
  int64_t columns_;
  const SampleRow& r_;
  SampleMemory& memory_;
  bool is_listed_ = false;
  SampleShare above_ = {0.0, 0.0};
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
  __shared__ SampleMemory memory;
  const int64_t t = blockIdx.x;
  SampleRow r = p.all;
  if (p.temperatures != nullptr) r.temperature = p.temperatures[t];
  if (p.top_ks != nullptr) r.top_k = p.top_ks[t];
  if (p.top_ps != nullptr) r.top_p = p.top_ps[t];
  if (p.min_ps != nullptr) r.min_p = p.min_ps[t];
  r.seed = uint64_t(p.seed[p.shared_seed ? 0 : t]), r.stream = p.shared_seed ? uint64_t(p.first_row + t) : 0u;
  Row<T> row(static_cast<const T*>(p.logits) + t * p.stride, p.bias, p.columns, r, memory);
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
