// What is kept of work that comes again and again: plain C++, tested without a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>

namespace llmserve::cuda {

// By key, at most `max_size` of them: the one that was used longest ago gives way.
template <class Key, class Graph>
class RecordedWork {
 public:
  struct Entry {
    bool has_run = false;     // as it is, so that it may be captured
    bool is_refused = false;  // it cannot be captured
    Graph graph{};
    int64_t last_use = 0;
  };

  explicit RecordedWork(size_t max_size) : max_size_(max_size) {}

  // Of a key that is new, or has given way: an empty one.
  Entry& find(const Key& key) {
    if (!entries_.contains(key) && entries_.size() == max_size_) {
      entries_.erase(std::ranges::min_element(
          entries_, {}, [](const auto& entry) { return entry.second.last_use; }));
    }
    Entry& entry = entries_[key];
    entry.last_use = ++num_uses_;
    return entry;
  }
  void clear() { entries_.clear(); }
  // Of what is kept.
  template <class Value>
  int64_t sum(const Value& value_of) const {
    int64_t total = 0;
    for (const auto& [key, entry] : entries_) total += value_of(entry.graph);
    return total;
  }
  size_t size() const { return entries_.size(); }

 private:
  const size_t max_size_;
  std::map<Key, Entry> entries_;
  int64_t num_uses_ = 0;
};

}  // namespace llmserve::cuda
