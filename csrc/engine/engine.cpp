#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/mix.h"
#include "core/pin_thread.h"
#include "core/start_thread.h"
#include "engine/kv_mover.h"
#include "engine/phase_timer.h"
#include "engine/pooler.h"
#include "engine/worker_plan.h"
#include "sampling/logits_processor.h"

namespace llmserve {
namespace {

constexpr size_t kNumTracedSteps = 4096;  // a minute or more of decode
constexpr size_t kNumTracedRequests = 4096;
constexpr int64_t kMaxBackgroundUs = 500'000;  // between two steps
// Who makes an engine mostly has a request for it, which background work would keep waiting.
constexpr std::chrono::milliseconds kIdleBeforeWork{20};

}  // namespace

std::string describe_full_queue(int64_t num_waiting, int64_t num_more, int64_t limit) {
  return concat("the queue is full: ", num_waiting, " requests wait, ", num_more,
                " more were to come and max_num_queued_reqs is ", limit,
                num_more > limit ? "; so many never have room: send fewer at once or raise it"
                                 : "; retry later or raise it");
}

Engine::Engine(const EngineConfig& config, std::optional<Vocabulary> vocabulary,
               std::unique_ptr<Executor> executor,
               const std::optional<Vocabulary>& draft_vocabulary, EngineLinks links)
    : config_(config),
      vocab_size_(executor->vocab_size()),
      hidden_size_(executor->hidden_size()),
      vocabulary_(std::move(vocabulary)),
      executor_(std::move(executor)),
      description_(executor_->description()),
      warning_(executor_->warning()),
      trace_(kNumTracedSteps, kNumTracedRequests, config_.parallel.replica),
      memory_use_(executor_->memory_use()),
      links_(links),
      block_events_(int64_t{config_.cache.num_blocks} + config_.cache.lower_tier.num_blocks),
      watch_(executor_->patience(), [this](const std::string& reason) { leave_thread(reason); }) {
  config_.validate();
  if (config_.speculation.is_on()) {
    DraftModel* const draft = executor_->draft_model();
    speculator_ = std::make_unique<Speculator>(
        config_.speculation,
        DrafterContext{.config = config_.speculation,
                       .vocab_size = vocab_size_,
                       .max_exact_rows = executor_->max_exact_rows(),
                       .model = draft,
                       .head = executor_->head_model(),
                       .vocabulary_map = map_vocabularies(config_.speculation, vocabulary_,
                                                          vocab_size_, draft_vocabulary, draft)},
        config_.scheduler.max_model_len, executor_->make_drafter());
  }
  SchedulerConfig scheduler = config_.scheduler;
  scheduler.max_num_queued_reqs = 0;  // add_requests() keeps the bound and tells the caller
  scheduler_ = std::make_unique<Scheduler>(
      scheduler, config_.cache, vocabulary_ ? &*vocabulary_ : nullptr, clock_,
      SchedulerOptions{.max_in_flight = executor_->max_in_flight(),
                       .runs_ahead = executor_->runs_ahead(),
                       .limits = {.vocab_size = vocab_size_,
                                  .hidden_size = hidden_size_,
                                  .max_logprobs = config_.max_logprobs,
                                  .must_make_text = true,
                                  .has_adapters = false,
                                  .has_peers = executor_->can_hand_over()},
                       .wanted_layers = speculator_ ? speculator_->drafter().wanted_layers()
                                                    : std::vector<int32_t>()});
  if (links_.listener != nullptr) scheduler_->tell_blocks(true);
  executor_->report_to([this](News news) { give_news(std::move(news)); });
  scheduler_->fill_metrics(metrics_);
  executor_->fill_metrics(metrics_);
  thread_ = start_thread([this] { run(); });
}

Engine::~Engine() { close(); }

void Engine::check(std::span<const Request* const> requests) const {
  PlaceInCall place{.num_requests = std::ssize(requests)};
  for (const Request* request : requests) {
    scheduler_->admission().check(*request, place);
    check_hand_over(*request);
    ++place.index;
  }
}

void Engine::check_hand_over(const Request& request) const {
  if ((request.send_to || request.receive_from) && !mover())
    throw InvalidArgument("send_to, receive_from: call open_hand_over() first");
}

std::vector<RequestId> Engine::add_requests(std::vector<Request> requests) {
  admit(requests);
  std::vector<RequestId> ids;
  ids.reserve(requests.size());
  std::unique_lock lock(intake_mutex_);
  check_runs();
  if (std::ssize(requests) > room()) {
    const int32_t limit = config_.scheduler.max_num_queued_reqs;
    throw QueueFull(describe_full_queue(num_queued(), std::ssize(requests), limit));
  }
  for (Request& request : requests) {
    request.id = next_id_ + std::ssize(ids);
    ids.push_back(request.id);
  }
  queue(requests);
  lock.unlock();  // first: who wakes takes it
  intake_ready_.notify_one();
  return ids;
}

void Engine::add_numbered(std::vector<Request>& requests) {
  admit(requests);
  std::unique_lock lock(intake_mutex_);
  check_runs();
  queue(requests);
  lock.unlock();
  intake_ready_.notify_one();
}

// All that takes time, before the lock is.
void Engine::admit(std::vector<Request>& requests) const {
  const int64_t arrival_us = clock_.now_us();
  PlaceInCall place{.num_requests = std::ssize(requests)};
  for (Request& request : requests) {
    scheduler_->admission().admit(request, place);
    check_hand_over(request);
    ++place.index;
    if (request.pooling) {
      request.pooled = make_pooled_output(*request.pooling, std::ssize(request.prompt_token_ids),
                                          hidden_size_, vocab_size_);
    }
    request.arrival_us = arrival_us;
    request.has_drafter = config_.speculation.is_on() && Speculator::can_draft(request);
  }
}

// The intake's lock is held, in this one and the next three.
void Engine::queue(std::vector<Request>& requests) {
  if (is_released_ != std::array<bool, kNumMemoryParts>{})
    throw InvalidArgument("the engine is asleep; call wake_up() first");
  for (Request& request : requests) {
    next_id_ = request.id + 1;
    request.seed = request.params.seed ? *request.params.seed
                                       : mix64(config_.seed, static_cast<uint64_t>(request.id));
    if (!request.params.logits_processors.empty())
      processors_[request.id] = request.params.logits_processors;
    std::set<int32_t>& samples = live_[request.id];
    for (int32_t i = 0; i < request.params.n; ++i) samples.insert(i);
    intake_.requests.push_back(std::move(request));
  }
}

void Engine::check_runs() const {
  if (!failure_.empty()) throw DeviceError("the engine has stopped: " + failure_);
  if (intake_.stop) throw InvalidArgument("the engine is closed; make a new one");
}

int64_t Engine::num_queued() const {
  return metrics().num_requests_waiting + std::ssize(intake_.requests) +
         std::ssize(intake_.taken_over);
}

// For how many requests.
int64_t Engine::room() const {
  const int32_t limit = config_.scheduler.max_num_queued_reqs;
  return limit == 0 ? std::numeric_limits<int64_t>::max()
                    : std::max<int64_t>(limit - num_queued(), 0);
}

int64_t Engine::num_waiting() const {
  const std::lock_guard lock(intake_mutex_);
  return num_queued();
}

int64_t Engine::wait_for_room(double timeout_s) {
  std::unique_lock lock(intake_mutex_);
  room_made_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return room() > 0; });
  return room();
}

void Engine::abort(RequestId id) {
  const std::lock_guard lock(intake_mutex_);
  intake_.aborts.push_back(id);
  intake_ready_.notify_one();
  const auto found = processors_.find(id);
  if (found == processors_.end()) return;
  for (const auto& processor : found->second) processor->cancel();
}

void Engine::give_news(News news) {
  const std::lock_guard lock(intake_mutex_);
  intake_.news.push_back(std::move(news));
  intake_ready_.notify_one();
}

void Engine::reset_prefix_cache() {
  const std::lock_guard lock(intake_mutex_);
  intake_.reset_prefix_cache = true;
  intake_ready_.notify_one();
}

void Engine::balance_experts(const ExpertBalanceOptions& options) {
  run_on_thread(std::packaged_task<void()>([this, &options] {
    while (scheduler_->num_in_flight() > 0) finish_step();
    std::shared_ptr<const ExpertBalancer> balancer = executor_->balance_experts(options);
    const std::lock_guard lock(metrics_mutex_);
    expert_balancer_ = std::move(balancer);
  }));
}

// Returns when it is done, with its error if it has one.
void Engine::run_on_thread(std::packaged_task<void()> task) {
  std::future<void> done = task.get_future();
  {
    const std::lock_guard lock(intake_mutex_);
    check_runs();
    intake_.tasks.push_back(std::move(task));
    intake_ready_.notify_one();
  }
  try {
    done.get();
  } catch (const std::future_error&) {  // dropped, since the engine stopped
    const std::lock_guard lock(intake_mutex_);
    check_runs();
    throw;
  }
}

void Engine::keep_memory_use() {
  const MemoryUse use = executor_->memory_use();
  const std::lock_guard lock(metrics_mutex_);
  memory_use_ = use;
}

MemoryUse Engine::memory_use() const {
  const std::lock_guard lock(metrics_mutex_);
  return memory_use_;
}

std::string Engine::failure() const {
  const std::lock_guard lock(intake_mutex_);
  return failure_;
}

EngineMetrics Engine::metrics() const {
  const std::lock_guard lock(metrics_mutex_);
  EngineMetrics metrics = metrics_;
  if (mover_) mover_->fill_metrics(metrics);
  return metrics;
}

void Engine::run() {
  const ThreadShare threads = thread_share(config_, 0);
  if (threads.first > 0) pin_thread_to(threads.first, threads.count);
  pin_thread(0);
  const BeatScope scope(watch_.beat());
  bool goes_on = true;
  while (goes_on) {
    try {
      while (take_in()) {
        const EngineWatch::Work work(watch_);
        step();
      }
      goes_on = false;
    } catch (const std::exception& error) {  // the only catch of the loop
      goes_on = go_on_after(error);
    }
  }
  const std::lock_guard lock(events_mutex_);
  has_ended_ = true;
  ended_.notify_all();
}

// Waits for something to do and hands it to the scheduler; false when the engine is to stop.
bool Engine::take_in() {
  std::unique_lock lock(intake_mutex_);
  const auto has_news = [&] { return !intake_.is_empty(); };
  if (!scheduler_->has_work()) {
    if (has_background_work_ || has_idle_work_)
      intake_ready_.wait_for(lock, kIdleBeforeWork, has_news);
    while (has_background_work_ && !has_news()) {
      lock.unlock();
      do_background_work(0);
      lock.lock();
    }
    while (has_idle_work_ && !has_news()) {
      lock.unlock();
      has_idle_work_ = executor_->do_idle_work();
      lock.lock();
    }
    intake_ready_.wait(lock, has_news);
  } else if (is_stuck_) {  // nothing could run: until news or the policy's time
    const int64_t wake_us = scheduler_->wake_us();
    if (wake_us == SchedulingPolicy::kNever) {
      intake_ready_.wait(lock, has_news);
    } else {
      intake_ready_.wait_for(lock, std::chrono::microseconds(wake_us - clock_.now_us()), has_news);
    }
  }
  if (intake_.stop) return false;
  if (intake_.is_empty()) return true;
  // Under the lock, so that add_requests() counts each request exactly once against the queue's
  // bound.
  Intake taken = std::exchange(intake_, {});
  taken_.assign(std::move_iterator(taken.requests.begin()),
                std::move_iterator(taken.requests.end()));
  const int64_t now_us = clock_.now_us();
  for (; !taken_.empty(); taken_.pop_front()) {
    trace_.begin(taken_.front(), now_us);
    recorder_.begin(taken_.front());
    if (speculator_) speculator_->begin(taken_.front());
    scheduler_->add(std::move(taken_.front()));
  }
  for (MovingRequest& moving : taken.taken_over) enter(moving);
  for (News& news : taken.news) take(news);
  for (const RequestId id : taken.aborts) scheduler_->abort(id);
  if (taken.reset_prefix_cache) {
    scheduler_->reset_prefix_cache();
    tell_blocks();
    if (speculator_) speculator_->reset();
  }
  {
    const std::lock_guard metrics_lock(metrics_mutex_);
    scheduler_->fill_metrics(metrics_);
  }
  lock.unlock();
  for (auto& task : taken.tasks) task();  // keeps its exception for who waits
  return true;
}

void Engine::take(News& news) {
  if (std::holds_alternative<RankLost>(news)) {  // what was in flight went with it
    executor_->abandon();
    flights_.clear();
  }
  scheduler_->take(std::move(news));
}

// Where several steps may be in flight, the last is on its way before the first is waited for. An
// empty plan says that nothing can go ahead of that one.
void Engine::step() {
  begin_step();
  Flight& newest = flights_.newest();
  const bool is_empty = newest.plan->is_empty();
  is_stuck_ = is_empty && scheduler_->num_in_flight() == 1;
  if (is_empty && !is_stuck_) {  // nobody waited in it for anything but the step in flight
    std::erase_if(newest.record.decisions,
                  [](const Decision& d) { return d.kind != DecisionKind::kPreempted; });
  }
  if (is_empty) finish_oldest();
  while (scheduler_->num_in_flight() >= scheduler_->max_in_flight()) finish_step();
}

// Steps in flight that are not empty.
int32_t Engine::num_busy() {
  int32_t count = 0;
  for (int32_t i = 0; i < flights_.size(); ++i)
    if (!flights_[i].plan->is_empty()) ++count;
  return count;
}

// With the empty ones behind it.
void Engine::finish_oldest() {
  bool has_finished = false;
  while (scheduler_->num_in_flight() > 0) {
    const bool has_work = flights_.oldest().plan->has_work();
    if (has_work && has_finished) return;
    has_finished |= has_work;
    finish_step();
  }
}

void Engine::draft(StepRecord& record) {
  draft_decisions_.clear();
  const PhaseTimer timer(clock_, record.draft_us);
  speculator_->propose(
      scheduler_->book().running(),
      [this](DraftReady draft) { scheduler_->take(std::move(draft)); }, draft_decisions_);
}

// What the step's guesses came to, for the next ones.
void Engine::note_drafts(StepRecord& record, const StepResult& result) {
  draft_us_ += record.draft_us;
  speculator_->note_step(record.num_tokens, record.num_prefill_tokens, record.execute_us);
  speculator_->note_outcomes(result.drafts);
  for (const DraftOutcome& outcome : result.drafts) {
    record.num_draft_tokens += outcome.num_drafted + outcome.num_others;
    record.num_accepted_tokens += outcome.num_accepted;
  }
  for (const TokenEvent& event : result.events) speculator_->take_output(event);
  if (std::string notice = speculator_->take_notice(); !notice.empty()) {
    const std::lock_guard lock(metrics_mutex_);
    notice_ = std::move(notice);
  }
}

void Engine::begin_step() {
  has_idle_work_ = true;
  Flight& next = flights_.next();
  StepRecord& record = next.record;
  record = {.replica = config_.parallel.replica,
            .start_us = clock_.now_us(),
            .decisions = std::move(record.decisions)};
  if (speculator_) draft(record);
  {
    const PhaseTimer timer(clock_, record.schedule_us);
    next.plan = &scheduler_->schedule();
  }
  flights_.launch();
  const StepPlan& plan = *next.plan;
  record.step_id = plan.step_id;
  record.num_sequences = plan.num_sequences();
  record.num_tokens = plan.num_tokens();
  record.num_prefill_tokens = plan.num_prefill_tokens;
  record.num_in_flight = num_busy();
  scheduler_->take_decisions(record.decisions);
  record.decisions.insert(record.decisions.end(), draft_decisions_.begin(), draft_decisions_.end());
  if (!plan.has_work()) return;
  const PhaseTimer timer(clock_, record.execute_us);
  is_executing_ = true;
  executor_->launch(plan);
  is_executing_ = false;
}

void Engine::finish_step() {
  // At what a device's memory is in use for, which costs a few calls of its driver.
  constexpr int64_t kStepsBetweenLooks = 256;
  Flight& oldest = flights_.oldest();
  StepRecord& record = oldest.record;
  static const SampledTokens kNothing;
  const SampledTokens* tokens = &kNothing;
  if (oldest.plan->has_work()) {
    const PhaseTimer timer(clock_, record.execute_us);
    is_executing_ = true;
    {
      const PhaseTimer wait_timer(clock_, record.wait_us);
      tokens = &executor_->wait();
    }
    is_executing_ = false;
    if (!oldest.plan->wanted_layers.empty()) {
      const PhaseTimer draft_timer(clock_, record.draft_us);
      speculator_->take_states(*oldest.plan, *executor_->wanted_states());
    }
    take_aborts();
  }
  StepResult* result = nullptr;
  {
    const PhaseTimer timer(clock_, record.commit_us);
    result = &scheduler_->commit(*tokens);
    flights_.retire();
  }
  num_failed_steps_ = 0;
  if (speculator_) note_drafts(record, *result);
  if (record.num_sequences > 0) recorder_.record(record);
  let_go(result->events);
  if (!scheduler_->has_unfinished()) {
    executor_->check_idle();
    check_internal(!speculator_ || speculator_->num_sequences() == 0,
                   "no guesses are kept of an ended sequence");
  }
  if (!scheduler_->has_unfinished() || record.step_id % kStepsBetweenLooks == 0) keep_memory_use();
  keep_books(record, *result);
  give_out(result->events);
  scheduler_->recycle(*result);
  // As much time as the step took: no stream falls below half its pace, and a caller whose next
  // request always comes at once is not left with slow steps for ever.
  if (has_background_work_) do_background_work(std::min(record.execute_us, kMaxBackgroundUs));
}

// At least one, and then as long as the time lasts.
void Engine::do_background_work(int64_t duration_us) {
  const int64_t end_us = clock_.now_us() + duration_us;
  do {
    has_background_work_ = executor_->do_background_work();
  } while (has_background_work_ && clock_.now_us() < end_us);
  keep_memory_use();
}

// Aborts that came during the step end with its commit: a request whose logits processor was told
// to give up has been aborted, not failed. One that came with its request waits for it.
void Engine::take_aborts() {
  const std::lock_guard lock(intake_mutex_);
  const RequestId first_unseen = intake_.requests.empty() ? next_id_ : intake_.requests.front().id;
  std::erase_if(intake_.aborts, [&](RequestId id) {
    const bool is_seen =
        id < first_unseen &&
        std::ranges::none_of(
            intake_.taken_over, [&](const auto& moving) { return moving.request.key() == id; });
    if (is_seen) scheduler_->abort(id);
    return is_seen;
  });
}

void Engine::let_go(std::span<const TokenEvent> events) {
  for (const TokenEvent& event : events) {
    if (event.finish_reason == FinishReason::kNone) continue;
    executor_->forget(event.request_id, event.sample_index);
    if (speculator_)
      speculator_->forget(event.request_id, event.sample_index, event.is_request_finished);
    const std::lock_guard lock(intake_mutex_);
    if (!event.is_request_finished) {
      if (const auto found = live_.find(event.request_id); found != live_.end())
        found->second.erase(event.sample_index);
      continue;
    }
    live_.erase(event.request_id);
    processors_.erase(event.request_id);
  }
}

// Before the events go out: who sees a request's last event finds it counted.
void Engine::keep_books(StepRecord& record, const StepResult& result) {
  tell_blocks();
  {
    const std::lock_guard lock(metrics_mutex_);
    scheduler_->fill_metrics(metrics_);
    executor_->fill_metrics(metrics_);
    metrics_.draft_us = draft_us_;
    record.num_running = metrics_.num_requests_running;
    record.num_waiting = metrics_.num_requests_waiting;
    record.num_blocks_used = metrics_.num_blocks_used;
  }
  if (!record.decisions.empty()) trace_.record(record);
  const int64_t now_us = clock_.now_us();
  trace_.update(result, now_us);
  recorder_.update(result, now_us);
  // Past the intake's lock, so that wait_for_room() does not miss it between its look and its
  // sleep.
  {
    const std::lock_guard lock(intake_mutex_);
  }
  room_made_.notify_all();
  if (links_.listener != nullptr) links_.listener->take_result(config_.parallel.replica, result);
}

void Engine::close() {
  const std::lock_guard close_lock(close_mutex_);
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(intake_mutex_);
    intake_.stop = true;
    intake_ready_.notify_one();
    for (const auto& [id, processors] : processors_)
      for (const auto& processor : processors) processor->cancel();
  }
  executor_->cancel();
  {
    std::unique_lock lock(events_mutex_);
    ended_.wait(lock, [this] { return has_ended_ || is_given_up_; });
    has_left_thread_ = !has_ended_;
  }
  if (has_left_thread_) {
    thread_.detach();
    return;
  }
  thread_.join();
  watch_.stop();
  {
    const std::lock_guard lock(intake_mutex_);
    intake_.tasks.clear();
  }
  {
    const std::lock_guard lock(metrics_mutex_);
    if (mover_) mover_->fill_metrics(metrics_);  // what it came to
    mover_.reset();
  }
  if (executor_ && executor_->has_left_rank())
    static_cast<void>(executor_.release());  // a thread may still use it
  executor_.reset();
}

}  // namespace llmserve
