#include "engine/recorded_shape.h"

namespace llmserve {
namespace {

// Of so few rows every row of lengths is a shape: there are 255 of them.
constexpr int64_t kMaxRowsOfAnyLengths = 8;
constexpr int kLengthBits = 4;
constexpr uint64_t kAreEqual = uint64_t{1} << 63;

// A committed token, and guesses.
bool decodes(const ScheduledSequence& sequence) {
  const bool is_given = sequence.prompt_embeds != nullptr &&
                        sequence.start_position < sequence.prompt_embeds->num_rows;
  return sequence.num_tokens == 1 + sequence.num_drafted && !is_given && sequence.adapter < 0 &&
         sequence.state_slot == kNoSlot;
}

// Each token has a row of logits, in order, and one is drawn from each.
bool draws_from_each(const StepPlan& plan) {
  size_t row = 0;
  for (size_t i = 0; i < plan.sequences.size(); ++i) {
    for (int32_t t = 0; t < plan.sequences[i].num_tokens; ++t, ++row) {
      const LogitRow& of = plan.logit_rows[row];
      if (of.sequence_idx != static_cast<int32_t>(i) || of.token_offset != t ||
          of.given_token_id >= 0)
        return false;
    }
  }
  return true;
}

// None where the shape is one of too many.
std::optional<uint64_t> lengths_of(const StepPlan& plan) {
  const int32_t first = plan.sequences[0].num_tokens;
  const bool are_equal = std::ranges::all_of(
      plan.sequences, [&](const ScheduledSequence& s) { return s.num_tokens == first; });
  if (are_equal) return first == 1 ? 0 : kAreEqual | static_cast<uint64_t>(first);
  if (plan.num_tokens() > kMaxRowsOfAnyLengths) return std::nullopt;
  uint64_t lengths = 0;
  for (const ScheduledSequence& sequence : plan.sequences)
    lengths = lengths << kLengthBits | static_cast<uint64_t>(sequence.num_tokens);
  return lengths;
}

}  // namespace

std::optional<RecordedShape> recorded_shape(const StepPlan& plan, const RecordingLimits& limits) {
  if (plan.sequences.empty() || std::ssize(plan.logit_rows) != plan.num_tokens() ||
      !plan.pooled.empty() || !std::ranges::all_of(plan.sequences, decodes) ||
      !draws_from_each(plan))
    return std::nullopt;
  const std::optional<uint64_t> lengths = lengths_of(plan);
  if (!lengths) return std::nullopt;
  int64_t longest = 0;
  for (const ScheduledSequence& sequence : plan.sequences)
    longest = std::max(longest, sequence.end_position());
  const int64_t context = recorded_context(longest, limits.max_model_len);
  BatchShape batch{.num_tokens = plan.num_tokens(),
                   .num_sequences = std::ssize(plan.sequences),
                   .num_rows = plan.num_tokens(),
                   .max_blocks = (context + limits.block_size - 1) / limits.block_size};
  if (*lengths == 0)
    batch.num_tokens = batch.num_sequences = batch.num_rows =
        num_recorded_rows(batch.num_sequences, limits.max_num_seqs);
  return RecordedShape{.batch = batch,
                       .lengths = *lengths,
                       .draws = std::ranges::all_of(plan.logit_rows, &LogitRow::only_draws)};
}

}  // namespace llmserve
