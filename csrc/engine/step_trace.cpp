#include "engine/step_trace.h"

#include <algorithm>
#include <iterator>

#include "core/prefetch.h"

namespace llmserve {

void StepTrace::record(const StepRecord& step) {
  if (steps_.empty()) return;
  const std::lock_guard lock(mutex_);
  for (const Decision& decision : step.decisions) {
    if (decision.kind != DecisionKind::kAdmitted) continue;
    RequestRecord& record = requests_[static_cast<size_t>(decision.request_id) % requests_.size()];
    if (record.request_id == decision.request_id && record.scheduled_us == 0)
      record.scheduled_us = step.start_us;
  }
  steps_[num_recorded_++ % steps_.size()] = step;  // reuses the old record's memory
}

void StepTrace::begin(const Request& request, int64_t now_us) {
  const std::lock_guard lock(mutex_);
  requests_[static_cast<size_t>(request.id) % requests_.size()] = {
      .request_id = request.id,
      .arrival_us = request.arrival_us,
      .queued_us = now_us,
      .num_samples = request.params.n,
      .num_prompt_tokens = static_cast<int64_t>(request.prompt_token_ids.size())};
}

void StepTrace::update(std::span<const TokenEvent> events, int64_t now_us) {
  if (events.empty()) return;
  const std::lock_guard lock(mutex_);
  for (const TokenEvent& event : events)
    prefetch(requests_[static_cast<size_t>(event.request_id) % requests_.size()]);
  for (const TokenEvent& event : events) {
    RequestRecord& record = requests_[static_cast<size_t>(event.request_id) % requests_.size()];
    if (record.request_id != event.request_id) continue;  // a later one has its place
    if (record.scheduled_us == 0) record.scheduled_us = event.times.scheduled_us;
    if (record.first_token_us == 0) record.first_token_us = event.times.first_token_us;
    record.last_token_us = std::max(record.last_token_us, event.times.last_token_us);
    record.num_preemptions = std::max(record.num_preemptions, event.num_preemptions);
    record.num_cached_tokens = std::max(record.num_cached_tokens, event.num_cached_tokens);
    record.num_generation_tokens += static_cast<int64_t>(event.token_ids.size());
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
