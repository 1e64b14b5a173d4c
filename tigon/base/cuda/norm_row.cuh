// Forward of the norm family: a row normalised by its own statistics. The kernels: norm_forward.cuh.
//
// The op gives a formula F (X is the storage type of rows):
//   struct Formula {
//     using Element = X;
//     static constexpr int kIn;          // rows read; the first is what is normalised unless value() says otherwise
//     static constexpr int kParams;      // vectors by column: weight, bias
//     static constexpr bool kCentred;    // the mean is subtracted
//     static constexpr bool kKeeps;      // merge(in), rounded, takes the place of in[0] and is written to `kept`
//     using Spans = void;                // there: `span` adjacent columns share a parameter (channels)
//     bool round_h;                      // the normalised value is rounded to X
//     float value(const float (&in)[kIn]) const;
//     float result(float h, const float (&param)[kParams], const float (&in)[kIn]) const;
//   };
// y = result((value - mean) * rstd), rstd = (mean((value - mean)^2) + eps)^-1/2. The variance is that of the values in
// registers about their mean, not a difference of two large sums.
//
// A row may consist of `sections` of `cols` columns that are normalised one by one (grouped norms); parameters run over all.
// Bytes: every row read once and written once (rows longer than the ladder: read again, from L2).
#pragma once

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_lie.cuh"
#include "tigon/base/cuda/row_packs.cuh"
#include "tigon/base/cuda/row_team.cuh"

namespace tigon::cuda {

template <class F, class W, class Y>
struct NormForward {
  using X = typename F::Element;
  F f;
  const X* in[F::kIn];
  int64_t in_stride[F::kIn];
  const W* param[F::kParams];  // null: as if absent[k] everywhere
  float absent[F::kParams];
  X* kept;
  Y* y;
  int64_t kept_stride, y_stride;
  float *rstd, *mean;  // by row and section; mean if F::kCentred. Null: not wanted
  int64_t rows, cols;
  int sections = 1;
  Shares shares;  // of a section's rows
  float eps;
  int64_t span = 1;           // columns that share a parameter, if F::Spans
  float inverse = 0.0f;       // 1 / cols, made by norm_forward
  const X* end[F::kIn] = {};  // where the memory of rows ends, made by norm_forward
  uint32_t zero = 0;          // for again()
};

namespace norm_detail {

// Of kernels that sweep. Blocks a multiprocessor, so that a few long rows are all under way.
constexpr int kLoopThreads = 512, kLoopBlocks = 2;

// Where the threads of a block stand.
struct Place {
  int section;
  int64_t first;  // row of the block
  __device__ Place(int sections, int rows, unsigned block = blockIdx.x) {
    section = sections == 1 ? 0 : int(block % unsigned(sections));
    first = int64_t(sections == 1 ? block : block / unsigned(sections)) * rows;
  }
};

template <class W, int N>
__device__ __forceinline__ Pack<W, N> filled(float x) {
  float all[N];
#pragma unroll
  for (int j = 0; j < N; ++j) all[j] = x;
  Pack<W, N> w;
  w.set(all);
  return w;
}

template <class F, class W, class Y>
constexpr bool kOneType = std::is_same_v<W, typename F::Element> && std::is_same_v<Y, typename F::Element>;
template <class F>
constexpr bool kSpans = requires { typename F::Spans; };

// Element j of several packs.
template <class T, int N, int K>
__device__ __forceinline__ void element(const Pack<T, N> (&packs)[K], int j, float (&x)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) x[k] = packs[k][j];
}

template <class F, int N>
__device__ __forceinline__ float value(const F& f, const Pack<typename F::Element, N> (&in)[F::kIn], int j) {
  float x[F::kIn];
  element(in, j, x);
  return f.value(x);
}

// One row, or section of one, and what is done to a pack of it; `c` counts columns of the section.
template <class F, class W, class Y, int N, Lying How, class Column>
struct ForwardRow {
  using X = typename F::Element;
  using Inputs = Pack<X, N>[F::kIn];
  using Params = Pack<W, N>[F::kParams];
  // Elements of bf16 have no more digits than the mean's rounding leaves them.
  static constexpr bool kFine = !std::is_same_v<X, __nv_bfloat16>;
  static constexpr int kStatistics = F::kCentred && kFine ? 2 : 1;
  const NormForward<F, W, Y>& p;
  int64_t row, before, statistic;
  bool live, params_read_on;
  Y* y;
  Lie<How, N, Column> lie;

  // Of the row, `cols` columns from `skip` on.
  __device__ __forceinline__ ForwardRow(const NormForward<F, W, Y>& p, const Place& place, int64_t row,
                                        int skip, Column cols)
      : p(p),
        row(row),
        before(int64_t(place.section) * p.cols + skip),
        statistic(row * p.sections + place.section),
        live(row < p.rows),
        params_read_on(place.section + 1 < p.sections && p.cols >= 16),
        y(p.y + row * p.y_stride + before),
        lie(written(), cols) {}
  __device__ __forceinline__ ForwardRow(const NormForward<F, W, Y>& p, const Place& place, int64_t row)
      : ForwardRow(p, place, row, 0, Column(p.cols)) {}
  // To the row that is `step` behind, which lies as this one, if there is one.
  __device__ __forceinline__ void advance(int64_t step, bool is) {
    row += step;
    statistic += step * p.sections;
    y += step * p.y_stride;
    live = is;
  }
  // What takes another row's place must lie as that one does: its packs may be read only by who writes them.
  __device__ __forceinline__ auto written() const {
    if constexpr (F::kKeeps)
      return kept();
    else
      return y;
  }
  __device__ __forceinline__ X* kept() const { return p.kept + row * p.kept_stride + before; }
  __device__ __forceinline__ const X* in(int k) const { return p.in[k] + row * p.in_stride[k] + before; }
  __device__ __forceinline__ bool read_on(int k) const { return reads_on(row, p.rows, p.in_stride[k]); }

  __device__ __forceinline__ void load(Column c, Inputs& packs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) packs[k] = lie.load(live, in(k), c, read_on(k));
  }
  __device__ __forceinline__ void finish(Column c, Inputs& packs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) lie.finish(live, in(k), c, read_on(k), packs[k]);
  }
  __device__ __forceinline__ void load_params(Column c, Params& packs) const {
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) {
      const W* param = p.param[k];
      if constexpr (!kSpans<F>) {
        packs[k] = lie.load_vector(param ? param + before : nullptr, c, params_read_on);
      } else if constexpr (!lie.packs) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (param && lie.in_row(c + j)) packs[k].v[j] = param[(before + c + j) / p.span];
      } else {
        if (param && lie.has(c)) packs[k] = filled<W, N>(widen(param[(before + c) / p.span]));
      }
    }
  }
  __device__ __forceinline__ void finish_params(Column c, Params& packs) const {
    constexpr int kWords = N * int(sizeof(W)) / 4;
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) {
      if constexpr (!kSpans<F>)
        if (p.param[k]) lie.finish_vector(p.param[k] + before, c, params_read_on, packs[k]);
      // By words, or the compiler chooses between elements.
      const Pack<W, N> absent = filled<W, N>(p.absent[k]);
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        uint32_t& word = reinterpret_cast<uint32_t*>(&packs[k])[j];
        word = p.param[k] ? word : reinterpret_cast<const uint32_t*>(&absent)[j];
      }
    }
  }
  // What is kept, in in[0]'s place.
  __device__ __forceinline__ void merge(Inputs& packs) const {
    float merged[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[F::kIn];
      element(packs, j, x);
      merged[j] = p.f.merge(x);
    }
    packs[0].set(merged);
  }
  __device__ __forceinline__ void keep(Column c, Inputs& packs) const {
    if constexpr (F::kKeeps) {
      if (!live || !lie.has(c)) return;
      merge(packs);
      lie.store(kept(), c, packs[0]);
    }
  }
  __device__ __forceinline__ void write(Column c, const Inputs& packs, const Params& params, float mean,
                                        float rstd) const {
    float h[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float v = value<F, N>(p.f, packs, j);
      h[j] = (F::kCentred ? v - mean : v) * rstd;
    }
    if (p.f.round_h) round_all<X>(h);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[F::kIn], w[F::kParams];
      element(packs, j, x);
      element(params, j, w);
      h[j] = p.f.result(h[j], w, x);
    }
    Pack<Y, N> out;
    out.set(h);
    lie.store_if_there(y, c, out);
  }

  // As good as divided: exact where the mean is a number of fp32.
  __device__ __forceinline__ float mean_of(float sum) const {
    const float mean = sum * p.inverse;
    return fma(fma(-mean, float(p.cols), sum), p.inverse, mean);
  }
  // Of a pack; a chain of its own, so that several are under way.
  __device__ __forceinline__ float sum_of(const Inputs& packs) const {
    float s = value<F, N>(p.f, packs, 0);
#pragma unroll
    for (int j = 1; j < N; ++j) s += value<F, N>(p.f, packs, j);
    return s;
  }
  // Sum of squares about the mean, and, where there is one and X is fine enough for it to be seen, the sum of what is left: the
  // sum of a long row far from zero is some ulp off, and this says by how much.
  template <int K>
  __device__ __forceinline__ void statistics_of(Column c, const Inputs& packs, float mean,
                                                float (&sums)[K]) const {
    float off = 0.0f, squares = 0.0f;
    auto add = [&](float mean, auto whole) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float v = value<F, N>(p.f, packs, j);
        if constexpr (F::kCentred) {
          v = whole || lie.in_row(c + j) ? v - mean : 0.0f;
          if constexpr (kFine) off += v;
        }
        squares = fma(v, v, squares);
      }
    };
    if (!F::kCentred || How == Lying::packs)
      add(mean, std::true_type{});
    else if (live && lie.whole(c))
      add(mean, std::true_type{});
    else if (live && lie.has(c))
      add(mean, std::false_type{});
    sums[0] = squares;
    if constexpr (F::kCentred && kFine) sums[1] = off;
  }
  template <int K>
  __device__ __forceinline__ void add_to_statistics(Column c, const Inputs& packs, float mean,
                                                    float (&sums)[K]) const {
    float of_pack[K];
    statistics_of(c, packs, mean, of_pack);
#pragma unroll
    for (int k = 0; k < K; ++k) sums[k] += of_pack[k];
  }
  template <int K>
  __device__ __forceinline__ float finish_statistics(const float (&sums)[K], float& mean) const {
    float variance = sums[0] * p.inverse;
    if constexpr (F::kCentred && kFine) {
      float off = sums[1] * p.inverse;
      mean += off;
      variance = fma(-off, off, variance);
      if (variance < 0.0f) variance = 0.0f;
    }
    // Short rows feel every instruction of this: division and root by the book are 60.
    return sizeof(X) == 2 ? rsqrtf(variance + p.eps) : 1.0f / sqrtf(variance + p.eps);
  }
  __device__ __forceinline__ void renew(Inputs& packs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) packs[k] = again(packs[k], p.zero);
  }
  // Of a row in registers, which all of its threads hold; what it keeps is written. merge(sums): of all threads; `single`: what this
  // thread holds of the row besides.
  // middle[i]: what is subtracted from pack i: the mean, but zero where a zero stands for what is not there. The compiler must not know
  // it for one of them, or it finds the differences a second time where they are written.
  template <int Held, class Where, class Merge, class Single>
  __device__ __forceinline__ void statistics(Inputs (&in)[Held], Where&& column, Merge&& merge,
                                             Single&& single, float (&middle)[Held], float& mean,
                                             float& rstd) const {
#pragma unroll
    for (int i = 0; i < Held; ++i) keep(column(i), in[i]);
    single.keep();
    float sums[kStatistics] = {};
    mean = 0.0f;
    if constexpr (F::kCentred) {
      float of[Held];
#pragma unroll
      for (int i = 0; i < Held; ++i) of[i] = sum_of(in[i]);
      float total[1] = {single.sum() + reduce_pairs<Sum>(of)};
      merge(total);
      mean = mean_of(total[0]);
    }
    single.add_to_statistics(mean, sums);
    float of[kStatistics][Held];
#pragma unroll
    for (int i = 0; i < Held; ++i) {
      if (F::kCentred && Held > 4) renew(in[i]);
      middle[i] = 0.0f;
      if constexpr (F::kCentred) {
        middle[i] = lie.has(column(i)) ? mean : 0.0f;
        asm("" : "+f"(middle[i]));
      }
      float of_pack[kStatistics];
      statistics_of(column(i), in[i], middle[i], of_pack);
#pragma unroll
      for (int k = 0; k < kStatistics; ++k) of[k][i] = of_pack[k];
    }
#pragma unroll
    for (int k = 0; k < kStatistics; ++k) sums[k] += reduce_pairs<Sum>(of[k]);
    merge(sums);
    rstd = finish_statistics(sums, mean);
    if constexpr (F::kCentred && kFine) {
#pragma unroll
      for (int i = 0; i < Held; ++i) middle[i] = mean;
    }
  }
  __device__ __forceinline__ void save_statistics(float mean, float rstd) const {
    if (p.rstd == nullptr) return;
    p.rstd[statistic] = rstd;
    if constexpr (F::kCentred) p.mean[statistic] = mean;
  }
};

// What a thread holds of a row beside packs: nothing.
struct NoSingle {
  __device__ void keep() const {}
  __device__ float sum() const { return 0.0f; }
  template <int K>
  __device__ void add_to_statistics(float, float (&)[K]) const {}
};
// An element before or behind the whole packs of a row, or none.
template <class F, class W, class Y>
struct Single {
  using Row = ForwardRow<F, W, Y, 1, Lying::packs, int>;
  int column;  // of the row; its length: none
  typename Row::Inputs in, next;
  typename Row::Params param;
  const Row* row = nullptr;

  __device__ __forceinline__ bool is() const { return column < row->lie.cols; }
  __device__ __forceinline__ void keep() {
    if (is()) row->keep(column, in);
  }
  __device__ __forceinline__ float sum() const { return row->sum_of(in); }
  template <int K>
  __device__ __forceinline__ void add_to_statistics(float mean, float (&sums)[K]) const {
    row->add_to_statistics(column, in, is() ? mean : 0.0f, sums);
  }
};

}  // namespace norm_detail
}  // namespace tigon::cuda
