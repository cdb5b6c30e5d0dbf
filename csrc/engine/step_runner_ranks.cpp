// What the ranks of a step runner exchange through, and what becomes of a step when they fail.
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/thread_beat.h"
#include "core/trace_range.h"
#include "engine/local_ranks.h"
#include "engine/node_leader.h"
#include "engine/rank_devices.h"
#include "engine/recorded_draw.h"
#include "engine/recorded_run.h"
#include "engine/step_runner.h"
#include "engine/worker_plan.h"
#include "kernels/device_steps.h"

namespace llmserve {
namespace {

constexpr const char* kGivenUp = "the ranks have given up what they exchanged";

}  // namespace

// Ends what the ranks are exchanging. Any thread.
void StepRunner::give_up_exchanges() noexcept {
  const std::lock_guard lock(exchanges_mutex_);
  if (!has_met_.exchange(false)) return;
  for (const auto& worker : workers_) worker->abort_exchanges();
}

void StepRunner::meet_other_nodes() {
  const BeatPause pause;  // they may take as long as the cluster's timeout
  std::vector<RankEnds> ends = leader_->meet();
  if (steps_ != nullptr) {
    try {
      ranks_.run([&](int rank) {
        Worker& worker = *workers_[static_cast<size_t>(rank)];
        worker.join(meet_on_devices(std::move(ends[static_cast<size_t>(rank)]), worker,
                                    num_exchange_errors_));
      });
    } catch (const DeviceError& error) {  // one has gone meanwhile
      throw RankFailure(ranks_.failed_rank(), error.what());
    }
  }
  {
    const std::lock_guard lock(exchanges_mutex_);
    for (size_t i = 0; steps_ == nullptr && i < ends.size(); ++i)
      workers_[i]->join(std::move(ends[i]));
    ++group_;
    if (watch_) watch_->begin_group(group_);
    has_met_ = true;
  }
  if (leader_->has_lost()) give_up_exchanges();  // before it could
  if (std::exchange(has_met_nodes_, true) && head_ && has_far_head()) head_->note_lost_node();
}

void StepRunner::run_on_ranks(const std::function<void(int rank)>& work) {
  const bool are_several = workers_.size() > 1 || leader_;
  if (are_several && !has_met_) {
    if (watch_ && !flights_.is_empty())  // their results are none
      throw failure_of_ranks(0, kGivenUp);
    leader_ ? meet_other_nodes() : meet();
  }
  run_in_group(work);
}

void StepRunner::run_in_group(const std::function<void(int rank)>& work) {
  if (watch_) watch_->wake();
  if (workers_.size() == 1 && !leader_) return ranks_.run(work);
  const RankThreads::Awaited awaited(ranks_);
  run_guarded([&] { ranks_.run(work); });
}

// Graphs stay: places do not move, and where an expert lies is read on the device. After a move
// that failed, weights are loaded anew, where they lay at first.
void StepRunner::move_experts() {
  if (!balancer_ || steps_ == nullptr) return;
  if (has_lost_experts_) {
    release(MemoryPart::kWeights);
    restore(MemoryPart::kWeights);
    has_lost_experts_ = false;
  }
  if (!balancer_->begin_step()) return;
  const std::vector<ExpertBalancer::Moves> moves = balancer_->move();
  int64_t staging_bytes = first().workspace_bytes();
  for (const auto& worker : workers_)
    staging_bytes = std::min(staging_bytes, worker->workspace_bytes());
  has_lost_experts_ = true;
  run_on_ranks(
      [&](int rank) { workers_[static_cast<size_t>(rank)]->move_experts(moves, staging_bytes); });
  has_lost_experts_ = false;
}

// Rows that are edited or report are drawn behind what is recorded: what they ask for differs from
// step to step, and on rank 0 alone.
void StepRunner::run_recorded(const RecordKey& key, StepBatch& batch, Flight& flight,
                              StepSink& behind) {
  if (!key.draws) masks_.begin(batch.sample_tasks);
  steps_->bring_over();
  batch.has_awaited = runs_ahead();  // asked for always, so that batches of the shape are alike
  // All that a graph uses is in its place before anybody decides whether there are graphs.
  run_on_ranks([&](int rank) { begin_rank(rank, batch); });
  if (rank_graphs_ == RankGraphs::kUntried &&
      steps_->recording(key) != DeviceSteps::Recording::kNone)
    rank_graphs_ = RankGraphs::kTried;
  RecordedDraw draw(*steps_, batch);
  std::vector<Tensor>& hidden = recorded_hidden_[key];
  hidden.resize(workers_.size());
  flight.is_replayed = llmserve::run_recorded(
      {.key = key,
       .ranks = recorders_,
       .on_ranks =
           [&](const auto& call) {
             run_in_group([&](int rank) {
               std::optional<TraceRange> range;  // rank 0's is around launch()
               if (rank > 0) range.emplace(flight.name);
               call(rank);
             });
           },
       .work =
           [&](int rank) {
             Worker& worker = *workers_[static_cast<size_t>(rank)];
             if (key.draws)
               worker.run(batch, draw);
             else
               hidden[static_cast<size_t>(rank)] = worker.run_layers(batch);
           },
       .end =
           [&](int rank) {
             if (!key.draws)
               workers_[static_cast<size_t>(rank)]->run_behind(
                   batch, hidden[static_cast<size_t>(rank)], behind);
             end_rank(rank, flight);
           }});
}

void StepRunner::run_guarded(const std::function<void()>& work) {
  try {
    work();
  } catch (const RankLeft&) {
    throw;
  } catch (const DeviceError& error) {
    if (!leader_) throw failure_of_ranks(ranks_.failed_rank(), error.what());
    give_up_exchanges();
    throw RankFailure(ranks_.failed_rank(), concat(error.what(), leader_->reasons()));
  } catch (...) {  // where one rank is alone on its node nobody else has told the others
    if (leader_) give_up_exchanges();
    throw;
  }
}

void StepRunner::meet() {
  if (rank_graphs_ == RankGraphs::kTried) rank_graphs_ = RankGraphs::kGivenUp;
  const int tensor = config_.parallel.tensor;
  const int pipeline = config_.parallel.pipeline;
  const auto make = [this](int num_ranks) {
    return make_group_(steps_ != nullptr ? "nccl" : "shm",
                       {.world_size = num_ranks, .num_errors = num_exchange_errors_});
  };
  std::vector<std::unique_ptr<CommunicatorGroup>> of_stage(static_cast<size_t>(pipeline));
  std::vector<std::unique_ptr<CommunicatorGroup>> of_place(static_cast<size_t>(tensor));
  if (tensor > 1)
    for (auto& group : of_stage) group = make(tensor);
  if (pipeline > 1)
    for (auto& group : of_place) group = make(pipeline);
  ranks_.run([&](int rank) {
    Worker& worker = *workers_[static_cast<size_t>(rank)];
    const int stage = stage_of(config_, rank);
    const int in_stage = rank % tensor;
    const auto join = [&](const std::unique_ptr<CommunicatorGroup>& group, int member,
                          int64_t staging_bytes) -> std::unique_ptr<Communicator> {
      if (group) return group->join(member, rank_place(worker.backend(), staging_bytes));
      return std::make_unique<SingleCommunicator>();
    };
    // Columns are gathered among the ranks of a stage alone.
    worker.join({.tensor_ranks =
                     join(of_stage[static_cast<size_t>(stage)], in_stage, worker.staging_bytes()),
                 .stages = join(of_place[static_cast<size_t>(in_stage)], stage, 0),
                 .second_half = {}});
  });
  const std::lock_guard lock(exchanges_mutex_);
  ++group_;
  if (watch_) watch_->begin_group(group_);
  has_met_ = true;
}

std::unique_ptr<DeviceWatch> StepRunner::make_watch() {
  if (steps_ == nullptr || config_.parallel.num_ranks() == 1) return nullptr;
  std::vector<DeviceWatch::Rank> ranks;
  for (const auto& worker : workers_) {
    const auto check = [this, &worker] {
      const std::lock_guard lock(exchanges_mutex_);
      if (has_met_) worker->check_exchanges();
    };
    ranks.push_back({.check = check, .progress = rank_place(worker->backend(), 0).queue.progress});
  }
  const auto give_up = [this](const DeviceWatch::Failure& failure) {
    std::unique_lock lock(exchanges_mutex_);
    if (failure.group != group_) return;
    lock.unlock();
    give_up_exchanges();
  };
  return std::make_unique<DeviceWatch>(std::move(ranks), give_up);
}

// What the device did behind exchanges that were given up is no result.
std::span<const DrawnRow> StepRunner::results_of(const Flight& flight) {
  if (!watch_) return steps_->wait(flight.step);
  watch_->wake();  // it may have looked before there was anything under way
  std::string reason;
  try {
    const std::span<const DrawnRow> drawn = steps_->wait(flight.step);
    for (const auto& worker : workers_) worker->check_exchanges();
    if (has_met_) {
      watch_->trust();
      if (flight.is_replayed) rank_graphs_ = RankGraphs::kProven;
      return drawn;
    }
    reason = kGivenUp;
  } catch (const DeviceError& error) {
    reason = error.what();
    give_up_exchanges();
  }
  throw failure_of_ranks(0, reason);
}

// As the watch has it, who saw it first, if anybody did.
RankFailure StepRunner::failure_of_ranks(int rank, const std::string& reason) const {
  const auto failure = watch_ ? watch_->failure() : std::nullopt;
  return failure ? RankFailure(failure->rank, failure->reason) : RankFailure(rank, reason);
}

}  // namespace llmserve
