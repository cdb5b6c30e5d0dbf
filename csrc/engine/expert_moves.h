// Experts that move between ranks with devices: their weights cross, and lie in other places.
#pragma once

#include <cstdint>
#include <span>

#include "comm/communicator.h"
#include "core/arena.h"
#include "core/device_queue.h"
#include "layers/expert_balancer.h"
#include "models/model.h"

namespace llmserve {

// A rank's part, on its thread; all ranks of its stage have theirs. What is asked of the device
// comes behind the steps there, and is not waited for. `layers` and `staging_bytes`, of the arena,
// are the same on all of them; layers of other stages are passed over. Throws what exchanges throw:
// then weights are of no expert.
void move_experts(std::span<const ExpertBalancer::Moves> layers, const Model& model,
                  Communicator& ranks, const DeviceQueue& queue, Arena& arena,
                  int64_t staging_bytes);

}  // namespace llmserve
