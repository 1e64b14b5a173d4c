// CUDA's model of execution on a CPU: kernels compiled as C++ run here, a CTA after the other, a thread of a
// CTA as a fiber. What a GPU leaves undefined is made visible: copies of cp.async arrive at their wait and
// leave NaN before it, a barrier that not all threads reach ends the process with a message.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <vector>

namespace emulator {

constexpr int kWarp = 32, kMaxThreads = 1024, kMaxDynamicShared = 227 * 1024;

// Threads of a warp that meet: of one mask. A meeting's values stay until the one after next.
struct Meeting {
  uint32_t mask = 0;
  int arrived = 0, generation = 0;
  uint64_t values[2][kWarp];
};

struct Copy {
  void* to;
  const void* from;
  int bytes, zeros;
};

// Work that a thread starts, and that happens when its group is waited for.
struct Deferred {
  std::vector<std::vector<std::function<void()>>> groups{1};
  void add(std::function<void()> fn) { groups.back().push_back(std::move(fn)); }
  void commit() { groups.emplace_back(); }
  void wait(size_t pending) {
    for (; groups.size() > pending + 1; groups.erase(groups.begin()))
      for (auto& fn : groups.front()) fn();
  }
};

struct Thread {
  void* stack_pointer = nullptr;
  int index = 0;
  bool done = false;
  std::vector<Copy> copies;
  std::vector<size_t> groups;  // copies of each committed group
  int cluster_generation = 0;
  Deferred bulk, wgmma;
};

struct Cluster {
  int size = 1;
  std::atomic<int> arrived{0}, generation{0}, alive{0};
  std::vector<char*> anchors;  // of each CTA's shared memory
};

struct Cta {
  unsigned block = 0, blocks = 1, threads = 1;
  int rank = 0;
  Cluster* cluster = nullptr;
  Thread* thread = nullptr;  // which runs
  int arrived = 0, generation = 0, alive = 0, votes = 0, voted = 0;
  uint64_t progress = 0;
  struct {
    int arrived, generation;
  } named[16] = {};
  std::vector<std::vector<Meeting>> warps;
};

extern thread_local Cta cta;
// Shared memory is thread-local: every CTA of a cluster has a thread of the operating system, in which
// addresses lie alike.
extern thread_local char anchor;
extern thread_local char dynamic_shared[];

void yield();
void sync_threads();
bool sync_threads_or(bool vote);
void named_barrier(int id, int threads, bool waits = true);
// The values of all lanes of the mask; a lane's own is `value`.
const uint64_t* exchange(uint32_t mask, uint64_t value);
void cluster_arrive();
void cluster_wait();

// As on a GPU, the rank is above the 24 bits of the place.
inline uint32_t shared_address(const void* p) {
  return (uint32_t(static_cast<const char*>(p) - &anchor) & 0xffffff) | uint32_t(cta.rank) << 24;
}
inline char* at_shared(uint32_t address) { return &anchor + (int32_t(address << 8) >> 8); }
inline char* of_rank(void* p, unsigned rank) {
  return cta.cluster->anchors[rank] + (static_cast<char*>(p) - &anchor);
}

void start_copy(const Copy& copy);
void commit_copies();
void wait_copies(size_t pending);

void mbarrier_init(uint64_t* barrier, int count);
void mbarrier_update(uint64_t* barrier, int arrivals, int bytes);  // bytes: expected less completed
void mbarrier_wait(const uint64_t* barrier, int parity);

struct Launch {
  int64_t blocks;
  int threads, cluster;
};
void run(const Launch& launch, const std::function<void()>& kernel);

template <class T>
uint64_t bits_of(const T& value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T of_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator
