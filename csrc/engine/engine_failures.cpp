// What an engine does after a step that failed.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/mix.h"
#include "engine/engine.h"

namespace llmserve {
namespace {

constexpr int32_t kMaxFailedSteps = 3;  // in a row

}  // namespace

// A batch that could not be executed ends, however often: nobody knows which of its requests it was
// about, and the others have nothing to do with it. A device that fails again and again does not
// get better, nor do books that are wrong: then the engine takes no more.
bool Engine::go_on_after(const std::exception& error) {
  const bool is_batch = std::exchange(is_executing_, false);
  executor_->abandon();
  is_stuck_ = false;
  if (is_batch && num_failed_steps_ + 1 < kMaxFailedSteps) {
    if (const auto* failure = dynamic_cast<const RankFailure*>(&error)) {
      ++num_failed_steps_;
      replay(failure->rank());
      return true;
    }
  }
  const bool is_device = dynamic_cast<const DeviceError*>(&error) != nullptr;
  if (!is_batch || is_device) ++num_failed_steps_;
  const bool is_last = num_failed_steps_ >= kMaxFailedSteps;
  if (is_last) {
    const std::lock_guard lock(intake_mutex_);
    failure_ = error.what();
    for (Request& request : intake_.requests) taken_.push_back(std::move(request));
    intake_.requests.clear();
    intake_.tasks.clear();
  }
  if (is_last && links_.listener != nullptr)
    links_.listener->note_stop(config_.parallel.replica, error.what());
  if (is_batch && !is_last) {
    fail_batch(error.what());
  } else {
    fail_all(error.what());
  }
  flights_.clear();
  return !is_last;
}

// What ran is computed again, from the tokens that it has: those that come are the same.
void Engine::replay(int rank) {
  {
    const std::lock_guard lock(metrics_mutex_);
    ++metrics_.num_rank_failures;
  }
  take_aborts();
  News lost = RankLost{.rank = rank};
  take(lost);
}

void Engine::fail_batch(const std::string& reason) {
  take_aborts();
  scheduler_->fail_step(reason);
  give_out_failures(flights_[0].record, scheduler_->take_result());
}

void Engine::fail_all(const std::string& reason) {
  scheduler_->fail(reason);
  StepResult result = scheduler_->take_result();
  fail_unseen(reason, result.events);
  StepRecord record{.replica = config_.parallel.replica};  // of a step that has none
  give_out_failures(record, std::move(result));
}

void Engine::give_out_failures(StepRecord& record, StepResult result) {
  let_go(result.events);
  keep_books(record, result);
  links_.events->push(result.events);
}

// The last events of requests that the scheduler has not seen. It is not asked to take them in now:
// it may have failed over the first, which has left its prompt with it, but not its numbers.
void Engine::fail_unseen(const std::string& reason, std::vector<TokenEvent>& events) {
  for (const Request& request : taken_) {
    const auto is_its = [&](const TokenEvent& event) { return event.request_id == request.id; };
    if (std::ranges::any_of(events, is_its)) continue;
    for (int32_t i = 0; i < request.params.n; ++i) {
      TokenEvent& event = events.emplace_back();
      event.request_id = request.id;
      event.sample_index = i;
      event.finish_reason = FinishReason::kError;
      event.error = reason;
      event.seed = sample_seed(request.seed, i);
      event.times.arrival_us = request.arrival_us;
      event.is_request_finished = i == request.params.n - 1;
    }
  }
  taken_.clear();
}

}  // namespace llmserve
