// The transfers under way, to and from a lower tier or a peer: what each moves, and the table that
// has it. Whoever begins one refers to its blocks, and lets go of them at its end.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "kv_cache/block_table.h"
#include "kv_cache/transfer.h"

namespace llmserve {

// The block of the KV pool that a move reads or writes.
inline int32_t pool_block(const Transfer& transfer, const BlockMove& move) {
  return transfer.from == MemoryTier::kPool ? move.source : move.destination;
}

class TransferBook {
 public:
  struct Entry {
    Transfer transfer;
    BlockTable* table = nullptr;  // null: it has none, or was released and left what follows
    GroupBlocks blocks;
    GroupBlocks slots;
  };

  // `table`, or none, has this transfer until its end.
  void begin(Transfer transfer, BlockTable* table);
  // What is released leaves its blocks and slots to its transfer, so that parents stay as long as
  // their children.
  void leave(BlockTable& table);
  // None: there is no such transfer any more. The entry's table has none then.
  std::optional<Entry> end(TransferId id);

  int64_t num_in_flight() const { return std::ssize(entries_); }
  bool has_begun() const { return !begun_.empty(); }
  // Of one that began since the last take(), goes to a peer and is no withdrawal; none: there is no
  // such one.
  std::optional<HandOver> unsent() const;
  // Ends one of those, as if it had never begun; none: there is no such one of this hand-over.
  std::optional<Entry> cancel_send(const HandOver& hand_over);
  // Appends those that began since the last call.
  void take(std::vector<Transfer>& transfers);

  const std::map<TransferId, Entry>& entries() const { return entries_; }
  // Throws InternalError unless each transfer of a table has it, and no table another. Adds the
  // references to those of each block.
  void check_integrity(std::span<const BlockTable* const> tables,
                       std::vector<int32_t>& num_block_holders) const;

 private:
  std::map<TransferId, Entry> entries_;
  std::vector<Transfer> begun_;
  TransferId next_id_ = 0;
};

}  // namespace llmserve
