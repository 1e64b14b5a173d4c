// Keeps the `capacity` most recently used values by key, for any number of threads.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace tigon {

template <class Key, class Value>
class LruCache {
 public:
  using Shared = std::shared_ptr<const Value>;

  explicit LruCache(size_t capacity) : capacity_(capacity) {}

  // Returns the key's value, else what make() returns. make() runs unlocked: threads that miss at the same
  // time each make a value, and all get the first one. A dropped value lives as long as a caller holds it.
  template <class Make>
  Shared get(const Key& key, const Make& make) {
    if (Shared known = find(key)) return known;
    Shared made = make(), dropped;
    std::lock_guard lock(mutex_);
    if (Shared first = find_locked(key)) return first;
    recent_.emplace_front(key, made);
    places_[key] = recent_.begin();
    if (recent_.size() > capacity_) {
      dropped = std::move(recent_.back().second);
      places_.erase(recent_.back().first);
      recent_.pop_back();
    }
    return made;
  }

 private:
  using Entries = std::list<std::pair<Key, Shared>>;

  Shared find(const Key& key) {
    std::lock_guard lock(mutex_);
    return find_locked(key);
  }
  Shared find_locked(const Key& key) {
    auto place = places_.find(key);
    if (place == places_.end()) return nullptr;
    recent_.splice(recent_.begin(), recent_, place->second);
    return place->second->second;
  }

  const size_t capacity_;
  std::mutex mutex_;
  Entries recent_;  // most recently used first
  std::map<Key, typename Entries::iterator> places_;
};

}  // namespace tigon
