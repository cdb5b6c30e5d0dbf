// The engine: one C++ thread that takes requests in, steps the scheduler and the executor, and puts
// events out. It never takes Python's GIL. Every public method may be called from any thread.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/engine_config.h"
#include "api/engine_metrics.h"
#include "api/token_event.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/flight_ring.h"
#include "engine/block_event_feed.h"
#include "engine/engine_watch.h"
#include "engine/event_buffer.h"
#include "engine/exchange_log.h"
#include "engine/executor.h"
#include "engine/metrics_recorder.h"
#include "engine/step_trace.h"
#include "scheduler/scheduler.h"
#include "speculation/speculator.h"
#include "text/vocabulary.h"

namespace llmserve {

class KvHost;   // comm/kv_host.h
class KvMover;  // engine/kv_mover.h
struct HandOverOptions;
struct KvPeer;

// Too many requests wait: the same call may succeed later (in Python a subclass of
// ResourceExhausted, HTTP 429).
class QueueFull : public ResourceExhausted {
 public:
  using ResourceExhausted::ResourceExhausted;
};

// A request on its way from one engine to another, with what has been noted of it.
struct MovingRequest {
  LeavingRequest request;
  std::optional<RequestRecord> record;  // of its trace
  MetricsRecorder::LiveRequest live;
};

// Whom one of several engines (engine_group.h) tells what it does. The calls come from its thread,
// which holds none of its locks.
class EngineListener {
 public:
  virtual ~EngineListener() = default;
  // Before the events of a step go out.
  virtual void take_result(int32_t replica, const StepResult& result) = 0;
  // What came into its prefix cache and what left it, from the start on.
  virtual void take_blocks(int32_t replica, const std::vector<BlockEvent>& events) = 0;
  // It has stopped, and takes no more requests.
  virtual void note_stop(int32_t replica, const std::string& reason) = 0;
  // It could not execute them. What other replicas do not take stays in `requests`.
  virtual void move(int32_t replica, std::vector<MovingRequest>& requests) = 0;
};

// What an engine's owner gives it. Both outlive it.
struct EngineLinks {
  EventBuffer* events = nullptr;       // where its events go; its owner closes it
  EngineListener* listener = nullptr;  // null: there is one engine
};

// What QueueFull says, of a queue with a bound.
std::string describe_full_queue(int64_t num_waiting, int64_t num_more, int64_t limit);

class Engine {
 public:
  // Starts the thread. Without a vocabulary requests must not ask for text. draft_vocabulary: of a
  // draft model that has another one than the target. Throws what Speculator's constructor throws,
  // and InvalidArgument where vocabularies are wanted that are not there.
  Engine(const EngineConfig& config, std::optional<Vocabulary> vocabulary,
         std::unique_ptr<Executor> executor, const std::optional<Vocabulary>& draft_vocabulary,
         EngineLinks links);
  ~Engine();  // close()
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws unless all of these could be added to an empty queue, as add_requests() would: the
  // message says by its index which could not, the first. Nothing is added.
  void check(std::span<const Request* const> requests) const;

  // Checks the requests, gives each its id and resolved seed, and queues all of them at once, so
  // that the same step finds them, or none. Throws InvalidArgument, QueueFull, or the error that
  // stopped the engine. A request that is not streamed has a single event a sequence, at its end.
  std::vector<RequestId> add_requests(std::vector<Request> requests);
  // The same of requests that have their ids, which are larger than those of earlier calls, and
  // takes them whatever the queue's bound. They are the caller's still where it throws.
  void add_numbered(std::vector<Request>& requests);
  // Takes one that another replica could not execute; it goes on with what it has. Throws the error
  // that stopped the engine, or InvalidArgument once it is closed: the request is the caller's
  // then.
  void take_over(MovingRequest& request);
  // Requests whose abort() has come and is not taken in.
  std::vector<RequestId> pending_aborts() const;
  // Requests that wait, those on their way to the scheduler among them.
  int64_t num_waiting() const;

  // Waits until the queue may have room, and returns for how many requests. Returns 0 at the
  // timeout. The wait also lasts that long where the engine was closed or has stopped.
  int64_t wait_for_room(double timeout_s);

  // The request's sequences end with FinishReason::kAbort after the running step. Unknown and
  // finished ids are ignored.
  void abort(RequestId id);

  // Gives memory back while nobody needs the model: that of the KV cache (level 1), and also that
  // of weights and workspace (level 2). The prefix cache is forgotten. Only an idle engine sleeps,
  // and add_requests() refuses until the engine is awake. Returns when the memory is back. Throws
  // InvalidArgument for another level or with unfinished requests: nothing changed then.
  void sleep(int32_t level);
  // Takes the memory of these parts again. Weights come from the checkpoint as it is now. The
  // engine is awake once all parts are there. Throws what loading throws; the call may then be
  // repeated.
  void wake_up(const std::vector<MemoryPart>& parts);
  bool is_sleeping() const;

  // Fewer sequences than max_num_seqs run at once, or as many again, from the next step on. Those
  // that run go on. Throws InvalidArgument for less than one, and as add_requests() once it has
  // failed.
  void allow_seats(int32_t num_seats);

  // Forgets every cached block that no sequence refers to, after the running step.
  void reset_prefix_cache();

  // What came into the prefix cache and what left it, after the batch `sequence`; none where
  // batches are missing, or nobody has taken a snapshot for long: then take one.
  std::optional<std::vector<BlockEventBatch>> block_events(int64_t sequence) {
    return block_events_.since(sequence);
  }
  // All blocks that the prefix cache holds, after the running step.
  BlockSnapshot block_snapshot();

  // Exchanges KV blocks with other engines from now on: requests may send_to and receive_from.
  // Returns what others need to fetch from this one. host: of another replica, or null. Once.
  // Throws NotSupported, InvalidArgument.
  KvPeer open_hand_over(const HandOverOptions& options, std::shared_ptr<KvHost> host = nullptr);
  std::shared_ptr<KvHost> hand_over_host() const;  // of what is open; null: nothing
  // A number for HandOver::peer. Throws InvalidArgument without open_hand_over().
  int32_t add_peer(const KvPeer& peer);
  // Whether it keeps blocks under this id of send_to: the first are computed, and nobody has
  // fetched all of them.
  bool has_begun_hand_over(int64_t id) const;
  // Why a sequence was last computed here that should have come from a peer, once; empty: none.
  std::string take_hand_over_failure();

  EngineMetrics metrics() const;
  EngineHistograms histograms() const { return recorder_.snapshot(); }
  // Why the engine stopped; empty while it runs. A step that the executor cannot carry out ends the
  // requests of its batch with an error event each, and the engine goes on with the others. An
  // exception elsewhere ends all requests. Three of those in a row, or three steps in a row that
  // fail with DeviceError, stop the engine.
  std::string failure() const;
  // For how long its thread has stood still in the midst of a step, in seconds, where that is
  // longer than any step takes; otherwise 0. When it does not come back the engine stops: all
  // requests end with an error event, and the thread is left where it is.
  double stood_still_s() const {
    return std::chrono::duration<double>(watch_.stood_still()).count();
  }
  // After close(): its thread was left, and may use it still, so that it must not be destroyed.
  bool has_left_thread() const { return has_left_thread_; }
  // What does the work: Executor::description().
  const std::string& description() const { return description_; }
  // What was wrong at the start and did no harm; empty: nothing.
  const std::string& warning() const { return warning_; }
  // The bytes that the executor holds; once closed, those that it held last.
  MemoryUse memory_use() const;
  // What counts the rows that experts are given, once it is started; null: as Executor has it.
  const std::shared_ptr<ExpertLoads>& expert_loads() const { return expert_loads_; }
  // After the running step: as Executor has it. Throws what that throws.
  void balance_experts(const ExpertBalanceOptions& options);
  std::shared_ptr<const ExpertBalancer> expert_balancer() const {  // null: there is none
    const std::lock_guard lock(metrics_mutex_);
    return expert_balancer_;
  }
  const EngineConfig& config() const { return config_; }
  int64_t vocab_size() const { return vocab_size_; }
  // What went wrong meanwhile and did no harm, once; empty: nothing new.
  std::string take_notice() {
    const std::lock_guard lock(metrics_mutex_);
    return std::exchange(notice_, {});
  }
  std::vector<StepRecord> trace() const { return trace_.steps(); }
  // What rank 0 has exchanged with other processes of late, oldest first.
  std::vector<ExchangeRecord> exchanges() const {
    return exchange_log_ ? exchange_log_->records() : std::vector<ExchangeRecord>();
  }
  std::vector<RequestRecord> request_records() const { return trace_.requests(); }
  // None once a later request has taken the record's place.
  std::optional<RequestRecord> request_record(RequestId id) const { return trace_.request(id); }

  // Ends the thread after the running step, without finishing requests, and frees model, cache and
  // queues. Idempotent.
  void close();

 private:
  // A step between its plan and its commit.
  struct Flight {
    const StepPlan* plan = nullptr;
    StepRecord record;
  };
  struct Intake {
    std::vector<Request> requests;
    std::vector<MovingRequest> taken_over;
    std::vector<RequestId> aborts;
    std::vector<News> news;
    std::vector<std::packaged_task<void()>> tasks;  // to run between two steps
    bool reset_prefix_cache = false;
    bool stop = false;
    bool is_empty() const {
      return requests.empty() && taken_over.empty() && aborts.empty() && news.empty() &&
             tasks.empty() && !reset_prefix_cache && !stop;
    }
  };

  void queue(std::vector<Request>& requests);
  void leave_thread(const std::string& reason);
  void give_out(std::span<TokenEvent> events);
  void admit(std::vector<Request>& requests) const;
  void give_news(News news);
  void take(News& news);
  void check_runs() const;
  void run_on_thread(std::packaged_task<void()> task);
  void tell_blocks();
  void fall_asleep(int32_t level);
  void restore(const std::vector<MemoryPart>& parts);
  void keep_memory_use();
  void do_background_work(int64_t duration_us);
  int64_t num_queued() const;
  int64_t room() const;
  void run();
  bool take_in();
  void step();
  void draft(StepRecord& record);
  void note_drafts(StepRecord& record, const StepResult& result);
  void begin_step();
  int32_t num_busy();
  void finish_oldest();
  void finish_step();
  void take_aborts();
  void let_go(std::span<const TokenEvent> events);
  void keep_books(StepRecord& record, const StepResult& result);
  bool go_on_after(const std::exception& error);
  void replay(int rank);
  void enter(MovingRequest& moving);
  void pass_on(std::vector<LeavingRequest> leaving, const std::string& reason);
  void leave(const std::string& reason);
  void end_failed_before(const std::string& reason, std::span<const RequestId> ids);
  void fail_batch(const std::string& reason, bool may_leave);
  void fail_all(const std::string& reason);
  void give_out_failures(StepRecord& record, StepResult result);
  std::shared_ptr<KvMover> mover() const;
  void check_hand_over(const Request& request) const;
  void fail_unseen(const std::string& reason, std::vector<TokenEvent>& events);

  const EngineConfig config_;
  const int64_t vocab_size_;
  const int64_t hidden_size_;
  const std::optional<Vocabulary> vocabulary_;
  SteadyClock clock_;
  std::unique_ptr<Executor> executor_;  // used by the engine thread only
  const std::string description_;
  const std::string warning_;
  std::unique_ptr<Scheduler> scheduler_;    // likewise; any thread may use admission()
  std::unique_ptr<Speculator> speculator_;  // null: nothing is guessed
  StepTrace trace_;
  MetricsRecorder recorder_;
  std::vector<Decision> draft_decisions_;  // of the step that is begun
  bool is_executing_ = false;              // an exception now is the batch's
  int32_t num_failed_steps_ = 0;           // in a row, of those that stop the engine
  // Beside the scheduler's flights, one each.
  FlightRing<Flight, Scheduler::kMaxInFlight> flights_;
  // What the executor said last.
  bool has_background_work_ = true;
  bool has_idle_work_ = true;
  bool is_stuck_ = false;  // the last plan was empty, with no step in flight

  mutable std::mutex intake_mutex_;
  std::condition_variable intake_ready_;
  std::condition_variable room_made_;
  Intake intake_;
  // Requests on the way from the intake to the scheduler; the engine thread's. An exception leaves
  // them here for fail_all().
  std::deque<Request> taken_;
  RequestId next_id_ = 0;  // larger than all that were given
  // By unfinished request. An abort cancels them, since a step may wait for their answer.
  std::unordered_map<RequestId, std::vector<std::shared_ptr<LogitsProcessor>>> processors_;
  // Samples that have not ended, by unfinished request.
  std::unordered_map<RequestId, std::set<int32_t>> live_;
  std::string failure_;                              // why the engine stopped; empty while it runs
  std::array<bool, kNumMemoryParts> is_released_{};  // by MemoryPart

  mutable std::mutex metrics_mutex_;
  EngineMetrics metrics_;  // after the last step
  MemoryUse memory_use_;
  const std::shared_ptr<ExpertLoads> expert_loads_ = executor_->expert_loads();
  const std::shared_ptr<const ExchangeLog> exchange_log_ = executor_->exchange_log();
  int64_t draft_us_ = 0;  // the engine thread's
  std::string notice_;

  std::shared_ptr<const ExpertBalancer> expert_balancer_;  // under metrics_mutex_, or null
  std::shared_ptr<KvMover> mover_;  // under metrics_mutex_; null: nobody is handed over

  const EngineLinks links_;
  BlockEventFeed block_events_;

  std::mutex events_mutex_;   // of who gives events out, and of what follows
  bool is_given_up_ = false;  // the engine's thread gives none any more
  bool has_ended_ = false;    // it
  std::condition_variable ended_;
  std::atomic<bool> has_left_thread_{false};
  EngineWatch watch_;

  std::mutex close_mutex_;
  std::thread thread_;
};

}  // namespace llmserve
