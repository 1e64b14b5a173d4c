// One kernel serves all ops that read a row, reduce it some times, and write a row of the same length. A row
// stays in the registers of some lanes, a warp, a CTA or a cluster of CTAs. Longer rows are read again, from
// L2, in every pass. The op gives a functor, which every thread of a row calls once:
//   struct Op {
//     using Element = T;                    storage type of all rows
//     static constexpr int kIn;             rows read
//     static constexpr bool kFill[kIn];     -inf instead of 0 outside the ends of a row
//     using Payload;                        what is reduced (row_reduce.cuh): 8 or 16 bytes
//     using Scratch;                        shared memory of a row, not initialized: NoScratch,
//                                           or a plain struct
//     RowsOf<T, kIn> rows;
//     template <class Row> __device__ void operator()(Row& row) const;
//     template <int K> __device__ int64_t source(int64_t r) const;
//                                           optional: the row of input K that row r reads
//     static constexpr RowConfigs configs(RowAlignment);
//                                           optional: tables of its own. The last table for `any` serves
//                                           clusters, which are persistent: a vector of the next row is
//                                           requested when one is stored. Such an op reduces and writes
//                                           every row
//   };
// and calls these functions of the row:
//   row.for_each_vec(fn)     calls fn(x, i) for the vectors of this thread: x[kIn][N] in fp32, i < Row::kVecs
//   row.all_reduce(payload)  reduces over the threads of the row. Every thread of a CTA or cluster, and of a
//                            warp, calls it equally often
//   row.write(fn)            does the same as for_each_vec, and sets out = fn(x, j, i), or
//                            fn(x, j, i, column), for element j of the vector
//   row.max_of_vecs()        returns the largest element of this thread's vectors of the first row, NaN if
//                            there is one. Then these functions may be called:
//   row.for_each_vec_if(keep, fn), row.write_if(keep, fn)
//                            leave out, or write zeros for, the vectors whose largest element of the first
//                            row keep(x) does not want
//   row.index, row.leads()   are the row, and whether this thread writes what is written once per row
//   row.scratch, row.sync()  are the Scratch of the row, and a barrier of its threads if the row is within a
//                            CTA (Row::kThreads: the lanes that share a row, 0: the CTA)
// Results may overwrite an input of the same address and stride: a thread reads and writes the same vectors.
#pragma once

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/row_reduce.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/base/distribution.h"

namespace tigon::cuda {

template <class T, int K>
struct RowsOf {
  const T *in[K], *end[K];
  int64_t in_stride[K];
  // If null, nothing is written.
  T* out;
  int64_t out_stride, rows;
  int cols;
  // Counts the rows drawn by persistent CTAs, from zero at launch. If null, the distribution is static.
  int* counter;
  // hide_from_compiler() takes this.
  uint32_t opaque_zero;
};

// Holds the rows of matrices of one size. The vectors are those of `out`, or of the first input if there is
// no result.
template <class T, int K>
RowsOf<T, K> rows_of(const Matrix (&in)[K], const Matrix& out) {
  RowsOf<T, K> r{};
  for (int k = 0; k < K; ++k) {
    r.in[k] = in[k].template row<const T>(0), r.in_stride[k] = in[k].stride;
    r.end[k] = end_of_rows(r.in[k], in[k].stride, in[k].rows, in[k].cols);
  }
  r.out = out.row<T>(0), r.out_stride = out.stride;
  r.rows = in[0].rows, r.cols = int(in[0].cols);
  return r;
}

struct NoScratch {};

namespace row_detail {

// Locates row `index`. A row past the end loads nothing.
template <class Op, RowAlignment kAlignment>
struct Place {
  using T = typename Op::Element;
  static constexpr bool kAligned = kAlignment == RowAlignment::vectorized;
  int64_t index;
  bool live;
  AlignedRow<T, kAligned> like;
  Array<AlignedRowLoader<T, kAlignment == RowAlignment::any, kAligned>, Op::kIn> in;

  __device__ __forceinline__ Place(const Op& op, int64_t r)
      : Place(op, r, std::make_index_sequence<Op::kIn>{}) {}

 private:
  template <size_t... K>
  __device__ __forceinline__ Place(const Op& op, int64_t r, std::index_sequence<K...>)
      : index(r),
        live(r < op.rows.rows),
        like(op.rows.out ? op.rows.out + (live ? r : 0) * op.rows.out_stride
                         : const_cast<T*>(op.rows.in[0]) + (live ? r : 0) * op.rows.in_stride[0],
             op.rows.cols),
        in{{{like, op.rows.in[K] + source<K>(op, live ? r : 0) * op.rows.in_stride[K], op.rows.end[K],
             Op::kFill[K] ? kMinusInf<T> : 0u, live}...}} {}

  template <int K>
  __device__ __forceinline__ static int64_t source(const Op& op, int64_t r) {
    if constexpr (requires { op.template source<K>(r); })
      return op.template source<K>(r);
    else
      return r;
  }
};

template <class Op, class Reducer, RowConfig kConfig, bool kLooped, RowAlignment kAlignment>
struct Row : Place<Op, kAlignment> {
  using Here = Place<Op, kAlignment>;
  using T = typename Op::Element;
  using Payload = typename Op::Payload;
  using Here::index, Here::live, Here::like, Here::in;
  static constexpr int N = AlignedRow<T>::N, kIn = Op::kIn, kThreads = Reducer::kThreads,
                       kVecs = kConfig.vecs_per_thread;
  // A CTA holds this many vectors.
  static constexpr int64_t kMaxVecs = kConfig.max_vecs();
  static constexpr bool kIsCluster = Reducer::kIsCluster, kIsLooped = kLooped;
  static constexpr bool kPersistent = Reducer::kIsPersistent;
  const Op& op;
  const RowsOf<T, kIn>& rows = op.rows;
  Reducer& reducer;
  typename Op::Scratch& scratch;
  // Persistent CTAs keep the next row, the one after it, and the row that this thread has drawn.
  int64_t following = 0, later = 0;
  int drawn = -1;
  uint4 q[kIn][kVecs];
  // The largest elements of q[0], as set by max_of_vecs().
  float top[kVecs];

  __device__ __forceinline__ Row(const Op& op, Reducer& reducer, typename Op::Scratch& scratch)
      : Here(op, reducer.first_row()), op(op), reducer(reducer), scratch(scratch) {
    later = index + reducer.step();
  }
  __device__ __forceinline__ void begin() {
    if constexpr (kPersistent) {
      following = later, later += reducer.step();
      drawn = reducer.draw_row(rows.counter);
    }
    if constexpr (!kLooped) trim(0);
  }

  __device__ __forceinline__ bool leads() const { return live && reducer.thread + reducer.rank == 0; }
  __device__ __forceinline__ void sync() const {
    static_assert(!kIsCluster && (kThreads == 0 || kThreads == 32));
    if constexpr (kThreads == 0)
      __syncthreads();
    else
      __syncwarp();
  }
  // V is a payload of the size of Payload.
  template <class V>
  __device__ __forceinline__ V all_reduce(const V& v) {
    if constexpr (kPersistent) {
      return reducer.all_reduce(v, std::exchange(drawn, -1), later);
    } else {
      static_assert(sizeof(ReduceStorage<V>) == sizeof(reducer.x));
      return all_reduce_row<kThreads, kIsCluster>(v, reinterpret_cast<ReduceStorage<V>&>(reducer.x),
                                                  reducer.phase++);
    }
  }
  template <class Fn>
  __device__ __forceinline__ void for_each_vec(Fn&& fn) {
    each([&](int i, int) { fn(unpacked(i).x, i); });
  }
  template <class Fn>
  __device__ __forceinline__ void write(Fn&& fn) {
    if constexpr (kPersistent) {
      const Here next(op, following);
      each([&](int i, int k) {
        write_vec(i, k, [](float) { return true; }, fn);
#pragma unroll
        for (int n = 0; n < kIn; ++n) q[n][i] = next.in.data[n].load(reducer.vec_index(i));
      });
      static_cast<Here&>(*this) = next;
    } else {
      write_if([](float) { return true; }, fn);
    }
  }
  __device__ __forceinline__ float max_of_vecs() {
    float most = -INFINITY;
    each([&](int i, int) {
      top[i] = max_of_elements(q[0][i]);
      most = max_NaN(most, top[i]);
    });
    return most;
  }
  template <class Keep, class Fn>
  __device__ __forceinline__ void for_each_vec_if(Keep&& keep, Fn&& fn) {
    each([&](int i, int) {
      if (kKeepsAll || keep(max_of_vec(i))) fn(unpacked(i).x, i);
    });
  }
  template <class Keep, class Fn>
  __device__ __forceinline__ void write_if(Keep&& keep, Fn&& fn) {
    if (rows.out == nullptr) return;
    each([&](int i, int k) { write_vec(i, k, keep, fn); });
  }
  // Requests this thread's vectors, the first of them `first` vectors into the row.
  __device__ __forceinline__ void request(int first) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
#pragma unroll
      for (int k = 0; k < kIn; ++k) q[k][i] = in.data[k].load(first + reducer.vec_index(i));
  }
  __device__ __forceinline__ void trim(int first) {
#pragma unroll
    for (int k = 0; k < kIn; ++k)
      in.data[k].trim(like, q[k], [&](int i) { return first + reducer.vec_index(i); });
  }

 private:
  // Two vectors are as quick to compute as to leave out.
  static constexpr bool kKeepsAll = kVecs <= 2;
  struct Vecs {
    float x[kIn][N];
  };
  __device__ __forceinline__ Vecs unpacked(int i) const {
    Vecs v;
#pragma unroll
    for (int k = 0; k < kIn; ++k)
      unpack<T>(sizeof(T) == 2 && !kLooped ? hide_from_compiler(q[k][i], rows.opaque_zero) : q[k][i], v.x[k]);
    return v;
  }
  // Returns NaN if one is NaN.
  __device__ __forceinline__ static float max_of_elements(const uint4& v) {
    if constexpr (sizeof(T) == 4) {
      return max_NaN(max_NaN(__uint_as_float(v.x), __uint_as_float(v.y)),
                     max_NaN(__uint_as_float(v.z), __uint_as_float(v.w)));
    } else {
      auto larger = [](uint32_t a, uint32_t b) {
        return std::is_same_v<T, __half> ? max_NaN_f16x2(a, b) : max_NaN_bf16x2(a, b);
      };
      const uint32_t most = larger(larger(v.x, v.y), larger(v.z, v.w));
      return max_NaN(low(most, T{}), high(most, T{}));
    }
  }
  // A looped row has other vectors in q by now.
  __device__ __forceinline__ float max_of_vec(int i) const {
    return kLooped ? max_of_elements(q[0][i]) : top[i];
  }
  template <class Keep, class Fn>
  __device__ __forceinline__ void write_vec(int i, int k, Keep&& keep, Fn&& fn) {
    if (!live || k >= like.vecs) return;
    float out[N] = {};
    if (kKeepsAll || keep(max_of_vec(i))) {
      // Otherwise the compiler computes all vectors ahead of the branches.
      if (!kKeepsAll) {
        keep_in_register(q[0][i].x), keep_in_register(q[0][i].y);
        keep_in_register(q[0][i].z), keep_in_register(q[0][i].w);
      }
      const Vecs in = unpacked(i);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if constexpr (std::is_invocable_v<Fn, decltype(in.x)&, int, int, int>)
          out[j] = fn(in.x, j, i, like.column(k) + j);
        else
          out[j] = fn(in.x, j, i);
      }
    }
    store_vec(like, k, out);
  }
  // Calls fn(i, k) for the vectors q[][i], which are vectors k of the rows.
  template <class Fn>
  __device__ __forceinline__ void each(Fn&& fn) {
    const int step = kLooped ? reducer.threads * reducer.blocks * kVecs : like.vecs;
#pragma unroll 1
    for (int first = 0; first < (kLooped ? like.vecs : 1); first += step) {
      if (kLooped) request(first), trim(first);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) fn(i, first + reducer.vec_index(i));
    }
  }
};

// True if an op has tables of its own.
template <class Op>
concept IsTuned = requires { Op::configs(RowAlignment::any); };

template <class Op, class Config, bool kCluster, bool kLooped, RowAlignment kAlignment>
__global__ __launch_bounds__(Config::value.max_threads,
                             Config::value.min_blocks_per_sm) void kernel(const __grid_constant__ Op op) {
  constexpr RowConfig kConfig = Config::value;
  constexpr bool kPersistent = IsTuned<Op> && kCluster && !kLooped;
  using Reducer = RowReducer<kConfig, kCluster, kPersistent, typename Op::Payload>;
  __shared__ ReduceStorage<typename Reducer::Payload> storage;
  __shared__ typename Op::Scratch scratch[kConfig.rows_per_block];
  Reducer reducer(storage);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Row<Op, Reducer, kConfig, kLooped, kAlignment> row(
      op, reducer, scratch[kConfig.rows_per_block == 1 ? 0 : threadIdx.x / kConfig.threads_per_row]);
  if constexpr (!kLooped) row.request(0);
  reducer.wait_for_cluster();
  do {
    row.begin();
    op(row);
  } while (kPersistent && row.live);
  if constexpr (kCluster) cluster_arrive();
  reducer.wait_for_cluster();
}

// There are few configurations: rows of any alignment take the same ones. Rows of one input have registers
// for three CTAs of 512 threads on an SM, or two if they are longer.
constexpr RowConfig kLongest = {.vecs_per_thread = 4, .max_threads = 1024};
constexpr RowConfig kShort = several_rows({.threads_per_row = 8, .vecs_per_thread = 2});
constexpr RowConfig kWarp = several_rows({.threads_per_row = 32, .vecs_per_thread = 4});
template <int Inputs>
constexpr RowConfigs kConfigs(kShort, kWarp, kLongest);
template <>
constexpr RowConfigs kConfigs<1>(kShort, kWarp,
                                 RowConfig{.vecs_per_thread = 4, .max_threads = 512, .min_blocks_per_sm = 3},
                                 RowConfig{.vecs_per_thread = 8, .max_threads = 512, .min_blocks_per_sm = 2});

template <class Op>
constexpr RowConfigs configs(RowAlignment alignment) {
  if constexpr (IsTuned<Op>)
    return Op::configs(alignment);
  else
    return kConfigs<Op::kIn>;
}

template <RowAlignment kAlignment, class Op>
void run_row_op(const char* name, Context& ctx, Op op, int64_t vecs) {
  constexpr RowConfigs kOwn = configs<Op>(kAlignment);
  if (const int config = select_config(kOwn, vecs); config >= 0)
    return with_config<kOwn>(config, [&]<RowConfig kConfig>() {
      launch(name, ctx, kernel<Op, ConfigType<kConfig>, false, false, kAlignment>,
             {.blocks = ceil_div(op.rows.rows, kConfig.rows_per_block),
              .threads = kConfig.block_threads(vecs),
              .pdl = true},
             op);
    });
  // Clusters do not distinguish vectorized rows: the work per row is negligible in long rows.
  constexpr RowAlignment kLong =
      kAlignment == RowAlignment::vectorized ? RowAlignment::same_offset : kAlignment;
  constexpr RowConfigs kOfAny = configs<Op>(RowAlignment::any);
  constexpr RowConfig kCluster = IsTuned<Op> ? kOfAny.at[kOfAny.size - 1] : kLongest;
  static OccupancyCache occupancy;
  const auto clustered = kernel<Op, ConfigType<kCluster>, true, false, kLong>;
  if (const ClusterShape c =
          largest_cluster(name, occupancy, entry_of(clustered), kCluster, vecs, 192, no_shared);
      c.blocks > 0) {
    if (IsTuned<Op>) op.rows.counter = make_row_counter(name, ctx, op.rows.rows, c.clusters);
    const int64_t clusters = IsTuned<Op> ? std::min(op.rows.rows, c.clusters) : op.rows.rows;
    return launch(
        name, ctx, clustered,
        {.blocks = clusters * c.blocks, .threads = c.threads, .pdl = !IsTuned<Op>, .cluster = c.blocks}, op);
  }
  static OccupancyCache looped_occupancy;
  const auto looped = kernel<Op, ConfigType<kLongest>, true, true, RowAlignment::any>;
  const int blocks = looped_occupancy.max_active(name, looped, 8, kLongest.max_threads) > 0 ? 8 : 1;
  launch(name, ctx, looped,
         {.blocks = op.rows.rows * blocks, .threads = kLongest.max_threads, .pdl = true, .cluster = blocks},
         op);
}

}  // namespace row_detail

template <class Op>
void run_row_op(const char* name, Context& ctx, const Op& op) {
  using T = typename Op::Element;
  const auto& rows = op.rows;
  const T* like = rows.out ? rows.out : rows.in[0];
  const int64_t stride = rows.out ? rows.out_stride : rows.in_stride[0];
  const int64_t vecs = max_vecs_of_row(like, stride, rows.cols);
  // Rows in fp16, which are rare, take the kernels of any alignment.
  if constexpr (row_detail::IsTuned<Op> && !std::is_same_v<T, __half>) {
    constexpr RowAlignment kVectorized = RowAlignment::vectorized;
    bool same_offset = is_vectorizable(like, stride, rows.cols, sizeof(T)) ||
                       select_config(Op::configs(kVectorized), vecs) < 0;
    for (int k = 0; k < Op::kIn; ++k)
      same_offset =
          same_offset && same_row_offsets<T>(rows.in[k], rows.in_stride[k], like, stride, rows.rows);
    if (same_offset) return row_detail::run_row_op<kVectorized>(name, ctx, op, vecs);
  }
  row_detail::run_row_op<RowAlignment::any>(name, ctx, op, vecs);
}

// Launches the ops of tigon/base/distribution.h: Forward reads x, Backward reads y and dy. No two ops'
// templates may share a name: GCC takes the lambdas of both for one, though their namespaces have no name.
template <template <class> class Forward>
void distribution_fwd(const char* op, Context& ctx, const DistributionFwd& a) {
  dispatch_float(op, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    run_row_op(op, ctx, Forward<T>{rows_of<T, 1>({a.x}, a.y)});
  });
}
template <template <class> class Backward>
void distribution_bwd(const char* op, Context& ctx, const DistributionBwd& a) {
  dispatch_float(op, "y", a.y.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    run_row_op(op, ctx, Backward<T>{rows_of<T, 2>({a.y, a.dy}, a.dx)});
  });
}

}  // namespace tigon::cuda
