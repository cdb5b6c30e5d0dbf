#include "scheduler/outbox.h"

#include <algorithm>
#include <utility>

#include "core/prefetch.h"

namespace llmserve {

TokenEvent& Outbox::add_event(Sequence& sequence) {
  TokenEvent& event = events_.emplace_back();
  if (sequence.withheld) event = std::move(*std::exchange(sequence.withheld, nullptr));
  if (!sequence.is_streamed) {
    const auto given_out = sequence.generated().subspan(static_cast<size_t>(sequence.num_resumed));
    event.token_ids.assign(given_out.begin(), given_out.end());
  } else if (!spare_token_ids_.empty()) {
    event.token_ids = std::move(spare_token_ids_.back());
    spare_token_ids_.pop_back();
  }
  event.request_id = sequence.request_id;
  event.sample_index = sequence.sample_index;
  event.num_cached_tokens = sequence.num_cached_tokens;
  event.num_preemptions = sequence.num_preemptions;
  event.num_draft_tokens = sequence.num_draft_tokens;
  event.num_accepted_tokens = sequence.num_accepted_tokens;
  event.seed = sequence.seed;
  event.num_generated = sequence.num_generated();
  event.times = sequence.times;
  return event;
}

TokenEvent& Outbox::news_of(Sequence& sequence) {
  if (!sequence.is_streamed) {
    if (!sequence.withheld) sequence.withheld = std::make_unique<TokenEvent>();
    return *sequence.withheld;
  }
  if (events_.empty() || events_.back().request_id != sequence.request_id ||
      events_.back().sample_index != sequence.sample_index)
    return add_event(sequence);
  TokenEvent& event = events_.back();
  event.num_generated = sequence.num_generated();
  event.num_draft_tokens = sequence.num_draft_tokens;
  event.num_accepted_tokens = sequence.num_accepted_tokens;
  event.times = sequence.times;
  return event;
}

void Outbox::take(StepResult& result) {
  result.events.clear();
  result.events.swap(events_);
  result.progress.clear();
  result.progress.swap(progress_);
  result.drafts.clear();
  result.drafts.swap(drafts_);
}

void Outbox::recycle(StepResult& result, size_t max_spare) {
  for (TokenEvent& event : result.events) {
    if (event.token_ids.capacity() == 0 || spare_token_ids_.size() >= max_spare) continue;
    event.token_ids.clear();
    spare_token_ids_.push_back(std::move(event.token_ids));
  }
  result.events.clear();
}

void Outbox::prefetch(size_t num_events, size_t num_progress) const {
  llmserve::prefetch(events_.data(), std::min(events_.capacity(), num_events) * sizeof(TokenEvent));
  llmserve::prefetch(progress_.data(),
                     std::min(progress_.capacity(), num_progress) * sizeof(TokenProgress));
}

}  // namespace llmserve
