// The ranks of a model that this process has, and how they meet those of others.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "api/engine_config.h"
#include "comm/rank_meeting.h"
#include "engine/rank_threads.h"
#include "engine/worker.h"

namespace llmserve {

// [local ranks], each made on its thread. Throws what Worker's constructor throws.
std::vector<std::unique_ptr<Worker>> make_workers(RankThreads& ranks, const EngineConfig& config,
                                                  const Checkpoint& checkpoint,
                                                  const std::shared_ptr<SharedModels>& shared);

// [local ranks]. All nodes call it for the same meeting. Throws DeviceError past the deadline.
std::vector<RankEnds> meet_nodes(const ParallelConfig& parallel, const MeetingPlace& place,
                                 Deadline until);

// What ranks with devices exchange through, of what they have met over among nodes. On each rank's
// thread at once. Errors are meet_in_nccl's.
RankEnds meet_on_devices(RankEnds ends, const Worker& worker,
                         const std::shared_ptr<std::atomic<int64_t>>& num_errors);

}  // namespace llmserve
