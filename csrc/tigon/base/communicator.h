// The processes (or threads) that share a computation, as the core sees them: a program brings its own, on NCCL
// (examples/cpp/nccl_communicator.h), MPI, or threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tigon/base/dtype.h"
#include "tigon/base/export.h"

namespace tigon {

// All ranks make the same calls in the same order. Work is ordered on `stream` (the Context's: a cudaStream_t, or nullptr on
// the CPU, where a call returns when it is done). Memory is that of the Context's device.
class TIGON_API Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // receive[r * bytes ...] = rank r's send, on every rank.
  virtual void all_gather(const void* send, void* receive, size_t bytes, void* stream) = 0;
  // data = the sum over ranks, the same bits on all of them. f32 | bf16 | f16.
  virtual void all_reduce(void* data, int64_t n, DType dtype, void* stream) = 0;
  // receive [n] = this rank's part of the sum of send [size * n].
  virtual void reduce_scatter(const void* send, void* receive, int64_t n, DType dtype, void* stream) = 0;
};

}  // namespace tigon
