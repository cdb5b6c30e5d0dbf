#include "comm/nccl_meeting.h"

#include <array>
#include <cstring>
#include <utility>

#include "comm/nccl_communicator.h"
#include "comm/tcp_communicator.h"
#include "core/error.h"

namespace llmserve {

std::unique_ptr<Communicator> meet_in_nccl(
    std::unique_ptr<Communicator> wires, const RankPlace& place,
    const std::shared_ptr<std::atomic<int64_t>>& num_errors) {
  const std::shared_ptr<Communicator> kept = std::move(wires);
  auto* const sockets = dynamic_cast<TcpCommunicator*>(kept.get());
  check_internal(sockets != nullptr, "ranks of several nodes have met over sockets");
  NcclLibrary library = open_nccl({});
  NcclOptions options{.rank = kept->rank(),
                      .world_size = kept->world_size(),
                      .queue = place.queue,
                      .memory = place.memory,
                      .staging_bytes = place.staging_bytes,
                      .num_errors = num_errors,
                      .has_lost_rank = [kept, sockets] { return sockets->has_lost_peer(); },
                      .leave = [kept] { kept->abort(); }};
  std::array<int32_t, sizeof(nccl::UniqueId) / sizeof(int32_t)> id{};
  if (kept->rank() == 0) {
    const nccl::UniqueId made = make_nccl_id(library);
    std::memcpy(id.data(), &made, sizeof(made));
  }
  kept->broadcast(Tensor(id.data(), DType::kI32, {std::ssize(id)}), 0);
  std::memcpy(&options.id, id.data(), sizeof(options.id));
  auto end = std::make_unique<NcclCommunicator>(std::move(library), std::move(options));
  end->barrier();  // connections are made by the first exchange
  return end;
}

}  // namespace llmserve
