// The engines of a process that run one model: one, or replicas that share its weights.
//
// Each replica has a thread, ranks, a scheduler and a KV cache of its own. A request goes to the
// replica where it costs least (routing/router.h), and has its number, and so the seed that is
// drawn for it, whichever that is. Every public method may be called from any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "api/engine_config.h"
#include "api/engine_metrics.h"
#include "engine/engine.h"
#include "layers/expert_placement.h"
#include "routing/router.h"

namespace llmserve {

class EngineGroup final : private EngineListener {
 public:
  // config: of all replicas. executors: one a replica. Throws what Engine's constructor throws.
  EngineGroup(const EngineConfig& config, const std::optional<Vocabulary>& vocabulary,
              std::vector<std::unique_ptr<Executor>> executors,
              const std::optional<Vocabulary>& draft_vocabulary = std::nullopt);
  // Of one engine.
  EngineGroup(const EngineConfig& config, const std::optional<Vocabulary>& vocabulary,
              std::unique_ptr<Executor> executor);
  ~EngineGroup() override;  // close()
  EngineGroup(const EngineGroup&) = delete;
  EngineGroup& operator=(const EngineGroup&) = delete;

  // False in a forked child, which has no engine thread, and where locks may be held for ever.
  bool is_of_this_process() const;
  int32_t num_replicas() const { return static_cast<int32_t>(engines_.size()); }
  // Throws InvalidArgument that says how many there are.
  Engine& replica(int64_t idx) const;

  // As Engine has them, of all replicas together.
  void check(std::span<const Request* const> requests) const { first().check(requests); }
  std::vector<RequestId> add_requests(std::vector<Request> requests);
  int64_t wait_for_room(double timeout_s);
  void abort(RequestId id);
  // All replicas sleep, or none: where one has unfinished requests the others wake again.
  void sleep(int32_t level);
  void wake_up(const std::vector<MemoryPart>& parts);
  bool is_sleeping() const;
  void reset_prefix_cache();
  void allow_seats(int32_t num_seats);  // of each replica
  // Of several: what the replicas hold together, as if they were one cache.
  std::optional<std::vector<BlockEventBatch>> block_events(int64_t sequence);
  BlockSnapshot block_snapshot();
  // Of several: what any of them has computed can be fetched at the same place, and any may fetch.
  KvPeer open_hand_over(const HandOverOptions& options);
  int32_t add_peer(const KvPeer& peer);
  bool has_begun_hand_over(int64_t id) const { return first().has_begun_hand_over(id); }
  std::string take_hand_over_failure();
  EngineMetrics metrics() const;
  EngineHistograms histograms() const;
  // Why the engine stopped: of several, the last that did. Empty while any runs.
  std::string failure() const;
  // [replicas] as Engine has it.
  std::vector<double> stood_still_s() const;
  // After close(): it must not be destroyed.
  bool has_left_thread() const;
  const std::string& description() const { return first().description(); }
  const std::string& warning() const { return first().warning(); }
  MemoryUse memory_use() const;
  // Rows that experts were given, by layer. start_expert_loads(): false if nothing can count them.
  bool start_expert_loads();
  std::map<int64_t, std::vector<int64_t>> expert_rows() const;
  void balance_experts(const ExpertBalanceOptions& options);
  // Rows of experts that each rank has run, by layer; empty without balance_experts().
  std::map<int64_t, std::vector<int64_t>> expert_rank_rows() const;
  const EngineConfig& config() const { return config_; }
  int64_t vocab_size() const { return first().vocab_size(); }
  std::string take_notice();
  std::vector<StepRecord> trace() const;
  std::vector<ExchangeRecord> exchanges() const { return first().exchanges(); }
  std::vector<RequestRecord> request_records() const;
  std::optional<RequestRecord> request_record(RequestId id) const;
  // Requests that it goes on with since another one could not execute them.
  int64_t num_taken_over(int64_t replica) const;
  // Where the router stands with each replica; empty of one engine.
  std::vector<ReplicaLoad> loads() const;

  // Events since the last call, one a sequence, in the order in which each was last added to. Waits
  // up to `timeout_s` for the first, and returns none at the timeout or once closed. One consumer
  // at a time.
  std::vector<TokenEvent> wait_events(double timeout_s) {
    return events_.take(std::chrono::duration<double>(timeout_s));
  }
  // Readable (level-triggered) while events are waiting: for an event loop. -1 once closed.
  int event_fd() const { return events_.fd(); }
  // An engine's thread writes the lines of the connection until it is taken back: see EventBuffer.
  bool lend(std::shared_ptr<LentConnection> connection) {
    return events_.lend(std::move(connection));
  }
  WrittenLines take_back(LentConnection& connection) { return events_.take_back(connection); }

  // Ends the threads after their running steps, without finishing requests, and frees model, caches
  // and queues. Idempotent.
  void close();

 private:
  // Where an unfinished request is.
  struct Place {
    int32_t replica = 0;
    uint64_t route_id = 0;     // of the router's reservation
    bool has_started = false;  // the router knows that its prompt is computed
  };

  Engine& first() const { return *engines_[0]; }
  bool are_several() const { return engines_.size() > 1; }
  int64_t num_waiting() const;
  int64_t room() const;
  void place(std::vector<Request> requests, std::span<const RouteRequest> routes);
  int32_t choose(const Request& request, const RouteRequest& route);
  void drop(std::span<const RequestId> ids);

  void take_result(int32_t replica, const StepResult& result) override;
  void take_blocks(int32_t replica, const std::vector<BlockEvent>& events) override;
  void note_stop(int32_t replica, const std::string& reason) override;
  void move(int32_t replica, std::vector<MovingRequest>& requests) override;
  bool move(int32_t replica, MovingRequest& moving);

  const EngineConfig config_;
  const int process_id_;
  EventBuffer events_;
  Router router_;

  // Held while requests enter, so that their numbers grow in every engine's intake; before the
  // engines' own locks.
  mutable std::mutex mutex_;
  std::condition_variable room_made_;
  std::unordered_map<RequestId, Place> places_;  // of several engines
  RequestId next_id_ = 0;
  std::vector<int64_t> num_taken_over_;  // [replicas]
  std::string notice_;
  std::string failure_;  // of the last engine that stopped

  std::mutex peers_mutex_;  // so that a peer has one number in all of them

  std::mutex blocks_mutex_;             // before the router's
  std::vector<int64_t> num_batches_;    // [replicas] of block events
  BlockEventFeed block_events_;         // of all
  std::vector<BlockEvent> all_events_;  // of the batch at hand

  std::vector<std::unique_ptr<Engine>> engines_;  // last: their threads use the others
};

}  // namespace llmserve
