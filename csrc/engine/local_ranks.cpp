#include "engine/local_ranks.h"

#include <utility>

#include "comm/nccl_meeting.h"
#include "comm/single_communicator.h"
#include "core/pin_thread.h"
#include "core/thread_beat.h"
#include "engine/rank_devices.h"
#include "engine/worker_plan.h"

namespace llmserve {
namespace {

int node_of(const ParallelConfig& parallel, int rank) {
  int node = 0;
  while (rank >= parallel.first_rank_of(node + 1)) ++node;
  return node;
}

}  // namespace

std::vector<std::unique_ptr<Worker>> make_workers(RankThreads& ranks, const EngineConfig& config,
                                                  const Checkpoint& checkpoint,
                                                  const std::shared_ptr<SharedModels>& shared) {
  std::vector<std::unique_ptr<Worker>> workers(static_cast<size_t>(ranks.num_ranks()));
  const int first = config.parallel.first_rank();
  const int32_t sharing = config.parallel.decode_context;
  std::vector<std::shared_ptr<SharedKvRows>> kv_rows(workers.size() / static_cast<size_t>(sharing));
  if (sharing > 1)
    for (auto& rows : kv_rows) rows = std::make_shared<SharedKvRows>(sharing);
  ranks.run([&](int local) {
    const ThreadShare threads = thread_share(config, first + local);
    if (threads.first > 0) pin_thread_to(threads.first, threads.count);
    workers[static_cast<size_t>(local)] =
        std::make_unique<Worker>(config, checkpoint, first + local, nullptr, shared,
                                 kv_rows[static_cast<size_t>(local / sharing)]);
  });
  // Of each stage the first rank counts, as rank 0 of one stage does.
  if (first > 0) return workers;
  for (size_t i = 0; i < workers.size(); i += static_cast<size_t>(config.parallel.tensor))
    workers[i]->share_expert_loads(*workers[0]);
  return workers;
}

std::vector<RankEnds> meet_nodes(const ParallelConfig& parallel, const MeetingPlace& place,
                                 Deadline until) {
  const int tensor = parallel.tensor;
  const int pipeline = parallel.pipeline;
  const int first = parallel.first_rank();
  std::vector<RankEnds> ends(static_cast<size_t>(parallel.num_local_ranks()));
  // Stages are counted from the last ranks on.
  const auto rank_of = [&](int stage, int in_stage) {
    return (pipeline - 1 - stage) * tensor + in_stage;
  };
  const auto meet = [&](int id, int size, const auto& rank_at, const auto& end_of) {
    if (size == 1) return;
    RankGroup group{.id = static_cast<uint32_t>(id)};
    for (int i = 0; i < size; ++i) group.nodes.push_back(node_of(parallel, rank_at(i)));
    auto met = meet_ranks(group, place, until);
    for (int i = 0; i < size; ++i)
      if (met[static_cast<size_t>(i)])
        end_of(ends[static_cast<size_t>(rank_at(i) - first)]) =
            std::move(met[static_cast<size_t>(i)]);
  };
  for (int stage = 0; stage < pipeline; ++stage)
    meet(
        stage, tensor, [&](int i) { return rank_of(stage, i); },
        [](RankEnds& rank) -> auto& { return rank.tensor_ranks; });
  for (int in_stage = 0; in_stage < tensor; ++in_stage)
    meet(
        pipeline + in_stage, pipeline, [&](int i) { return rank_of(i, in_stage); },
        [](RankEnds& rank) -> auto& { return rank.stages; });
  for (int stage = 0; parallel.has_halves() && stage < pipeline; ++stage)
    meet(
        pipeline + tensor + stage, tensor, [&](int i) { return rank_of(stage, i); },
        [](RankEnds& rank) -> auto& { return rank.second_half; });
  for (RankEnds& rank : ends) {
    if (!rank.tensor_ranks) rank.tensor_ranks = std::make_unique<SingleCommunicator>();
    if (!rank.stages) rank.stages = std::make_unique<SingleCommunicator>();
  }
  return ends;
}

RankEnds meet_on_devices(RankEnds ends, const Worker& worker,
                         const std::shared_ptr<std::atomic<int64_t>>& num_errors) {
  const BeatPause pause;  // others may load first
  const auto meet = [&](std::unique_ptr<Communicator>& end, int64_t staging_bytes) {
    if (end->world_size() > 1)
      end = meet_in_nccl(std::move(end), rank_place(worker.backend(), staging_bytes), num_errors);
  };
  meet(ends.tensor_ranks, worker.staging_bytes());
  meet(ends.stages, 0);
  return ends;
}

}  // namespace llmserve
