#include "emulator.h"

#include <sched.h>
#include <sys/mman.h>

#include <barrier>
#include <chrono>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "cuda_runtime.h"

namespace emulator {

thread_local Cta cta;
thread_local char anchor;
alignas(1024) thread_local char dynamic_shared[kMaxDynamicShared];

namespace {

constexpr size_t kStack = 256 * 1024;

[[noreturn]] void give_up(const char* why) {
  fprintf(stderr, "emulator: %s (block %u of %u, rank %d, %u threads, %d alive, %d at the barrier)\n", why,
          cta.block, cta.blocks, cta.rank, cta.threads, cta.alive, cta.arrived);
  for (size_t w = 0; w < cta.warps.size(); ++w)
    for (const Meeting& m : cta.warps[w])
      if (m.arrived) fprintf(stderr, "  warp %zu: %d threads of mask %08x meet\n", w, m.arrived, m.mask);
  abort();
}

extern "C" void tigon_emulator_switch(void** from, void* to);
asm(R"(
.text
.globl tigon_emulator_switch
.hidden tigon_emulator_switch
tigon_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

thread_local void* scheduler = nullptr;
thread_local const std::function<void()>* kernel = nullptr;

void enter() {
  (*kernel)();
  Thread& self = *cta.thread;
  self.done = true;
  ++cta.progress;
  --cta.alive;
  cta.cluster->alive.fetch_sub(1);
  if (cta.alive > 0 && cta.arrived == cta.alive)
    cta.arrived = 0, cta.voted = cta.votes, cta.votes = 0, ++cta.generation;
  tigon_emulator_switch(&self.stack_pointer, scheduler);
  abort();
}

struct Stacks {
  char* memory = nullptr;
  Stacks() {
    memory = static_cast<char*>(mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  ~Stacks() { munmap(memory, kStack * kMaxThreads); }
};

// Every schedule must give the same bits: odd seeds run threads from the last to the first.
int schedule() {
  static const int seed = getenv("TIGON_EMULATOR_SCHEDULE") ? atoi(getenv("TIGON_EMULATOR_SCHEDULE")) : 0;
  return seed;
}

void run_cta(std::vector<Thread>& threads, char* stacks) {
  const int n = int(cta.threads);
  cta.warps.assign(size_t((n + kWarp - 1) / kWarp), {});
  cta.arrived = cta.votes = 0;
  cta.alive = n;
  memset(dynamic_shared, 0xff, kMaxDynamicShared);
  for (int i = 0; i < n; ++i) {
    threads[size_t(i)] = Thread{.index = i};
    // Entered by ret, as if called: the stack is 8 bytes off a multiple of 16.
    auto** top = reinterpret_cast<void**>(stacks + size_t(i + 1) * kStack - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&enter);
    for (int k = 0; k < 6; ++k) *--top = nullptr;
    threads[size_t(i)].stack_pointer = top;
  }
  auto since = std::chrono::steady_clock::now();
  uint64_t seen = cta.progress;
  while (cta.alive > 0) {
    for (int k = 0; k < n; ++k) {
      Thread& t = threads[size_t(schedule() % 2 ? n - 1 - k : k)];
      if (t.done) continue;
      cta.thread = &t;
      tigon_emulator_switch(&scheduler, t.stack_pointer);
    }
    if (cta.progress != seen) {
      seen = cta.progress;
      since = std::chrono::steady_clock::now();
    } else if (cta.cluster->size == 1) {
      give_up("all threads wait");
    } else {
      sched_yield();
      if (std::chrono::steady_clock::now() - since > std::chrono::seconds(60)) give_up("the cluster waits");
    }
  }
}

}  // namespace

void yield() {
  Thread& self = *cta.thread;
  tigon_emulator_switch(&self.stack_pointer, scheduler);
}

bool sync_threads_or(bool vote) {
  const int generation = cta.generation;
  cta.votes |= vote;
  ++cta.progress;
  if (++cta.arrived == cta.alive) {
    cta.arrived = 0;
    cta.voted = cta.votes;
    cta.votes = 0;
    ++cta.generation;
  } else {
    while (cta.generation == generation) yield();
  }
  return cta.voted != 0;
}
void sync_threads() { sync_threads_or(false); }
void named_barrier(int id, int threads, bool waits) {
  auto& barrier = cta.named[id];
  const int generation = barrier.generation;
  ++cta.progress;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    while (waits && barrier.generation == generation) yield();
  }
}

const uint64_t* exchange(uint32_t mask, uint64_t value) {
  const int lane = cta.thread->index % kWarp;
  if (!(mask >> lane & 1)) give_up("a thread is not in its own mask");
  auto& meetings = cta.warps[size_t(cta.thread->index / kWarp)];
  size_t at = 0;
  while (at < meetings.size() && meetings[at].mask != mask) ++at;
  if (at == meetings.size()) {
    meetings.reserve(64);
    meetings.push_back({.mask = mask});
    if (meetings.size() > 64) give_up("more than 64 masks");
  }
  Meeting& m = meetings[at];
  const int generation = m.generation;
  uint64_t* values = m.values[generation % 2];
  values[lane] = value;
  ++cta.progress;
  if (++m.arrived == std::popcount(mask)) {
    m.arrived = 0;
    ++m.generation;
  } else {
    while (m.generation == generation) yield();
  }
  return values;
}

void cluster_arrive() {
  Cluster& c = *cta.cluster;
  ++cta.progress;
  cta.thread->cluster_generation = c.generation.load();
  if (c.arrived.fetch_add(1) + 1 == c.size * int(cta.threads)) {
    c.arrived = 0;
    ++c.generation;
  }
}
void cluster_wait() {
  while (cta.cluster->generation.load() == cta.thread->cluster_generation) yield();
  ++cta.progress;
}

void start_copy(const Copy& copy) {
  memset(copy.to, 0xff, size_t(copy.bytes + copy.zeros));
  cta.thread->copies.push_back(copy);
}
void commit_copies() {
  auto& t = *cta.thread;
  size_t committed = 0;
  for (size_t n : t.groups) committed += n;
  t.groups.push_back(t.copies.size() - committed);
}
void wait_copies(size_t pending) {
  auto& t = *cta.thread;
  while (t.groups.size() > pending) {
    for (size_t i = 0; i < t.groups[0]; ++i) {
      const Copy& c = t.copies[i];
      memcpy(c.to, c.from, size_t(c.bytes));
      memset(static_cast<char*>(c.to) + c.bytes, 0, size_t(c.zeros));
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + ptrdiff_t(t.groups[0]));
    t.groups.erase(t.groups.begin());
  }
}

namespace {
// An mbarrier's 64 bits.
struct Barrier {
  int64_t phase : 1, count : 15, pending : 16, bytes : 32;
};
static_assert(sizeof(Barrier) == 8);
}  // namespace

void mbarrier_init(uint64_t* barrier, int count) {
  *barrier = std::bit_cast<uint64_t>(Barrier{.phase = 0, .count = count, .pending = count, .bytes = 0});
}
void mbarrier_update(uint64_t* barrier, int arrivals, int bytes) {
  std::atomic_ref<uint64_t> ref(*barrier);
  uint64_t old = ref.load(), next;
  do {
    Barrier b = std::bit_cast<Barrier>(old);
    b.pending -= arrivals;
    b.bytes += bytes;
    if (b.pending < 0) give_up("more arrivals at an mbarrier than it counts");
    if (b.pending == 0 && b.bytes == 0) b.phase = ~b.phase, b.pending = b.count;
    next = std::bit_cast<uint64_t>(b);
  } while (!ref.compare_exchange_weak(old, next));
  ++cta.progress;
}
void mbarrier_wait(const uint64_t* barrier, int parity) {
  std::atomic_ref<uint64_t> ref(*const_cast<uint64_t*>(barrier));
  while ((std::bit_cast<Barrier>(ref.load()).phase & 1) == (parity & 1)) yield();
  ++cta.progress;
}

void run(const Launch& launch, const std::function<void()>& fn) {
  Cluster cluster;
  cluster.size = launch.cluster;
  cluster.anchors.resize(size_t(launch.cluster));
  auto cta_of = [&](int rank, auto&& between) {
    static thread_local Stacks stacks;
    std::vector<Thread> threads(size_t(launch.threads));
    cluster.anchors[size_t(rank)] = &anchor;
    kernel = &fn;
    for (int64_t first = 0; first < launch.blocks; first += launch.cluster) {
      between();
      cta = {};
      cta.block = unsigned(first + rank), cta.blocks = unsigned(launch.blocks),
      cta.threads = unsigned(launch.threads);
      cta.rank = rank, cta.cluster = &cluster;
      run_cta(threads, stacks.memory);
    }
    between();
  };
  if (launch.cluster == 1) return cta_of(0, [] {});
  std::barrier together(launch.cluster);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < launch.cluster; ++rank)
    ranks.emplace_back([&, rank] { cta_of(rank, [&] { together.arrive_and_wait(); }); });
  for (auto& t : ranks) t.join();
}

}  // namespace emulator

namespace {
int setting(const char* name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }
}  // namespace

const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error" : "invalid launch";
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = setting("TIGON_EMULATOR_SMS", 3); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emulator::kMaxDynamicShared; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
  }
  return cudaSuccess;
}
int emulated_occupancy(int threads, size_t shared, int cluster) {
  const int sms = setting("TIGON_EMULATOR_SMS", 3);
  const int an_sm = std::min(2048 / std::max(threads, 1), int(228 * 1024 / (shared + 1024)));
  return cluster == 1 ? an_sm : std::max(std::min(an_sm, 1), an_sm * sms / cluster);
}
namespace emulator {
namespace {
std::mutex kernels_mutex;
std::unordered_map<const void*, Bind> kernels;
std::unordered_map<const void*, int> shared_limits;

int shared_limit(const void* entry) {
  const std::lock_guard lock(kernels_mutex);
  const auto found = shared_limits.find(entry);
  return found == shared_limits.end() ? 48 * 1024 : found->second;
}
}  // namespace
void allow_shared(const void* entry, int bytes) {
  const std::lock_guard lock(kernels_mutex);
  shared_limits[entry] = bytes;
}
void add_kernel(const void* entry, Bind bind) {
  const std::lock_guard lock(kernels_mutex);
  kernels.emplace(entry, bind);
}
}  // namespace emulator
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* launch, const void* entry, void** params) {
  const cudaLaunchConfig_t& config = *launch;
  int cluster = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = int(config.attrs[i].val.clusterDim.x);
  if (config.blockDim.x == 0 || config.blockDim.x > emulator::kMaxThreads ||
      config.gridDim.x % unsigned(cluster) || config.dynamicSmemBytes > emulator::kMaxDynamicShared ||
      int64_t(config.dynamicSmemBytes) > emulator::shared_limit(entry))
    return emulator::last_error = cudaErrorInvalidValue;
  emulator::run({.blocks = config.gridDim.x, .threads = int(config.blockDim.x), .cluster = cluster},
                emulator::kernels.at(entry)(entry, params));
  return cudaSuccess;
}

#include "tigon/base/check.h"
#include "tigon/base/cuda/gemm_cublaslt.h"

void tigon::cuda::cublaslt_gemm(Context&, const Gemm&, int, GemmWorkspace&) {
  tigon::detail::fail("gemm", {"there is no cuBLASLt here"});
}
std::string tigon::cuda::cublaslt_kernels() { return {}; }
