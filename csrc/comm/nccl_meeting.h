// Ranks with a GPU each that are on several nodes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "comm/registry.h"

namespace llmserve {

// A rank's end of NCCL, among the ranks that `wires` has met, which is a TcpCommunicator. NCCL's id
// goes over it. Then nothing does: whoever fails closes it, and so the others hear of it. On each
// rank's thread at once. num_errors: as GroupOptions'. Throws DeviceError, and NotSupported where
// there is no NCCL.
std::unique_ptr<Communicator> meet_in_nccl(std::unique_ptr<Communicator> wires,
                                           const RankPlace& place,
                                           const std::shared_ptr<std::atomic<int64_t>>& num_errors);

}  // namespace llmserve
