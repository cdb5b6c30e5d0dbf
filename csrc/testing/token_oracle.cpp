#include "testing/token_oracle.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/mix.h"

namespace llmserve {

int32_t oracle_token(uint64_t seed, int64_t position, int32_t vocab_size) {
  return static_cast<int32_t>(mix64(seed, static_cast<uint64_t>(position)) %
                              static_cast<uint64_t>(vocab_size));
}

SampledTokens sample_oracle(const StepPlan& plan, int32_t vocab_size) {
  SampledTokens sampled;
  for (const LogitRow& row : plan.logit_rows) {
    sampled.rows.push_back({.token_id = oracle_token(row.seed, row.position, vocab_size)});
  }
  return sampled;
}

ShadowModel::ShadowModel(int32_t num_blocks, int32_t block_size, int32_t vocab_size,
                         std::vector<int32_t> windows, int32_t num_lower_blocks,
                         int32_t num_state_slots)
    : block_size_(block_size),
      vocab_size_(vocab_size),
      windows_(std::move(windows)),
      pool_(static_cast<size_t>(num_blocks) * block_size),
      lower_(static_cast<size_t>(num_lower_blocks) * block_size),
      states_(static_cast<size_t>(num_state_slots)) {
  check_internal(!windows_.empty() && windows_[0] == 0, "a shadow's first group keeps all tokens");
}

ShadowModel::Slot& ShadowModel::slot(const ScheduledSequence& sequence, size_t group,
                                     int64_t position) {
  const int64_t block = sequence.block_tables[group][position / block_size_];
  check_internal(block != kGone, "a token looks at nothing that left the window");
  return pool_[block * block_size_ + position % block_size_];
}

void ShadowModel::write(const ScheduledSequence& sequence, std::span<const int32_t> token_ids) {
  check_internal(sequence.block_tables.size() == windows_.size(), "a table for each group");
  for (size_t i = 0; i < token_ids.size(); ++i) {
    const int64_t position = sequence.start_position + static_cast<int64_t>(i);
    const int32_t token_id = sequence.awaited_row < 0
                                 ? token_ids[i]
                                 : drawn_.at(static_cast<size_t>(sequence.awaited_row));
    for (size_t g = 0; g < windows_.size(); ++g)
      slot(sequence, g, position) = {token_id, position, g, sequence.adapter};
  }
}

void ShadowModel::read(const ScheduledSequence& sequence, int64_t num_tokens,
                       std::vector<int32_t>& context) {
  context.clear();
  for (int64_t p = 0; p < num_tokens; ++p) {
    const Slot& full = slot(sequence, 0, p);
    const bool is_own = full.position == p && full.group == 0 && full.adapter == sequence.adapter;
    context.push_back(is_own ? full.token_id : -1);
  }
  for (size_t g = 1; g < windows_.size(); ++g) {
    const int64_t begin =
        windows_[g] == 0 ? 0 : std::max<int64_t>(0, num_tokens - int64_t{windows_[g]});
    for (int64_t p = begin; p < num_tokens; ++p) {
      const Slot& seen = slot(sequence, g, p);
      if (seen.position != p || seen.group != g || seen.adapter != sequence.adapter ||
          seen.token_id != context[p])
        context[p] = -1;
    }
  }
}

void ShadowModel::State::add(int32_t token_id) {
  ++num_tokens;
  hash = mix64(hash, static_cast<uint32_t>(token_id));
}

// The tokens that write() has put into the KV cache.
void ShadowModel::take_in(const ScheduledSequence& sequence) {
  if (sequence.state_slot == kNoSlot) return;
  State& state = states_.at(static_cast<size_t>(sequence.state_slot));
  if (sequence.start_position == 0) state = {.num_tokens = 0};
  for (int64_t p = sequence.start_position; p < sequence.end_position(); ++p)
    state.add(slot(sequence, 0, p).token_id);
}

void ShadowModel::carry_out(const Transfer& transfer, size_t count) {
  if (transfer.is_withdrawal) num_sent_.erase(transfer.hand_over.id);
  if (transfer.to == MemoryTier::kPeer && transfer.is_last)
    num_sent_[transfer.hand_over.id] = transfer.num_tokens;
  for (const BlockMove& move : std::span(transfer.moves).first(count)) {
    const auto block_of = [&](MemoryTier tier, int32_t block) {
      if (tier == MemoryTier::kPeer) {
        std::vector<Slot>& sent = sent_[{transfer.hand_over.id, move.group, block}];
        sent.resize(static_cast<size_t>(block_size_));
        return sent.begin();
      }
      return (tier == MemoryTier::kPool ? pool_ : lower_).begin() + int64_t{block} * block_size_;
    };
    std::copy_n(block_of(transfer.from, move.source), block_size_,
                block_of(transfer.to, move.destination));
  }
}

bool ShadowModel::has_sent(const Transfer& transfer) const {
  const auto num_sent = num_sent_.find(transfer.hand_over.id);
  if (num_sent == num_sent_.end() || num_sent->second < transfer.num_tokens) return false;
  return std::ranges::all_of(transfer.moves, [&](const BlockMove& move) {
    return sent_.contains({transfer.hand_over.id, move.group, move.source});
  });
}

SampledTokens ShadowModel::execute(const StepPlan& plan) {
  for (const BlockCopy& copy : plan.copies) {
    std::copy_n(pool_.begin() + int64_t{copy.source} * block_size_, block_size_,
                pool_.begin() + int64_t{copy.destination} * block_size_);
  }
  for (const StateCopy& copy : plan.state_copies)
    states_.at(static_cast<size_t>(copy.destination)) =
        states_.at(static_cast<size_t>(copy.source));
  for (const ScheduledSequence& sequence : plan.sequences) {
    write(sequence, plan.tokens_of(sequence));
    take_in(sequence);
  }
  drawn_.clear();
  SampledTokens sampled;
  std::vector<int32_t> context;
  for (const LogitRow& row : plan.logit_rows) {
    const ScheduledSequence& sequence = plan.sequences[row.sequence_idx];
    read(sequence, sequence.start_position + row.token_offset + 1, context);
    if (sequence.state_slot != kNoSlot) {
      State expected{.num_tokens = 0};
      for (const int32_t id : context) expected.add(id);
      if (expected != states_[static_cast<size_t>(sequence.state_slot)]) context[0] = -1;
    }
    const int32_t token_id = row.given_token_id >= 0
                                 ? row.given_token_id
                                 : next_token(context, row.seed, vocab_size_, row.banned_token_ids);
    drawn_.push_back(token_id);
    const auto tops = top_logprobs(context, vocab_size_, row.params->logprobs.value_or(0));
    sampled.rows.push_back({.token_id = token_id,
                            .logprob = logprob(context, token_id),
                            .top_begin = static_cast<int32_t>(sampled.tops.size()),
                            .num_top = static_cast<int32_t>(tops.size())});
    sampled.tops.insert(sampled.tops.end(), tops.begin(), tops.end());
  }
  return sampled;
}

std::vector<TokenLogprob> ShadowModel::top_logprobs(std::span<const int32_t> context,
                                                    int32_t vocab_size, int32_t count) {
  std::vector<TokenLogprob> all;
  for (int32_t id = 0; count > 0 && id < vocab_size; ++id)
    all.push_back({id, logprob(context, id)});
  std::ranges::stable_sort(all, std::ranges::greater(), &TokenLogprob::logprob);
  all.resize(std::min<size_t>(all.size(), static_cast<size_t>(count)));
  return all;
}

float ShadowModel::logprob(std::span<const int32_t> context, int32_t token_id) {
  uint64_t state = context.size();
  for (const int32_t id : context) state = mix64(state, static_cast<uint32_t>(id));
  return -static_cast<float>(mix64(state, static_cast<uint32_t>(token_id)) % 64) / 16;
}

int32_t ShadowModel::next_token(std::span<const int32_t> context, uint64_t seed, int32_t vocab_size,
                                std::span<const int32_t> banned) {
  uint64_t state = mix64(seed, context.size());
  for (const int32_t id : context) state = mix64(state ^ static_cast<uint32_t>(id));
  int32_t token = static_cast<int32_t>(state % static_cast<uint64_t>(vocab_size));
  while (std::ranges::find(banned, token) != banned.end()) token = (token + 1) % vocab_size;
  return token;
}

}  // namespace llmserve
