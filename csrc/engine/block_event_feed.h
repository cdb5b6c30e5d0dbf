// What an engine's prefix cache holds, for listeners on other threads: batches with numbers, of
// which the last ones are kept. It is off, and costs nothing, until somebody takes a snapshot; and
// again once nobody has asked for longer than the batches last.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "api/block_events.h"

namespace llmserve {

class BlockEventFeed {
 public:
  // Of more events than the cache has blocks a snapshot is the shorter account; a few times as many
  // leave a listener the time for one.
  explicit BlockEventFeed(int64_t num_blocks) : max_events_(4 * num_blocks) {}

  // -- the engine's thread ------------------------------------------------------------------------

  bool is_on() const { return is_on_; }
  // The events of a step. Returns false if nobody has listened for too long: it is off then.
  bool push(std::vector<BlockEvent> events);
  // Turns it on. `hashes` are all blocks that are held now.
  BlockSnapshot snapshot(std::vector<TokenHash> hashes);

  // -- any thread ---------------------------------------------------------------------------------

  // The batches after `sequence`; none if some of them are gone, or it is off: then a snapshot is
  // needed.
  std::optional<std::vector<BlockEventBatch>> since(int64_t sequence);

 private:
  const int64_t max_events_;
  bool is_on_ = false;  // written under the lock, by the engine's thread
  std::mutex mutex_;
  std::deque<BlockEventBatch> batches_;
  int64_t sequence_ = 0;    // of the last batch
  int64_t num_events_ = 0;  // in batches_
  int64_t num_unread_ = 0;  // that came since somebody asked last
};

}  // namespace llmserve
