// The standalone CPU context: every task once, any number of threads, nested and concurrent use; scratch;
// cuda refusal.
#include <atomic>
#include <thread>

#include "table.h"

namespace tigon::test {
namespace {

TEST_CASE("every task runs exactly once") {
  for (int threads : {1, 2, 3, 7})
    for (int64_t tasks : {0, 1, 2, 6, 7, 8, 1000}) {
      INFO(threads << " threads, " << tasks << " tasks");
      auto ctx = make_cpu_context(threads);
      CHECK(ctx->executor().threads() == threads);
      std::vector<std::atomic<int>> runs(size_t(std::max<int64_t>(tasks, 1)));
      parallel(*ctx, tasks, [&](int64_t i) { ++runs[size_t(i)]; });
      for (int64_t i = 0; i < tasks; ++i) CHECK(runs[size_t(i)] == 1);
    }
}

TEST_CASE("many short runs") {  // a lost wake-up would hang here
  auto ctx = make_cpu_context(3);
  std::atomic<int64_t> sum = 0;
  for (int run = 0; run < 2000; ++run) parallel(*ctx, 5, [&](int64_t i) { sum += i; });
  CHECK(sum == 2000 * 10);
}

TEST_CASE("a run inside a run finishes in place") {
  auto ctx = make_cpu_context(3);
  std::atomic<int64_t> inner = 0;
  parallel(*ctx, 8, [&](int64_t) { parallel(*ctx, 4, [&](int64_t i) { inner += i; }); });
  CHECK(inner == 8 * 6);
}

TEST_CASE("two threads may share a context") {
  auto ctx = make_cpu_context(2);
  std::atomic<int64_t> sum = 0;
  auto work = [&] {
    for (int run = 0; run < 200; ++run) parallel(*ctx, 9, [&](int64_t i) { sum += i; });
  };
  std::thread other(work);
  work();
  other.join();
  CHECK(sum == 2 * 200 * 36);
}

TEST_CASE("scratch is aligned and separate") {
  auto ctx = make_cpu_context(1);
  auto* a = static_cast<char*>(ctx->scratch(1));
  auto* b = static_cast<char*>(ctx->scratch(1000));
  CHECK(ctx->scratch(0) != nullptr);
  CHECK(reinterpret_cast<uintptr_t>(a) % 256 == 0);
  CHECK(reinterpret_cast<uintptr_t>(b) % 256 == 0);
  std::memset(b, 1, 1000);
  *a = 2;
  CHECK(b[0] == 1);
}

TEST_CASE("a build without CUDA says so") {
  if (!built_with_cuda())
    CHECK_THROWS_WITH_AS(make_cuda_context(), doctest::Contains("this build of Tigon has no CUDA backend"),
                         Error);
}

}  // namespace
}  // namespace tigon::test
