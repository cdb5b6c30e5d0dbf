#include "comm/rank_meeting.h"

#include <utility>

#include "comm/tcp_communicator.h"

namespace llmserve {
namespace {

using Links = std::vector<std::vector<std::unique_ptr<RankLink>>>;  // [rank][other]

std::unique_ptr<RankLink> go_to(const MeetingPlace& place, int node, const RankPlaceName& name,
                                Deadline until) {
  auto link = std::make_unique<RankLink>(-1);
  link->connect(SocketAddress::parse(place.meeting.doors[static_cast<size_t>(node)]), until);
  link->greet(place.key, {.place = name}, until);
  return link;
}

}  // namespace

// Who is on a later node goes to who is on an earlier one. All go before any waits.
std::vector<std::unique_ptr<Communicator>> meet_ranks(const RankGroup& group,
                                                      const MeetingPlace& place, Deadline until) {
  const size_t size = group.nodes.size();
  Links links(size);
  for (auto& row : links) row.resize(size);
  const auto visit = [&](const auto& connect) {
    for (size_t rank = 0; rank < size; ++rank)
      for (size_t other = 0; other < size; ++other)
        if (rank != other && group.nodes[rank] == place.node) connect(rank, other);
  };
  const auto name = [&](size_t from, size_t to) {
    return RankPlaceName{.purpose = RankPurpose::kExchange,
                         .node = static_cast<uint32_t>(group.nodes[from]),
                         .epoch = place.meeting.epoch,
                         .group = group.id,
                         .from = static_cast<uint32_t>(from),
                         .to = static_cast<uint32_t>(to)};
  };
  visit([&](size_t rank, size_t other) {
    if (group.nodes[other] == place.node) {
      if (rank < other) std::tie(links[rank][other], links[other][rank]) = RankLink::make_pair();
    } else if (group.nodes[other] < place.node) {
      links[rank][other] = go_to(place, group.nodes[other], name(rank, other), until);
    }
  });
  visit([&](size_t rank, size_t other) {
    if (group.nodes[other] <= place.node) return;
    std::optional<RankDoor::Comer> comer = place.door->take(name(other, rank), until);
    if (!comer) throw DeviceError(concat("node ", group.nodes[other], " has not come to meet"));
    links[rank][other] = std::move(comer->link);
  });
  std::vector<std::unique_ptr<Communicator>> ends(size);
  for (size_t rank = 0; rank < size; ++rank)
    if (group.nodes[rank] == place.node)
      ends[rank] = std::make_unique<TcpCommunicator>(static_cast<int>(rank), std::move(links[rank]),
                                                     place.timeout);
  return ends;
}

}  // namespace llmserve
