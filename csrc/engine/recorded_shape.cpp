#include "engine/recorded_shape.h"

namespace llmserve {
namespace {

bool runs_one_token(const ScheduledSequence& sequence) {
  const bool is_given = sequence.prompt_embeds != nullptr &&
                        sequence.start_position < sequence.prompt_embeds->num_rows;
  return sequence.num_tokens == 1 && !is_given && sequence.adapter < 0 &&
         sequence.state_slot == kNoSlot;
}

}  // namespace

std::optional<BatchShape> recorded_shape(const StepPlan& plan, const RecordingLimits& limits) {
  const auto num_rows = std::ssize(plan.sequences);
  if (num_rows == 0 || std::ssize(plan.logit_rows) != num_rows || !plan.pooled.empty() ||
      !plan.wanted_layers.empty() || !std::ranges::all_of(plan.sequences, runs_one_token))
    return std::nullopt;
  int64_t longest = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const LogitRow& row = plan.logit_rows[static_cast<size_t>(i)];
    if (row.sequence_idx != i || !row.only_draws()) return std::nullopt;
    longest = std::max(longest, plan.sequences[static_cast<size_t>(i)].end_position());
  }
  const int64_t rows = num_recorded_rows(num_rows, limits.max_num_seqs);
  const int64_t context = recorded_context(longest, limits.max_model_len);
  return BatchShape{.num_tokens = rows,
                    .num_sequences = rows,
                    .num_rows = rows,
                    .max_blocks = (context + limits.block_size - 1) / limits.block_size};
}

}  // namespace llmserve
