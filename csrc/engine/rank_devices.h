// Where ranks compute: each has a GPU of its node, in their order, and a host has them all.
#pragma once

#include <cstdint>
#include <memory>

#include "api/engine_config.h"
#include "comm/registry.h"
#include "kernels/backend.h"

namespace llmserve {

// Whether each rank of each replica has a device of its own.
bool has_rank_devices(const EngineConfig& config);

// Of rank `rank`, with its share of the threads. Where fewer devices than ranks are visible this
// throws NotSupported, but with NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment: then ranks share
// devices by turns. Throws what make_backend throws.
std::unique_ptr<Backend> make_rank_backend(const EngineConfig& config, int rank);

// Precondition: has_rank_devices(). Bytes that each rank of this process can have, as many as the
// one with the fewest, times their number in all replicas. Throws likewise.
int64_t free_rank_bytes(const EngineConfig& config);

// Of the largest tensor that ranks with a device each gather the columns of; 0: there are none.
int64_t gathered_bytes(const EngineConfig& config, const StepShape& shape);

// How a rank with this backend joins a group. The backend outlives the communicator.
RankPlace rank_place(Backend& backend, int64_t staging_bytes);

}  // namespace llmserve
