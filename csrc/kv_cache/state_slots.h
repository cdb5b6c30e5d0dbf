// Where the fixed states of sequences lie (layers of linear attention, Mamba), and what is kept of
// them: a state cannot be cut back to fewer tokens, so that a prefix is found only where its state
// was copied at the time.
//
// A slot has room for the state of all such layers. It is free; held, by a block table whose
// sequence runs, or until its copy has been made; or a snapshot, by the hash of the tokens before
// it. The snapshot that was the longest time not used is evicted when no slot is free.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/token_hash.h"

namespace llmserve {

// The whole state, before anything of the step is written; in the plan's order.
struct StateCopy {
  int32_t source = 0;
  int32_t destination = 0;
};

class StateSlots {
 public:
  explicit StateSlots(int32_t num_slots);

  int32_t num_slots() const { return static_cast<int32_t>(snapshots_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_snapshots() const { return static_cast<int32_t>(by_age_.size()); }
  int32_t num_available() const { return num_free() + num_snapshots(); }

  // A slot to hold. Precondition: one is available.
  int32_t take();
  // Of a slot that is held.
  void give_back(int32_t slot) { free_.push_back(slot); }

  // The snapshot of these very tokens: a hash alone is not believed.
  std::optional<int32_t> find(const TokenHash& hash, std::span<const int32_t> token_ids) const;
  // It is used now.
  void touch(int32_t slot);
  // A slot that is held becomes the snapshot of these tokens; where their hash has one, it is free.
  void keep(int32_t slot, const TokenHash& hash, std::span<const int32_t> token_ids);
  // Forgets all snapshots.
  void clear();

  // Throws InternalError unless free + snapshots + held = total, each slot once.
  void check_integrity(std::span<const int32_t> held) const;

 private:
  // The tokens are few beside the state, and compared whole.
  struct Snapshot {
    TokenHash hash;
    std::vector<int32_t> token_ids;
    std::list<int32_t>::iterator place;  // in by_age_
  };

  std::vector<int32_t> free_;        // a stack
  std::vector<Snapshot> snapshots_;  // [slots], of those that are snapshots
  std::list<int32_t> by_age_;        // snapshots, the longest time not used first
  std::unordered_map<TokenHash, int32_t, TokenHashBucket> slot_by_hash_;
};

}  // namespace llmserve
