// The ranks of a model on several processes meet: each pair of a group gets a connection.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/rank_door.h"

namespace llmserve {

// Ranks that exchange with each other.
struct RankGroup {
  uint32_t id = 0;         // of the meeting
  std::vector<int> nodes;  // [world size] of each rank
};

struct MeetingPlace {
  int node = 0;
  std::string key;
  RankDoor* door = nullptr;  // null: nobody comes here, of the last node
  RankMeeting meeting;
  std::chrono::milliseconds timeout{};  // of exchanges
};

// The ends of this node's ranks of the group, in their order: [world size], null for others'. All
// nodes call it for the same groups in the same order. Throws DeviceError past the deadline.
std::vector<std::unique_ptr<Communicator>> meet_ranks(const RankGroup& group,
                                                      const MeetingPlace& place, Deadline until);

}  // namespace llmserve
