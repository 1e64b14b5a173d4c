// Ranks that are threads of one process: the communicator of the tests.
#pragma once

#include <barrier>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "table.h"
#include "tigon/base/communicator.h"

namespace tigon::test {

// What the ranks share. A call is posted, read by all between two barriers, and then free again.
struct ThreadGroup {
  explicit ThreadGroup(int ranks) : posted(size_t(ranks)), meet(ranks) {}
  std::vector<const void*> posted;
  std::barrier<> meet;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(ThreadGroup& group, int rank) : group_(group), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return int(group_.posted.size()); }

  void all_gather(const void* send, void* receive, size_t bytes, void*) override {
    exchange(send, [&] {
      for (size_t r = 0; r < group_.posted.size(); ++r)
        std::memcpy(static_cast<char*>(receive) + r * bytes, group_.posted[r], bytes);
    });
  }
  void all_reduce(void* data, int64_t n, DType dtype, void*) override {
    std::vector<float> sum;
    exchange(data, [&] { sum = sum_of(0, n, dtype); });
    store(data, sum, dtype);
  }
  void reduce_scatter(const void* send, void* receive, int64_t n, DType dtype, void*) override {
    std::vector<float> sum;
    exchange(send, [&] { sum = sum_of(rank_ * n, n, dtype); });
    store(receive, sum, dtype);
  }

 private:
  template <class Fn>
  void exchange(const void* mine, const Fn& read) {
    group_.posted[size_t(rank_)] = mine;
    group_.meet.arrive_and_wait();
    read();
    group_.meet.arrive_and_wait();
  }
  std::vector<float> sum_of(int64_t first, int64_t n, DType dtype) const {
    std::vector<float> sum(size_t(n), 0.0f);
    for (const void* from : group_.posted)
      for (int64_t i = 0; i < n; ++i) sum[size_t(i)] += load(from, first + i, dtype);
    return sum;
  }
  static float load(const void* from, int64_t i, DType dtype) {
    switch (dtype) {
      case DType::bf16: return to_float(static_cast<const bf16*>(from)[i]);
      case DType::f16: return to_float(static_cast<const f16*>(from)[i]);
      default: return static_cast<const float*>(from)[i];
    }
  }
  static void store(void* to, const std::vector<float>& values, DType dtype) {
    for (size_t i = 0; i < values.size(); ++i) switch (dtype) {
        case DType::bf16: static_cast<bf16*>(to)[i] = from_float<bf16>(values[i]); break;
        case DType::f16: static_cast<f16*>(to)[i] = from_float<f16>(values[i]); break;
        default: static_cast<float*>(to)[i] = values[i];
      }
  }
  ThreadGroup& group_;
  int rank_;
};

// fn(communicator) on a thread per rank; what one throws is thrown here (the others must not be waiting for
// it).
template <class Fn>
void on_ranks(int ranks, const Fn& fn) {
  ThreadGroup group(ranks);
  std::vector<std::exception_ptr> thrown{size_t(ranks)};
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      ThreadCommunicator communicator(group, r);
      try {
        fn(communicator);
      } catch (...) {
        thrown[size_t(r)] = std::current_exception();
      }
    });
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& e : thrown)
    if (e) std::rethrow_exception(e);
}

}  // namespace tigon::test
