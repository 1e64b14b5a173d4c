// A bounded cache: which values stay, what happens to those in use, and several threads at once.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tigon/base/lru_cache.h"

namespace tigon::test {
namespace {

std::atomic<int> alive{0};
struct Value {
  explicit Value(int key) : key(key) { ++alive; }
  Value(const Value&) = delete;
  ~Value() { --alive; }
  const int key;
};
using Cache = LruCache<int, Value>;

Cache::Shared get(Cache& cache, int key, int* made = nullptr) {
  return cache.get(key, [&] {
    if (made != nullptr) ++*made;
    return std::make_shared<const Value>(key);
  });
}

TEST_CASE("5000 keys leave as many values as the cache holds") {
  {
    Cache cache(256);
    for (int key = 0; key < 5000; ++key) {
      CHECK(get(cache, key)->key == key);
      CHECK(alive <= 256);
    }
    CHECK(alive == 256);
  }
  CHECK(alive == 0);
}

TEST_CASE("the least recently used value goes first, and lives while it is held") {
  Cache cache(2);
  int made = 0;
  Cache::Shared first = get(cache, 1, &made);
  get(cache, 2, &made);
  CHECK(get(cache, 1, &made) == first);  // used again: 2 goes before it
  get(cache, 3, &made);
  CHECK(made == 3);
  CHECK(get(cache, 1, &made) == first);
  get(cache, 2, &made);  // drops 3
  get(cache, 3, &made);  // drops 1
  CHECK(made == 5);
  CHECK(first->key == 1);
  CHECK(alive == 3);
  CHECK(get(cache, 1, &made) != first);
}

TEST_CASE("a value that could not be made is no value") {
  Cache cache(2);
  CHECK_THROWS(cache.get(1, []() -> Cache::Shared { throw 1; }));
  CHECK(get(cache, 1)->key == 1);
}

TEST_CASE("threads get the value of their key while others are dropped") {
  {
    Cache cache(8);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (int i = 0; i < 20000; ++i) {
          int key = (i * (2 * t + 1)) % 13;
          Cache::Shared value = get(cache, key);
          if (value->key != key) ++wrong;
        }
      });
    for (std::thread& t : threads) t.join();
    CHECK(wrong == 0);
    CHECK(alive == 8);
  }
  CHECK(alive == 0);
}

TEST_CASE("threads that miss at the same time get one value") {
  Cache cache(2);
  std::atomic<int> missing{0};
  Cache::Shared found[2];
  auto miss = [&](int i) {
    found[i] = cache.get(7, [&] {
      ++missing;
      while (missing < 2) std::this_thread::yield();  // making holds no lock
      return std::make_shared<const Value>(7);
    });
  };
  std::thread other(miss, 1);
  miss(0);
  other.join();
  CHECK(found[0] == found[1]);
  CHECK(alive == 1);
}

}  // namespace
}  // namespace tigon::test
