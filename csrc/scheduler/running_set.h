// Sequences with a seat, in the order of service, and the number of seats. There are max_num_seqs
// seats. After a step that failed there are half as many as it ran sequences, until enough steps
// have gone well.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "scheduler/sequence.h"

namespace llmserve {

class RunningSet {
 public:
  explicit RunningSet(int64_t max_seats)
      : all_seats_(max_seats), max_seats_(max_seats), num_seats_(max_seats) {}

  void insert(Sequence& sequence) {
    sequences_.insert(std::ranges::upper_bound(sequences_, &sequence, ServedBefore()), &sequence);
  }
  void erase(const Sequence& sequence) { std::erase(sequences_, &sequence); }
  void erase_ended() {
    std::erase_if(sequences_, [](const Sequence* sequence) { return sequence->is_ended(); });
  }
  void clear() { sequences_.clear(); }
  void reorder() { std::ranges::sort(sequences_, ServedBefore()); }

  bool is_empty() const { return sequences_.empty(); }
  int64_t size() const { return static_cast<int64_t>(sequences_.size()); }
  Sequence& operator[](int64_t i) const { return *sequences_[static_cast<size_t>(i)]; }
  auto begin() const { return sequences_.begin(); }
  auto end() const { return sequences_.end(); }

  int64_t num_seats() const { return num_seats_; }
  // So many seats at most, from now on: at least one, and no more than there were at first. Those
  // that are taken stay so.
  void allow_seats(int64_t max_seats) {
    max_seats_ = std::clamp<int64_t>(max_seats, 1, all_seats_);
    num_seats_ = std::min(num_seats_, max_seats_);
  }
  bool has_seat() const { return size() < num_seats_; }
  // After a step of num_sequences that failed: half as many may run.
  void take_seats(int64_t num_sequences) {
    num_seats_ = std::max<int64_t>(1, num_sequences / 2);
    num_good_steps_ = 0;
  }
  // After a step that went well.
  void give_seats_back() {
    if (num_seats_ >= max_seats_ || ++num_good_steps_ < kStepsToGrow) return;
    num_good_steps_ = 0;
    num_seats_ = std::min(max_seats_, 2 * num_seats_);
  }

 private:
  // Twice as many sequences may run again after so many steps that went well: a second or so, and
  // from one to 256 in 256 steps.
  static constexpr int32_t kStepsToGrow = 32;

  std::vector<Sequence*> sequences_;
  const int64_t all_seats_;
  int64_t max_seats_;  // that are allowed
  int64_t num_seats_;
  int32_t num_good_steps_ = 0;  // since the number of seats changed
};

}  // namespace llmserve
