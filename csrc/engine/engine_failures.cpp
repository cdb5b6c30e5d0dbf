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
// about, and the others have nothing to do with it. Where there are other replicas its requests go
// on there, unless they have come from one for the same reason. A device that fails again and again
// does not get better, nor do books that are wrong: then the engine takes no more.
bool Engine::go_on_after(const std::exception& error) {
  const bool is_batch = std::exchange(is_executing_, false);
  const bool are_several = links_.listener != nullptr;
  executor_->abandon();
  is_stuck_ = false;
  if (is_batch && num_failed_steps_ + 1 < kMaxFailedSteps) {
    if (const auto* failure = dynamic_cast<const RankFailure*>(&error)) {
      ++num_failed_steps_;
      const std::vector<RequestId> failed_before = scheduler_->failed_before();
      replay(failure->rank());
      end_failed_before(error.what(), failed_before);
      return true;
    }
  }
  const bool is_device = dynamic_cast<const DeviceError*>(&error) != nullptr;
  if (!is_batch || is_device) ++num_failed_steps_;
  const bool is_last = num_failed_steps_ >= kMaxFailedSteps || executor_->has_left_rank();
  if (is_last) {
    std::vector<MovingRequest> taken_over;
    {
      const std::lock_guard lock(intake_mutex_);
      failure_ = error.what();
      for (Request& request : intake_.requests) taken_.push_back(std::move(request));
      intake_.requests.clear();
      intake_.tasks.clear();
      taken_over.swap(intake_.taken_over);
    }
    for (MovingRequest& moving : taken_over) enter(moving);
  }
  if (is_last && are_several) {
    links_.listener->note_stop(config_.parallel.replica, error.what());
    if (is_batch) leave(error.what());
  }
  if (is_batch && !is_last) {
    fail_batch(error.what(), is_device && are_several);
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

// Requests that could not be executed here either may be why.
void Engine::end_failed_before(const std::string& reason, std::span<const RequestId> ids) {
  if (ids.empty()) return;
  for (const RequestId id : ids) scheduler_->fail(id, reason);
  StepRecord record{.replica = config_.parallel.replica};
  give_out_failures(record, scheduler_->take_result());
}

void Engine::take_over(MovingRequest& moving) {
  const std::lock_guard lock(intake_mutex_);
  check_runs();
  const Request& request = moving.request.mapped().context.request;
  if (!request.params.logits_processors.empty())
    processors_[request.id] = request.params.logits_processors;
  for (const auto& sequence : moving.request.mapped().sequences)
    live_[request.id].insert(sequence->sample_index);
  intake_.taken_over.push_back(std::move(moving));
  intake_ready_.notify_one();
}

std::vector<RequestId> Engine::pending_aborts() const {
  const std::lock_guard lock(intake_mutex_);
  return intake_.aborts;
}

void Engine::enter(MovingRequest& moving) {
  const RequestId id = moving.request.key();
  if (moving.record) trace_.enter(*moving.record, clock_.now_us());
  recorder_.enter(id, moving.live);
  if (speculator_) speculator_->begin(moving.request.mapped().context.request);
  scheduler_->enter(std::move(moving.request));
}

// To other replicas; who finds no place there ends here.
void Engine::pass_on(std::vector<LeavingRequest> leaving, const std::string& reason) {
  std::vector<MovingRequest> moving;
  for (LeavingRequest& request : leaving) {
    const RequestId id = request.key();
    const auto& sequences = request.mapped().sequences;
    for (const auto& sequence : sequences) {
      executor_->forget(id, sequence->sample_index);
      if (speculator_)
        speculator_->forget(id, sequence->sample_index, sequence == sequences.back());
    }
    {
      const std::lock_guard lock(intake_mutex_);
      processors_.erase(id);
      live_.erase(id);
    }
    moving.push_back(
        {.request = std::move(request), .record = trace_.take(id), .live = recorder_.take(id)});
  }
  links_.listener->move(config_.parallel.replica, moving);
  for (MovingRequest& left : moving) {
    const RequestId id = left.request.key();
    enter(left);
    scheduler_->fail(id, reason);
  }
}

// With those that the scheduler has not seen.
void Engine::leave(const std::string& reason) {
  const int64_t now_us = clock_.now_us();
  for (; !taken_.empty(); taken_.pop_front()) {
    trace_.begin(taken_.front(), now_us);
    recorder_.begin(taken_.front());
    scheduler_->add(std::move(taken_.front()));
  }
  take_aborts();
  pass_on(scheduler_->leave(reason), reason);
}

void Engine::fail_batch(const std::string& reason, bool may_leave) {
  take_aborts();
  if (may_leave) {
    pass_on(scheduler_->leave_step(reason), reason);
  } else {
    scheduler_->fail_step(reason);
  }
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
  give_out(result.events);
}

void Engine::give_out(std::span<TokenEvent> events) {
  const std::lock_guard lock(events_mutex_);
  if (!is_given_up_) links_.events->push(events);
}

// Whatever the thread would have said of its requests, nobody knows. On the watch's thread.
void Engine::leave_thread(const std::string& reason) {
  std::vector<TokenEvent> events;
  {
    const std::lock_guard lock(intake_mutex_);
    failure_ = reason;
    intake_ = {};
    intake_.stop = true;
    for (const auto& [id, samples] : live_) {
      for (const int32_t sample : samples) {
        TokenEvent& event = events.emplace_back();
        event.request_id = id;
        event.sample_index = sample;
        event.finish_reason = FinishReason::kError;
        event.error = reason;
        event.is_request_finished = sample == *samples.rbegin();
      }
    }
    live_.clear();
  }
  if (links_.listener != nullptr) links_.listener->note_stop(config_.parallel.replica, reason);
  {
    const std::lock_guard lock(events_mutex_);
    is_given_up_ = true;
    ended_.notify_all();
    links_.events->push(events);
  }
  room_made_.notify_all();
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
