#include "nccl_communicator.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace {

// NCCL's C interface (nccl.h): handles, results, and the numbers of its types and operations.
using Comm = struct ncclComm*;
struct Id {
  char internal[128];
};
enum : int { kSuccess = 0, kSum = 0, kInt8 = 0, kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9 };

struct Nccl {
  int (*get_unique_id)(Id*);
  int (*comm_init_rank)(Comm*, int size, Id, int rank);
  int (*comm_destroy)(Comm);
  int (*all_gather)(const void* send, void* receive, size_t count, int type, Comm, void* stream);
  int (*all_reduce)(const void* send, void* receive, size_t count, int type, int op, Comm, void* stream);
  int (*reduce_scatter)(const void* send, void* receive, size_t count, int type, int op, Comm, void* stream);
  const char* (*error_string)(int);
};

template <class F>
void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("NCCL has no ") + name);
}

const Nccl& nccl() {
  static const Nccl api = [] {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) throw std::runtime_error(std::string("NCCL cannot be opened: ") + dlerror());
    Nccl n = {};
    find(library, "ncclGetUniqueId", n.get_unique_id);
    find(library, "ncclCommInitRank", n.comm_init_rank);
    find(library, "ncclCommDestroy", n.comm_destroy);
    find(library, "ncclAllGather", n.all_gather);
    find(library, "ncclAllReduce", n.all_reduce);
    find(library, "ncclReduceScatter", n.reduce_scatter);
    find(library, "ncclGetErrorString", n.error_string);
    return n;
  }();
  return api;
}

void check(int result) {
  if (result != kSuccess) throw std::runtime_error(std::string("NCCL: ") + nccl().error_string(result));
}

int type_of(tigon::DType dtype) {
  switch (dtype) {
    case tigon::DType::f32: return kFloat32;
    case tigon::DType::bf16: return kBfloat16;
    case tigon::DType::f16: return kFloat16;
    default: throw std::runtime_error("NCCL communicator: sums of floats only");
  }
}

class NcclCommunicator final : public tigon::Communicator {
 public:
  NcclCommunicator(const NcclId& id, int rank, int size) : rank_(rank), size_(size) {
    Id handed;
    std::copy(id.begin(), id.end(), handed.internal);
    check(nccl().comm_init_rank(&comm_, size, handed, rank));
  }
  ~NcclCommunicator() override { nccl().comm_destroy(comm_); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_gather(const void* send, void* receive, size_t bytes, void* stream) override {
    check(nccl().all_gather(send, receive, bytes, kInt8, comm_, stream));
  }
  void all_reduce(void* data, int64_t n, tigon::DType dtype, void* stream) override {
    check(nccl().all_reduce(data, data, size_t(n), type_of(dtype), kSum, comm_, stream));
  }
  void reduce_scatter(const void* send, void* receive, int64_t n, tigon::DType dtype, void* stream) override {
    check(nccl().reduce_scatter(send, receive, size_t(n), type_of(dtype), kSum, comm_, stream));
  }

 private:
  Comm comm_ = nullptr;
  int rank_, size_;
};

}  // namespace

NcclId make_nccl_id() {
  Id made;
  check(nccl().get_unique_id(&made));
  NcclId id;
  std::copy(std::begin(made.internal), std::end(made.internal), id.begin());
  return id;
}

std::unique_ptr<tigon::Communicator> make_nccl_communicator(const NcclId& id, int rank, int size) {
  return std::make_unique<NcclCommunicator>(id, rank, size);
}
