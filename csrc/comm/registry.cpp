#include "comm/registry.h"

#include <array>
#include <mutex>
#include <utility>

#include "comm/nccl_communicator.h"
#include "comm/shm_communicator.h"
#include "comm/single_communicator.h"
#include "comm/tcp_communicator.h"
#include "core/error.h"

namespace llmserve {
namespace {

void check_rank(int rank, int world_size) {
  if (rank < 0 || rank >= world_size)
    throw InvalidArgument(
        concat("communicator: expected a rank in [0, ", world_size, "), got ", rank));
}

void check_host(std::string_view name, const RankPlace& place) {
  if (place.memory != nullptr && !place.memory->is_host())
    throw NotSupported(
        concat("communicator '", name, "' exchanges host memory; use 'nccl' among GPUs"));
}

class SingleGroup final : public CommunicatorGroup {
 public:
  std::unique_ptr<Communicator> join(int rank, const RankPlace& place) override {
    check_rank(rank, 1);
    check_host("single", place);
    return std::make_unique<SingleCommunicator>();
  }
};

class ShmRanks final : public CommunicatorGroup {
 public:
  explicit ShmRanks(const GroupOptions& options)
      : group_(std::make_shared<ShmGroup>(options.world_size, options.timeout)) {}

  std::unique_ptr<Communicator> join(int rank, const RankPlace& place) override {
    check_rank(rank, group_->world_size());
    check_host("shm", place);
    return std::make_unique<ShmCommunicator>(group_, rank, place.run);
  }

 private:
  const std::shared_ptr<ShmGroup> group_;
};

class SocketRanks final : public CommunicatorGroup {
 public:
  explicit SocketRanks(const GroupOptions& options)
      : ends_(make_socket_pairs(options.world_size, options.timeout)) {}

  std::unique_ptr<Communicator> join(int rank, const RankPlace& place) override {
    check_rank(rank, static_cast<int>(ends_.size()));
    check_host("tcp", place);
    const std::lock_guard lock(mutex_);
    auto end = std::move(ends_[static_cast<size_t>(rank)]);
    if (!end) throw InvalidArgument(concat("communicator 'tcp': rank ", rank, " has joined"));
    return end;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Communicator>> ends_;  // null once they have joined
};

class NcclRanks final : public CommunicatorGroup {
 public:
  explicit NcclRanks(const GroupOptions& options)
      : library_(open_nccl(options.library_folders)),
        options_{.world_size = options.world_size,
                 .id = make_nccl_id(library_),
                 .timeout = options.timeout,
                 .num_errors = options.num_errors} {}

  std::unique_ptr<Communicator> join(int rank, const RankPlace& place) override {
    check_rank(rank, options_.world_size);
    NcclOptions options = options_;
    options.rank = rank;
    options.queue = place.queue;
    options.memory = place.memory;
    options.staging_bytes = place.staging_bytes;
    auto end = std::make_unique<NcclCommunicator>(library_, std::move(options));
    end->barrier();  // connections are made by the first exchange
    return end;
  }

 private:
  const NcclLibrary library_;
  const NcclOptions options_;
};

template <class Group>
std::unique_ptr<CommunicatorGroup> make(const GroupOptions& options) {
  if (options.world_size < 1)
    throw InvalidArgument(
        concat("communicator: expected a world size of 1 or more, got ", options.world_size));
  return std::make_unique<Group>(options);
}

std::unique_ptr<CommunicatorGroup> make_single(const GroupOptions& options) {
  if (options.world_size != 1)
    throw InvalidArgument(concat("communicator 'single': expected a world size of 1, got ",
                                 options.world_size, "; use 'shm' or 'nccl'"));
  return std::make_unique<SingleGroup>();
}

constexpr std::array kRegistry{
    CommunicatorRow{"single", "one rank, which has nothing to exchange", &make_single},
    CommunicatorRow{"shm", "threads of one process, through host memory", &make<ShmRanks>},
    CommunicatorRow{"tcp", "processes, through sockets; here among threads of one",
                    &make<SocketRanks>},
    CommunicatorRow{"nccl", "NVIDIA GPUs, one a rank, through NCCL 2.18 or later",
                    &make<NcclRanks>},
};

}  // namespace

std::span<const CommunicatorRow> communicator_registry() { return kRegistry; }

const CommunicatorRow& find_communicator(std::string_view name) {
  std::string names;
  for (const CommunicatorRow& row : kRegistry) {
    if (row.name == name) return row;
    names += concat(names.empty() ? "" : ", ", row.name);
  }
  throw NotSupported(concat("communicator '", name, "' is not supported; use one of: ", names));
}

}  // namespace llmserve
