// Sequences without a seat, in the order of service. A newcomer has never had one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>

#include "scheduler/sequence.h"

namespace llmserve {

class WaitingQueue {
 public:
  using Order = std::set<Sequence*, ServedBefore>;

  void insert(Sequence& sequence) {
    sequences_.insert(&sequence);
    if (!sequence.was_admitted) ++num_newcomers_;
  }
  void erase(Sequence& sequence) {
    sequences_.erase(&sequence);
    if (!sequence.was_admitted) --num_newcomers_;
  }
  bool contains(const Sequence& sequence) const {
    return sequences_.contains(const_cast<Sequence*>(&sequence));
  }

  bool is_empty() const { return sequences_.empty(); }
  int64_t size() const { return static_cast<int64_t>(sequences_.size()); }
  int32_t num_newcomers() const { return num_newcomers_; }
  int32_t num_returning() const { return static_cast<int32_t>(sequences_.size()) - num_newcomers_; }
  // Null where there is none.
  const Sequence* first_newcomer() const {
    const auto first = std::ranges::find_if(
        sequences_, [](const Sequence* sequence) { return !sequence->was_admitted; });
    return first == sequences_.end() ? nullptr : *first;
  }

  // An iterator stays valid while other sequences leave.
  Order::const_iterator begin() const { return sequences_.begin(); }
  Order::const_iterator end() const { return sequences_.end(); }

  // `change` changes service keys, by which the sequences are found.
  template <class Change>
  void reorder(const Change& change) {
    const Order old = std::move(sequences_);
    sequences_.clear();
    change();
    sequences_.insert(old.begin(), old.end());
  }

 private:
  Order sequences_;
  int32_t num_newcomers_ = 0;
};

}  // namespace llmserve
