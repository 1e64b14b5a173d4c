// A Context holds what a call runs with: device, stream, threads, scratch memory and GEMM. The core allocates
// nothing itself. Scratch comes from here, so that a framework's caching allocator, an arena or a poisoning
// test allocator can serve it. Scratch lives until the Context dies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tigon/base/export.h"
#include "tigon/base/tensor.h"

namespace tigon {

// Runs fn(arg, i) for i in [0, tasks). Tasks are a function of the shape only, never of the number of
// threads, and write disjoint memory, so results are bitwise equal for any number of threads. fn does not
// throw.
class TIGON_API Executor {
 public:
  virtual ~Executor() = default;
  virtual int threads() const = 0;
  virtual void run(int64_t tasks, void (*fn)(void*, int64_t), void* arg) = 0;
};

// Runs all tasks on the calling thread: the executor of contexts whose work runs on a device.
class InlineExecutor final : public Executor {
 public:
  int threads() const override { return 1; }
  void run(int64_t tasks, void (*fn)(void*, int64_t), void* arg) override {
    for (int64_t i = 0; i < tasks; ++i) fn(arg, i);
  }
};

// C[m,n] = alpha * op(A)[m,k] op(B)[k,n] + beta * C, row major, accumulated in fp32. beta is 0 or 1. c_dtype
// may be f32 with 16-bit operands; the sums are then never rounded to 16 bits. (A CPU provider may round the
// GEMM to the operand type once, and says so, unless `unrounded` is set.)
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  int64_t lda = 0;
  bool trans_a = false;
  const void* b = nullptr;
  int64_t ldb = 0;
  bool trans_b = false;
  void* c = nullptr;
  int64_t ldc = 0;
  DType ab_dtype = DType::f32;
  DType c_dtype = DType::f32;
  float alpha = 1.0f;
  float beta = 0.0f;
  bool unrounded = false;
  // On the CPU, zeros follow each row of A up to a multiple of 64 elements.
  bool padded_a = false;
  // k counts rows of the call, as it does whenever trans_a is set: the GEMM sums over rows, and no result
  // belongs to one row.
  bool reduce_rows = false;
  // Float8 operands need trans_b and run on CUDA only. Each row of A and of op(B)^T has a scale factor.
  // fast_sums allows the tensor cores to accumulate with fewer bits.
  const float *a_scales = nullptr, *b_scales = nullptr;
  bool fast_sums = false;
};

class TIGON_API Context {
 public:
  // If set, the results of a row are bitwise equal whatever other rows the call has: GEMM has one order of
  // summation for each N, K and pair of types. It is set before a call.
  bool deterministic = false;

  virtual ~Context() = default;
  virtual Device device() const = 0;
  virtual void* stream() const = 0;  // cudaStream_t; nullptr on the CPU
  virtual Executor& executor() = 0;
  // Returns uninitialised memory, aligned to 256 bytes.
  virtual void* scratch(size_t bytes) = 0;
  virtual void gemm(const Gemm& g) = 0;

  template <class T>
  T* scratch_of(int64_t n) {
    return static_cast<T*>(scratch(sizeof(T) * size_t(n > 0 ? n : 1)));
  }
};

TIGON_API bool built_with_cuda();

// Runs fn(i) for i in [0, tasks) on the context's executor; a single task runs in place.
template <class Fn>
void parallel(Context& ctx, int64_t tasks, const Fn& fn) {
  if (tasks == 1) return fn(0);
  if (tasks <= 0) return;
  ctx.executor().run(
      tasks, [](void* arg, int64_t i) { (*static_cast<const Fn*>(arg))(i); }, const_cast<Fn*>(&fn));
}

}  // namespace tigon
