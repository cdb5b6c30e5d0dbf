#include "engine/draft_choices.h"

#include <algorithm>

#include "sampling/token_noise.h"

namespace llmserve {

void DraftChoices::begin(size_t num_rows) {
  if (choices_.size() < num_rows) choices_.resize(num_rows);
  for (std::vector<DraftChoice>& choices : choices_) choices.clear();
}

// The noise is that of the target's draw.
void DraftChoices::draw(const ConstTensor& logits, const SampleTask& task,
                        const SampledToken& first, int32_t count, size_t row) {
  std::vector<DraftChoice>& choices = choices_[row];
  if (!first.is_valid || task.awaits_mask) return;
  choices.push_back({.token_id = first.token_id});
  banned_.assign(task.banned_token_ids.begin(), task.banned_token_ids.end());
  SampleTask other = task;
  other.only_draws = false;
  while (std::ssize(choices) < count) {
    banned_.push_back(choices.back().token_id);
    other.banned_token_ids = banned_;
    drawn_.clear();
    sampler_.sample(logits, std::span(&other, 1), drawn_);
    if (!drawn_.rows[0].is_valid) break;
    choices.push_back({.token_id = drawn_.rows[0].token_id});
  }
  if (choices.size() < 2) return;
  const auto score = [&](int32_t token_id) {
    const float temperature = task.params->draw.temperature;
    const float noise =
        temperature > 0 ? temperature * token_noise(task.seed, task.position, token_id) : 0;
    float logit = 0;
    memory_.copy_to_host(&logit, logits.as<float>() + token_id, sizeof(logit));
    return logit + noise;
  };
  const float distance = std::max(0.0f, score(choices[0].token_id) - score(choices[1].token_id));
  for (DraftChoice& choice : choices) choice.distance = distance;
}

}  // namespace llmserve
