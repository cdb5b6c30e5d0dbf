#include "engine/step_trace.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace llmserve {
namespace {

// Of a TokenProgress or a TokenEvent.
template <class News>
void take_news(RequestRecord& record, const News& news) {
  if (record.scheduled_us == 0) record.scheduled_us = news.times.scheduled_us;
  if (record.first_token_us == 0) record.first_token_us = news.times.first_token_us;
  record.last_token_us = std::max(record.last_token_us, news.times.last_token_us);
  record.num_preemptions = std::max(record.num_preemptions, news.num_preemptions);
  record.num_cached_tokens = std::max(record.num_cached_tokens, news.num_cached_tokens);
}

}  // namespace

void StepTrace::record(StepRecord& step) {
  if (steps_.empty()) return;
  const std::lock_guard lock(mutex_);
  if (step.num_prefill_tokens > 0) note_admissions(step);  // else nobody was for the first time
  StepRecord& place = steps_[num_recorded_++ % steps_.size()];
  std::vector<Decision> spare = std::move(place.decisions);
  place = std::move(step);
  spare.reserve(place.decisions.size());
  prefetch(spare.data(), spare.capacity() * sizeof(Decision));  // the next step writes them
  step.decisions = std::move(spare);
}

void StepTrace::note_admissions(const StepRecord& step) {
  for (const Decision& decision : step.decisions) {
    if (decision.kind != DecisionKind::kAdmitted) continue;
    RequestRecord& record = place_of(decision.request_id);
    if (record.request_id == decision.request_id && record.scheduled_us == 0)
      record.scheduled_us = step.start_us;
  }
}

void StepTrace::begin(const Request& request, int64_t now_us) {
  const std::lock_guard lock(mutex_);
  place_of(request.id) = {
      .request_id = request.id,
      .num_samples = request.params.n,
      .arrival_us = request.arrival_us,
      .queued_us = now_us,
      .num_prompt_tokens = static_cast<int64_t>(request.prompt_token_ids.size()),
      .replica = replica_};
}

std::optional<RequestRecord> StepTrace::take(RequestId id) {
  const std::lock_guard lock(mutex_);
  RequestRecord& record = place_of(id);
  if (record.request_id != id) return std::nullopt;
  return std::exchange(record, {});
}

void StepTrace::enter(RequestRecord record, int64_t now_us) {
  const std::lock_guard lock(mutex_);
  if (record.replica != replica_) {  // else no other one has taken it
    record.former_replica = std::exchange(record.replica, replica_);
    record.taken_over_us = now_us;
  }
  RequestRecord& place = place_of(record.request_id);
  if (place.request_id < record.request_id) place = record;
}

void StepTrace::update(const StepResult& result, int64_t now_us) {
  const std::lock_guard lock(mutex_);
  for (const TokenProgress& progress : result.progress)
    prefetch(&place_of(progress.request_id), kCacheLineBytes);
  for (const TokenProgress& progress : result.progress) {
    RequestRecord& record = place_of(progress.request_id);
    if (record.request_id != progress.request_id) continue;  // a later one has its place
    take_news(record, progress);
    record.num_generation_tokens += progress.num_tokens;
  }
  for (const TokenEvent& event : result.events) {
    RequestRecord& record = place_of(event.request_id);
    if (event.finish_reason == FinishReason::kNone || record.request_id != event.request_id)
      continue;
    take_news(record, event);
    record.num_draft_tokens += event.num_draft_tokens;
    record.num_accepted_tokens += event.num_accepted_tokens;
    if (!event.is_request_finished) continue;
    record.finish_reason = event.finish_reason;
    record.finished_us = now_us;
  }
}

std::vector<StepRecord> StepTrace::steps() const {
  const std::lock_guard lock(mutex_);
  const size_t kept = std::min(num_recorded_, steps_.size());
  std::vector<StepRecord> steps;
  steps.reserve(kept);
  for (size_t i = num_recorded_ - kept; i < num_recorded_; ++i)
    steps.push_back(steps_[i % steps_.size()]);
  return steps;
}

std::vector<RequestRecord> StepTrace::requests() const {
  std::vector<RequestRecord> requests;
  {
    const std::lock_guard lock(mutex_);
    std::ranges::copy_if(requests_, std::back_inserter(requests),
                         [](const RequestRecord& record) { return record.request_id >= 0; });
  }
  std::ranges::sort(requests, {}, &RequestRecord::request_id);
  return requests;
}

std::optional<RequestRecord> StepTrace::request(RequestId id) const {
  if (id < 0) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const RequestRecord& record = requests_[static_cast<size_t>(id) % requests_.size()];
  return record.request_id == id ? std::optional(record) : std::nullopt;
}

}  // namespace llmserve
