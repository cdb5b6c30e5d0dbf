#include "engine/engine.h"

#include <chrono>
#include <utility>

#include "core/error.h"
#include "core/mix.h"

namespace llmserve {
namespace {

constexpr size_t kTraceCapacity = 4096;  // steps: a minute or more of decode

// Adds the time since its construction to a duration.
class PhaseTimer {
 public:
  PhaseTimer(const Clock& clock, int64_t& duration_us)
      : clock_(clock), duration_us_(duration_us), start_us_(clock.now_us()) {}
  ~PhaseTimer() { duration_us_ += clock_.now_us() - start_us_; }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  const Clock& clock_;
  int64_t& duration_us_;
  const int64_t start_us_;
};

}  // namespace

Engine::Engine(const EngineConfig& config, std::optional<Vocabulary> vocabulary,
               std::unique_ptr<Executor> executor)
    : config_(config),
      vocab_size_(executor->vocab_size()),
      vocabulary_(std::move(vocabulary)),
      executor_(std::move(executor)),
      description_(executor_->description()),
      memory_use_(executor_->memory_use()),
      trace_(kTraceCapacity) {
  config_.validate();
  SchedulerConfig scheduler = config_.scheduler;
  scheduler.max_num_queued_reqs = 0;  // add_request() keeps the bound, where the caller can be told
  scheduler_ = std::make_unique<Scheduler>(scheduler, config_.cache,
                                           vocabulary_ ? &*vocabulary_ : nullptr, clock_);
  scheduler_->fill_metrics(metrics_);
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() { close(); }

void Engine::validate(const Request& request) const {
  request.params.validate();
  for (const int32_t id : request.prompt_token_ids) {
    if (id < 0 || id >= vocab_size_) {
      throw InvalidArgument(
          concat("prompt token id ", id, " is outside the vocabulary [0, ", vocab_size_, ")"));
    }
  }
  if (request.params.logprobs.value_or(0) > config_.max_logprobs) {
    throw InvalidArgument(concat("logprobs must be at most max_logprobs=", config_.max_logprobs,
                                 ", got ", *request.params.logprobs,
                                 "; raise max_logprobs of the engine"));
  }
  if (request.params.detokenize && !vocabulary_) {
    throw InvalidArgument("this engine has no tokenizer: pass detokenize=False and read token_ids");
  }
  scheduler_->check_request(request);
}

RequestId Engine::add_request(Request request, bool is_streamed) {
  validate(request);
  request.arrival_us = clock_.now_us();
  const std::lock_guard lock(intake_mutex_);
  if (!failure_.empty()) throw DeviceError("the engine has stopped: " + failure_);
  if (intake_.stop) throw InvalidArgument("the engine is closed; make a new one");
  if (!has_room()) {
    throw QueueFull(concat("the queue is full: ", num_queued(),
                           " requests wait and max_num_queued_reqs is ",
                           config_.scheduler.max_num_queued_reqs, "; retry later or raise it"));
  }
  request.id = next_id_++;
  request.seed = request.params.seed ? *request.params.seed
                                     : mix64(config_.seed, static_cast<uint64_t>(request.id));
  if (!is_streamed) events_.hold_until_finished(request.id);
  intake_.requests.push_back(std::move(request));
  intake_ready_.notify_one();
  return next_id_ - 1;
}

// The intake's lock is held, here and below.
int64_t Engine::num_queued() const {
  return metrics().num_requests_waiting + std::ssize(intake_.requests);
}

bool Engine::has_room() const {
  const int32_t limit = config_.scheduler.max_num_queued_reqs;
  return limit == 0 || num_queued() < limit;
}

bool Engine::wait_for_room(double timeout_s) {
  std::unique_lock lock(intake_mutex_);
  return room_made_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                             [&] { return has_room(); });
}

void Engine::abort(RequestId id) {
  const std::lock_guard lock(intake_mutex_);
  intake_.aborts.push_back(id);
  intake_ready_.notify_one();
}

void Engine::reset_prefix_cache() {
  const std::lock_guard lock(intake_mutex_);
  intake_.reset_prefix_cache = true;
  intake_ready_.notify_one();
}

EngineMetrics Engine::metrics() const {
  const std::lock_guard lock(metrics_mutex_);
  return metrics_;
}

void Engine::run() {
  try {
    while (take_in()) step();
  } catch (const std::exception& error) {  // the only catch of the loop
    fail(error.what());
  }
}

// Waits for something to do and hands it to the scheduler; false when the engine is to stop.
bool Engine::take_in() {
  std::unique_lock lock(intake_mutex_);
  const auto has_news = [&] { return !intake_.is_empty(); };
  if (!scheduler_->has_unfinished()) {
    intake_ready_.wait(lock, has_news);
  } else if (record_.num_sequences == 0) {  // nothing could run: until news or the policy's time
    const int64_t wake_us = scheduler_->wake_us();
    if (wake_us == SchedulingPolicy::kNever) {
      intake_ready_.wait(lock, has_news);
    } else {
      intake_ready_.wait_for(lock, std::chrono::microseconds(wake_us - clock_.now_us()), has_news);
    }
  }
  if (intake_.stop) return false;
  if (intake_.is_empty()) return true;
  // Under the lock, so that add_request() counts each request exactly once against the queue's
  // bound.
  Intake taken = std::exchange(intake_, {});
  for (Request& request : taken.requests) scheduler_->add(std::move(request));
  for (const RequestId id : taken.aborts) scheduler_->abort(id);
  if (taken.reset_prefix_cache) scheduler_->reset_prefix_cache();
  const std::lock_guard metrics_lock(metrics_mutex_);
  scheduler_->fill_metrics(metrics_);
  return true;
}

void Engine::step() {
  record_ = {.start_us = clock_.now_us(), .decisions = std::move(record_.decisions)};
  const StepPlan* plan = nullptr;
  {
    const PhaseTimer timer(clock_, record_.schedule_us);
    plan = &scheduler_->schedule();
  }
  record_.step_id = plan->step_id;
  record_.num_sequences = static_cast<int32_t>(plan->sequences.size());
  record_.num_tokens = plan->num_tokens;
  record_.num_prefill_tokens = plan->num_prefill_tokens;
  record_.decisions = plan->decisions;
  static const SampledTokens kNothing;
  const SampledTokens* tokens = &kNothing;
  if (!plan->is_empty()) {
    const PhaseTimer timer(clock_, record_.execute_us);
    tokens = &executor_->execute(*plan);
  }
  const StepResult* result = nullptr;
  {
    const PhaseTimer timer(clock_, record_.commit_us);
    result = &scheduler_->commit(*tokens);
  }
  keep_books();
  events_.push(result->events);
}

// Before the events go out: who sees a request's last event finds it counted.
void Engine::keep_books() {
  if (record_.num_sequences > 0) trace_.record(record_);
  {
    const std::lock_guard lock(metrics_mutex_);
    scheduler_->fill_metrics(metrics_);
  }
  // Past the intake's lock, so that wait_for_room() does not miss it between its look and its sleep.
  { const std::lock_guard lock(intake_mutex_); }
  room_made_.notify_all();
}

// A step that failed as a whole ends every request with an error event; the engine takes no more.
void Engine::fail(const std::string& reason) {
  std::vector<Request> unseen;
  {
    const std::lock_guard lock(intake_mutex_);
    failure_ = reason;
    unseen = std::move(intake_.requests);
  }
  for (Request& request : unseen) scheduler_->add(std::move(request));
  scheduler_->fail(reason);
  record_.num_sequences = 0;
  keep_books();
  events_.push(scheduler_->take_events());
}

void Engine::close() {
  const std::lock_guard close_lock(close_mutex_);
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(intake_mutex_);
    intake_.stop = true;
    intake_ready_.notify_one();
  }
  thread_.join();
  executor_.reset();
  events_.close();
}

}  // namespace llmserve
