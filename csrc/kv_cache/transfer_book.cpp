#include "kv_cache/transfer_book.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

bool is_send(const Transfer& transfer) {
  return transfer.to == MemoryTier::kPeer && !transfer.is_withdrawal;
}

}  // namespace

void TransferBook::begin(Transfer transfer, BlockTable* table) {
  transfer.id = next_id_++;
  if (table != nullptr) table->transfer = transfer.id;
  begun_.push_back(transfer);
  Entry& entry = entries_[transfer.id];
  entry.transfer = std::move(transfer);
  entry.table = table;
}

void TransferBook::leave(BlockTable& table) {
  Entry& entry = entries_.at(table.transfer);
  entry.table = nullptr;
  entry.blocks = std::exchange(table.blocks, {});
  entry.slots = std::exchange(table.slots, {});
  table.transfer = kNoTransfer;
}

std::optional<TransferBook::Entry> TransferBook::end(TransferId id) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return std::nullopt;
  Entry entry = std::move(found->second);
  entries_.erase(found);
  if (entry.table != nullptr) entry.table->transfer = kNoTransfer;
  return entry;
}

std::optional<HandOver> TransferBook::unsent() const {
  const auto send = std::ranges::find_if(begun_, is_send);
  if (send == begun_.end()) return std::nullopt;
  return send->hand_over;
}

std::optional<TransferBook::Entry> TransferBook::cancel_send(const HandOver& hand_over) {
  const auto send = std::ranges::find_if(begun_, [&](const Transfer& transfer) {
    return is_send(transfer) && transfer.hand_over == hand_over;
  });
  if (send == begun_.end()) return std::nullopt;
  const TransferId id = send->id;
  begun_.erase(send);
  return end(id);
}

void TransferBook::take(std::vector<Transfer>& transfers) {
  std::ranges::move(begun_, std::back_inserter(transfers));
  begun_.clear();
}

void TransferBook::check_integrity(std::span<const BlockTable* const> tables,
                                   std::vector<int32_t>& num_block_holders) const {
  const auto count_block = [&](int32_t block) { ++num_block_holders[block]; };
  int64_t num_tables = 0;
  for (const auto& [id, entry] : entries_) {
    for (const BlockMove& move : entry.transfer.moves)
      count_block(pool_block(entry.transfer, move));
    for_each_block(entry.blocks, count_block);
    if (entry.table == nullptr) continue;
    check_internal(entry.table->transfer == id, "a table knows its transfer");
    ++num_tables;
  }
  num_tables -= std::ranges::count_if(
      tables, [](const BlockTable* table) { return table->transfer != kNoTransfer; });
  check_internal(num_tables == 0, "each transfer of a table has it, and no table another");
}

}  // namespace llmserve
