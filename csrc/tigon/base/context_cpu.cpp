// The standalone CPU context has its own thread pool and GEMM. Inside PyTorch another Context is used
// (tigon/torch), with the framework's pool and GEMM.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "tigon/base/check.h"
#include "tigon/base/gemm_cpu.h"
#include "tigon/base/make_context.h"

namespace tigon {
namespace {

// The partition of tasks is static: worker w runs tasks [w*n/W, (w+1)*n/W).
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int threads) {
    for (int w = 1; w < threads; ++w) workers_.emplace_back([this, w] { work(w); });
  }
  ~ThreadPool() override {
    stop_ = true;
    wake();
    for (auto& t : workers_) t.join();
  }
  int threads() const override { return int(workers_.size()) + 1; }

  void run(int64_t tasks, void (*fn)(void*, int64_t), void* arg) override {
    if (workers_.empty() || inside_) {
      for (int64_t i = 0; i < tasks; ++i) fn(arg, i);
      return;
    }
    std::lock_guard one_caller(callers_);
    tasks_ = tasks, fn_ = fn, arg_ = arg;
    pending_ = int(workers_.size());
    wake();
    share(0);
    while (int left = pending_) pending_.wait(left);
  }

 private:
  void share(int w) {
    inside_ = true;
    int64_t n = threads();
    for (int64_t i = tasks_ * w / n, end = tasks_ * (w + 1) / n; i < end; ++i) fn_(arg_, i);
    inside_ = false;
  }
  void wake() {
    ++generation_;
    generation_.notify_all();
  }
  void work(int w) {
    for (int seen = 0;;) {
      generation_.wait(seen);
      // A worker never misses a generation, since run() waits for every worker.
      seen = generation_;
      if (stop_) return;
      share(w);
      if (--pending_ == 0) pending_.notify_one();
    }
  }

  static thread_local bool inside_;
  std::vector<std::thread> workers_;
  std::mutex callers_;
  int64_t tasks_ = 0;
  void (*fn_)(void*, int64_t) = nullptr;
  void* arg_ = nullptr;
  // Threads wait on atomics, because the condition variables of GCC 12 need a newer libstdc++ than
  // manylinux_2_34 has.
  std::atomic<int> pending_ = 0, generation_ = 0;
  bool stop_ = false;
};
thread_local bool ThreadPool::inside_ = false;

class CpuContext final : public Context {
 public:
  explicit CpuContext(int threads) : pool_(threads) {}
  ~CpuContext() override {
    for (void* p : blocks_) std::free(p);
  }
  Device device() const override { return Device::cpu; }
  void* stream() const override { return nullptr; }
  Executor& executor() override { return pool_; }
  void* scratch(size_t bytes) override {
    void* p = std::aligned_alloc(256, (std::max<size_t>(bytes, 1) + 255) / 256 * 256);
    TIGON_CHECK("context", p != nullptr, "scratch allocation of ", bytes, " bytes failed");
    blocks_.push_back(p);
    return p;
  }
  void gemm(const Gemm& g) override { cpu::builtin_gemm(*this, g); }

 private:
  ThreadPool pool_;
  std::vector<void*> blocks_;
};

}  // namespace

std::unique_ptr<Context> make_cpu_context(int threads) {
  if (threads <= 0) threads = int(std::max(1u, std::thread::hardware_concurrency()));
  return std::make_unique<CpuContext>(threads);
}

}  // namespace tigon
