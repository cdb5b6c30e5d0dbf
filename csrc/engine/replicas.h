// The executors of a model's replicas: on a host they compute with the same weights.
#pragma once

#include <memory>
#include <stop_token>
#include <vector>

#include "api/engine_config.h"
#include "engine/executor.h"
#include "io/checkpoint.h"

namespace llmserve {

using Executors = std::vector<std::unique_ptr<Executor>>;

// One a replica of config.parallel.data, of config.model_path as `checkpoint` has it open. Each is
// made on a thread of its own, which stays on the cores of its replica, and so do those that it
// starts. Throws what StepRunner's constructor throws, also once it is given up while it waits for
// other nodes.
Executors make_executors(const EngineConfig& config, const Checkpoint& checkpoint,
                         const std::stop_token& given_up = {});

}  // namespace llmserve
