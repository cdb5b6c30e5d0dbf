// The executor that runs a model: the host's side of a step. Workers compute.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "api/engine_config.h"
#include "comm/registry.h"
#include "core/flight_ring.h"
#include "engine/batch_builder.h"
#include "engine/device_watch.h"
#include "engine/draft_worker.h"
#include "engine/executor.h"
#include "engine/head_worker.h"
#include "engine/mask_filler.h"
#include "engine/pooler.h"
#include "engine/rank_threads.h"
#include "engine/recorded_shape.h"
#include "engine/worker.h"
#include "kernels/device_steps.h"
#include "sampling/sampler.h"
#include "scheduler/scheduler.h"

namespace llmserve {

class NodeLeader;  // engine/node_leader.h

// A step is one batch for all ranks, so that no two ranks can plan differently: every worker runs
// it, each on its rank's thread, and tokens are drawn from the logits of rank 0.
//
// Among stages as many steps are in flight as there are stages, each in another one: launch() gives
// a step to the ranks of other threads and nodes, which take steps in their order, and wait() does
// the part of rank 0, of the last stage. Stages with devices take it from launch() to their
// streams. A step that cannot lie there unread, or that has to be alone, goes when those before it
// have ended.
//
// A rank that fails ends the exchanges of the others, and the step. The next step meets in a new
// group: a DeviceError of several ranks is a RankFailure. Where some ranks are in other processes,
// that step waits for them, up to the cluster's timeout.
class StepRunner final : public Executor {
 public:
  // What ranks exchange through, anew after each failure: a kind of the registry.
  using MakeGroup = std::function<std::unique_ptr<CommunicatorGroup>(std::string_view kind,
                                                                     const GroupOptions& options)>;
  static std::unique_ptr<CommunicatorGroup> make_group(std::string_view kind,
                                                       const GroupOptions& options);
  // Workers of config.parallel, of config.model_path as `checkpoint` has it open. Throws what
  // Worker's constructor throws, and ResourceExhausted.
  // shared: where replicas of config.parallel.data find each other's weights; null: there is one.
  // given_up: who waits for other nodes waits no more, and throws DeviceError.
  StepRunner(const EngineConfig& config, const Checkpoint& checkpoint,
             MakeGroup make_group = &StepRunner::make_group,
             const std::shared_ptr<SharedModels>& shared = nullptr,
             const std::stop_token& given_up = {}, const RankPatience& patience = kHostPatience);
  ~StepRunner() override;

  // What guesses between two steps has the device to itself, and a head all ranks of the last
  // stage. A draft model runs where rank 0 does, between two of its parts of steps; what the
  // rejection rule keeps of its guesses is of one step.
  int32_t max_in_flight() const override {
    if (head_ || !config_.async_scheduling) return 1;
    if (draft_ && (steps_ != nullptr || !config_.speculation.is_exact())) return 1;
    if (runs_ahead()) return Scheduler::kMaxAhead;
    return std::min(config_.parallel.pipeline, Scheduler::kMaxInFlight);
  }
  bool runs_ahead() const override {
    return steps_ != nullptr && config_.parallel.pipeline == 1 && config_.parallel.nodes == 1;
  }
  void launch(const StepPlan& plan) override;
  const SampledTokens& wait() override;
  void abandon() noexcept override;
  // A device may take as long as it likes.
  RankPatience patience() const override { return steps_ == nullptr ? patience_ : RankPatience(); }
  bool has_left_rank() const override { return ranks_.has_left_rank(); }
  void cancel() noexcept override;
  void report_to(NewsSink sink) override;
  bool can_hand_over() const override { return true; }
  std::shared_ptr<KvMover> open_hand_over(const HandOverOptions& options,
                                          std::shared_ptr<KvHost> host) override;
  bool do_background_work() override;
  bool do_idle_work() override;
  void forget(RequestId request_id, int32_t sample_index) override;
  void check_idle() const override;
  int64_t vocab_size() const override { return first().vocab_size(); }
  int64_t hidden_size() const override { return first().hidden_size(); }
  std::string description() const override;
  MemoryUse memory_use() const override;
  void fill_metrics(EngineMetrics& metrics) const override {
    first().fill_metrics(metrics);
    metrics.num_nccl_errors = *num_exchange_errors_;
  }
  std::shared_ptr<ExpertLoads> expert_loads() const override { return first().expert_loads(); }
  std::shared_ptr<const ExpertBalancer> balance_experts(
      const ExpertBalanceOptions& options) override;
  std::string warning() const override { return first().warning(); }
  std::shared_ptr<const ExchangeLog> exchange_log() const override { return exchanges_; }
  // [L, T, E] f32 in the first worker's memory: the states of the last plan's wanted layers.
  const Tensor& layer_states() const { return first().layer_states(); }
  const Tensor* wanted_states() const override { return &layer_states(); }
  int64_t max_exact_rows() const override;
  DraftModel* draft_model() override { return draft_.get(); }
  HeadModel* head_model() override { return head_.get(); }
  void release(MemoryPart part) override;
  void restore(MemoryPart part) override;

 private:
  // A step between launch() and wait(). Where there is a device, the tokens come with the step's
  // results; otherwise they are there.
  struct Flight {
    bool is_empty = false;
    bool is_replayed = false;  // it was launched as it was recorded
    int64_t step = 0;          // of DeviceSteps
    int64_t number = 0;        // of this runner's steps
    const char* name = "";     // for profilers
    SampledTokens sampled;
    size_t num_rows = 0;                 // S
    std::vector<bool> only_draws;        // [S] of those that do, nothing follows is set
    std::vector<PendingSample> pending;  // [at least S]
    std::vector<SampledRow> answered;    // likewise
    StepBatch* batch = nullptr;
    // Of a step among stages.
    struct Work {
      StepRunner* runner = nullptr;
      Flight* flight = nullptr;
      void operator()(int rank) const { runner->run_rank(rank, *flight, *flight->draw); }
    };
    std::unique_ptr<StepSink> draw;
    Work work;
    std::vector<std::byte> wire;  // for other nodes, once it is written
    bool is_posted = false;
  };
  // A batch, and its integers where there is no device.
  struct BatchPlace {
    BatchBuilder builder;
    std::vector<std::byte> block;
  };
  // Rank 0's integers of the step that is built, where the others have devices, too.
  struct FollowedBlock {
    std::span<const std::byte> block;
    int64_t num_rows = 0;
    int64_t max_rows = 0;
  };
  class Draw;  // what rank 0 does with a step's outputs

  Worker& first() const { return *workers_[0]; }
  // Other nodes have ranks of the last stage, and with them of a head that drafts.
  bool has_far_head() const {
    return config_.parallel.tensor > config_.parallel.num_local_last_ranks();
  }
  // Of a host. Ranks with devices are asked for all of a step at once, and compute it later.
  bool has_stages() const { return config_.parallel.pipeline > 1 && steps_ == nullptr; }
  void run_rank(int rank, const Flight& flight, StepSink& sink);
  // Before the rank is asked for a step, and after it.
  void begin_rank(int rank, const StepBatch& batch);
  void end_rank(int rank, const Flight& flight);
  // Other processes' ranks do not hear what these have recorded.
  bool may_record() const {
    return steps_ != nullptr && !config_.enforce_eager && config_.parallel.nodes == 1 &&
           (workers_.size() == 1 || rank_graphs_ != RankGraphs::kGivenUp);
  }
  // Hands transfers of blocks of steps that have been waited for to the mover.
  void begin_transfers(const StepPlan& plan);
  void begin(const StepPlan& plan, StepBatch& batch, Flight& flight);
  bool post(Flight& flight);
  void end(Flight& flight);
  void post_waiting();
  // What a rank among several throws ends the others' exchanges: then they meet in a new group.
  void run_guarded(const std::function<void()>& work);
  std::unique_ptr<NodeLeader> make_leader(const Checkpoint& checkpoint);
  void give_up_exchanges() noexcept;
  void meet_other_nodes();
  // The ranks of each stage get a group, and so do those of all stages with the same place in it.
  void meet();
  Flight& begin_flight();
  StepBatch& build(const StepPlan& plan, const BatchShape& shape);
  // work(rank) on each rank's thread, in a group that has not failed.
  void run_on_ranks(const std::function<void(int rank)>& work);
  // Likewise, later in the same step: in the group that it has begun in, whatever became of that.
  void run_in_group(const std::function<void(int rank)>& work);
  std::unique_ptr<HeadWorker> make_head();
  // Tells the balancer where the ranks' weights are.
  void link_experts();
  // Of devices: has experts lie where they are to run in the next step.
  void move_experts();
  std::unique_ptr<DeviceWatch> make_watch();
  // Throws RankFailure for what was given up while the step was under way.
  std::span<const DrawnRow> results_of(const Flight& flight);
  RankFailure failure_of_ranks(int rank, const std::string& reason) const;
  void tell_guesses(const StepPlan& plan, StepBatch& batch) const;
  void run(const StepPlan& plan, StepBatch& batch, Flight& flight);
  void run_recorded(const RecordKey& key, StepBatch& batch, Flight& flight, StepSink& behind);
  void draw_rows(const ConstTensor& logits, const StepBatch& batch, size_t begin, Flight& flight);
  void sample_on_device(const ConstTensor& logits, const StepBatch& batch, size_t begin,
                        Flight& flight);

  const EngineConfig config_;
  const MakeGroup make_group_;
  const RankPatience patience_;
  RankThreads ranks_;
  std::atomic<bool> has_met_{false};  // the ranks have a group that has not failed
  bool has_met_nodes_ = false;        // once, with those of other processes
  std::mutex exchanges_mutex_;        // while the workers' ends are ended, or replaced
  // The other processes of config.parallel.nodes; null: there are none.
  std::unique_ptr<NodeLeader> leader_;
  const std::shared_ptr<std::atomic<int64_t>> num_exchange_errors_ =
      std::make_shared<std::atomic<int64_t>>(0);
  int64_t group_ = 0;                             // meetings of ranks so far
  std::vector<std::byte> wire_;                   // a step for them
  std::shared_ptr<ExchangeLog> exchanges_;        // of rank 0 with other processes'; or null
  std::vector<std::unique_ptr<Worker>> workers_;  // [ranks of this process]
  DeviceSteps* const steps_;                      // of rank 0's backend, or null
  const RecordingLimits limits_;
  std::vector<BatchPlace> places_;  // one a step in flight among stages, else one
  int64_t num_batches_ = 0;
  int64_t num_launched_ = 0;  // steps, of which those in flight are the last
  // Among stages, of the steps in flight that have sequences: all, and those that the ranks have.
  int32_t num_begun_ = 0;
  int32_t num_posted_ = 0;
  FollowedBlock followed_;
  MaskFiller masks_;
  std::unique_ptr<DraftWorker> draft_;  // of config.draft, or null
  std::unique_ptr<HeadWorker> head_;    // likewise
  Sampler sampler_;
  Pooler pooler_;
  std::vector<int32_t> late_tokens_;  // of the rows at hand
  // [ranks] Where recorded layers leave their states. As many as shapes have come.
  std::map<RecordKey, std::vector<Tensor>> recorded_hidden_;
  FlightRing<Flight, Scheduler::kMaxInFlight> flights_;
  SampledTokens sampled_;  // that wait() gave last
  NewsSink news_;
  std::shared_ptr<KvMover> mover_;            // null: nobody is handed over
  std::shared_ptr<ExpertBalancer> balancer_;  // null: experts stay where they are
  bool has_lost_experts_ = false;             // a move has failed half way
  std::unique_ptr<DeviceWatch> watch_;        // of ranks with a device each, or null
  std::vector<DeviceSteps*> recorders_;       // of the workers, where there are devices
  // Graphs with exchanges in them. Where exchanges fail before a step of one has given results, the
  // ranks do without from then on: it may be the graphs.
  enum class RankGraphs : uint8_t { kUntried, kTried, kProven, kGivenUp };
  RankGraphs rank_graphs_ = RankGraphs::kUntried;
};

}  // namespace llmserve
