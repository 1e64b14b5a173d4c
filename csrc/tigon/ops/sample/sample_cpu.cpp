// The CPU backend of sample. It forms the z of a row once, in scratch memory, and reads them there.
#include <bit>
#include <cmath>

#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/op.h"
#include "tigon/base/simd/lanes.h"
#include "tigon/ops/sample/sample.h"

namespace tigon::cpu {
namespace {

#include "tigon/base/philox.inc"

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
#include "tigon/base/ordered_key.inc"
#include "tigon/ops/sample/sample_math.inc"

class Row {
 public:
  // `mass` is memory for one number a column.
  Row(const float* z, float* mass, int64_t columns) : z_(z), mass_(mass), columns_(columns) {}
  int64_t columns() const { return columns_; }
  float at(int64_t column) const { return z_[column]; }

  uint64_t largest() const {
    uint64_t best = 0;
    for (int64_t c = 0; c < columns_; ++c) best = std::max(best, sample_packed(z_[c], c));
    return best;
  }
  double mass(uint32_t least, float top, float inverse) {
    if (!has_mass_)
      for (int64_t c = 0; c < columns_; ++c) mass_[c] = expf((z_[c] - top) * inverse);
    has_mass_ = true;
    double sum = 0.0;
    for (int64_t c = 0; c < columns_; ++c) sum += ordered_key(z_[c]) >= least ? double(mass_[c]) : 0.0;
    return sum;
  }
  void reset() const {}
  void narrow(uint32_t, uint32_t, double, const SampleShare&) const {}
  // A caller asks for a mass before it asks for shares by mass.
  void shares(const uint32_t (&keys)[3], SampleShare (&shares)[3], bool by_mass, float, float) const {
    for (SampleShare& share : shares) share = {};
    for (int64_t c = 0; c < columns_; ++c) {
      const uint32_t key = ordered_key(z_[c]);
      if (key < keys[0]) continue;
      const double mass = by_mass ? double(mass_[c]) : 0.0;
      for (int j = 0; j < 3 && key >= keys[j]; ++j) shares[j].count += 1.0, shares[j].mass += mass;
    }
  }
  uint64_t race(uint32_t least, float top, float inverse, const SampleRow& r) const {
    uint64_t best = 0;
    for (int64_t c = 0; c < columns_; c += 4)
      best = sample_race_of_four(z_ + c, c, int(std::min<int64_t>(4, columns_ - c)), least, top, inverse, r,
                                 best);
    return best;
  }

 private:
  const float* z_;
  float* mass_;
  int64_t columns_;
  bool has_mass_ = false;
};

template <class T>
T at(const Vector& v, int64_t i, T otherwise) {
  return v ? v.as<T>()[i] : otherwise;
}
float bias_at(const Vector& bias, int64_t c) {
  if (!bias) return 0.0f;
  return dispatch_float("sample", "bias", bias.dtype,
                        [&](auto t) { return to_float(bias.as<typename decltype(t)::type>()[c]); });
}

}  // namespace

void sample(Context& ctx, const Sample& a) {
  const int64_t columns = a.logits.cols;
  const RowChunks parts(a.logits.rows, 1);
  float* space = ctx.scratch_of<float>(parts.count * 2 * columns);
  parallel(ctx, parts.count, [&](int64_t part) {
    float* z = space + part * 2 * columns;
    for (int64_t t = parts.begin(part); t < parts.end(part); ++t) {
      const bool shared = a.seed.size == 1;
      const SampleRow r = {.scale = a.logit_scale,
                           .softcap = a.softcap,
                           .temperature = at(a.temperatures, t, a.temperature),
                           .top_k = at(a.top_ks, t, a.top_k),
                           .top_p = at(a.top_ps, t, a.top_p),
                           .min_p = at(a.min_ps, t, a.min_p),
                           .seed = uint64_t(a.seed.as<int64_t>()[shared ? 0 : t]),
                           .stream = shared ? uint64_t(a.first_row + t) : 0u};
      dispatch_float("sample", "logits", a.logits.dtype, [&](auto type) {
        const auto* x = a.logits.row<typename decltype(type)::type>(t);
        for (int64_t c = 0; c < columns; ++c) z[c] = sample_logit(to_float(x[c]), bias_at(a.bias, c), r);
      });
      Row row(z, z + columns, columns);
      const Sampled found = sample_row(row, r, a.need_log_prob);
      a.ids.as<int64_t>()[t] = found.id;
      if (a.need_log_prob) a.log_prob.as<float>()[t] = found.log_prob;
    }
  });
}

}  // namespace tigon::cpu

namespace tigon {

TIGON_DEFINE_ENTRY(sample, Sample, "sample", "sample", none)

}  // namespace tigon
