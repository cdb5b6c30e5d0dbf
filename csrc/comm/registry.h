// The kinds of communicators: the only place that lists them.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/host_threads.h"
#include "core/device_queue.h"
#include "core/memory.h"

namespace llmserve {

struct GroupOptions {
  int world_size = 1;
  // For the others to come, and for what is under way to end: minutes, since a rank may compile or
  // load first.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  std::vector<std::string> library_folders;  // to be looked for libraries in, before other places
  // Counts what a library reports as failed, and time limits that are over; null: nobody asks.
  std::shared_ptr<std::atomic<int64_t>> num_errors;
};

// Where a rank computes.
struct RankPlace {
  Memory* memory = nullptr;
  DeviceQueue queue;  // of the device that is current where calls are made; none on a host
  HostThreads run;    // of the rank, for large copies in host memory; none: its own thread alone
  // Of the largest tensor that columns are gathered in, so that no exchange takes memory.
  int64_t staging_bytes = 0;
};

// Ranks, threads of this process, that are to exchange tensors. Any thread may call it.
class CommunicatorGroup {
 public:
  virtual ~CommunicatorGroup() = default;

  // The end of a rank, on that rank's thread; it may outlive the group. May wait for the other
  // ranks. Throws InvalidArgument for a rank outside [0, world size), NotSupported for a place that
  // tensors cannot be exchanged from, DeviceError if the ranks do not meet.
  virtual std::unique_ptr<Communicator> join(int rank, const RankPlace& place) = 0;
};

struct CommunicatorRow {
  std::string_view name;
  std::string_view summary;
  // Throws InvalidArgument for a world size that it has not, NotSupported where something is
  // missing on this machine.
  std::unique_ptr<CommunicatorGroup> (*make)(const GroupOptions& options);
};

std::span<const CommunicatorRow> communicator_registry();
// Throws NotSupported that lists the names.
const CommunicatorRow& find_communicator(std::string_view name);

}  // namespace llmserve
