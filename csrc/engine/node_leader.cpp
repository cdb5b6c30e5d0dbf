#include "engine/node_leader.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/start_thread.h"
#include "engine/node_settings.h"

namespace llmserve {
namespace {

using Clock = std::chrono::steady_clock;

// For ranks to connect to each other, once all are there.
constexpr std::chrono::seconds kMeetingTime{30};
// For a node to take an order's bytes.
constexpr std::chrono::seconds kPatience{60};
// For what a node says of a step that failed on it.
constexpr std::chrono::milliseconds kReasonTime{300};
// For a block to go, and for its answer to come.
constexpr std::chrono::seconds kBlockTime{10};
// Weights may be read anew.
constexpr std::chrono::minutes kOrderTime{30};

}  // namespace

NodeLeader::NodeLeader(const ParallelConfig& parallel, std::string settings, std::string decided,
                       std::function<void()> on_loss)
    : parallel_(parallel),
      settings_(std::move(settings)),
      decided_(std::move(decided)),
      on_loss_(std::move(on_loss)),
      followers_(static_cast<size_t>(parallel.nodes)),
      door_({.scheme = "tcp",
             .host = parallel.master_address,
             .port = static_cast<uint16_t>(parallel.master_port)},
            parallel.cluster_key, [this](const RankHello& hello) { return admit(hello); }) {
  thread_ = start_thread([this] { watch(); });
}

NodeLeader::~NodeLeader() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    over_.notify_one();
  }
  thread_.join();
  for (Follower& follower : followers_) {
    RankLink* const blocks = follower.blocks ? follower.blocks->link.get() : nullptr;
    for (RankLink* link : {follower.beats.get(), follower.orders.get(), blocks}) {
      try {
        if (link != nullptr) link->send(RankFrameType::kEnd, {}, kBeatInterval);
      } catch (const Error&) {
      }
    }
  }
}

RankWelcome NodeLeader::admit(const RankHello& hello) const {
  if (hello.place.purpose == RankPurpose::kExchange) return {};
  if (hello.place.node < 1 || hello.place.node >= followers_.size())
    throw RankRefusal(concat("node_rank=", hello.place.node, " of nnodes=", followers_.size(),
                             ": there is no such node"));
  if (hello.place.purpose != RankPurpose::kOrders) return {};
  if (std::string text = describe_difference(hello.settings, settings_); !text.empty())
    throw RankRefusal(concat("node ", hello.place.node, " would compute something else: ", text));
  return {.nonce = {}, .settings = decided_};
}

// The node's newest connections, if it has come and has loaded its weights.
bool NodeLeader::take(size_t node, Deadline until) {
  const auto id = static_cast<uint32_t>(node);
  std::optional<RankDoor::Comer> orders =
      door_.take({.purpose = RankPurpose::kOrders, .node = id}, until);
  if (!orders) return false;
  std::optional<RankDoor::Comer> beats = door_.take({.purpose = RankPurpose::kBeats, .node = id},
                                                    std::max(until, Clock::now() + kMeetingTime));
  if (!beats) return false;
  std::optional<RankDoor::Comer> blocks = door_.take({.purpose = RankPurpose::kBlocks, .node = id},
                                                     std::max(until, Clock::now() + kMeetingTime));
  if (!blocks) return false;
  auto blocks_link = std::make_shared<BlocksLink>();
  blocks_link->link = std::move(blocks->link);
  SocketAddress door = orders->link->socket().peer_address();
  door.port = static_cast<uint16_t>(orders->hello.port);
  {
    const std::lock_guard lock(mutex_);
    followers_[node] = {.orders = std::move(orders->link),
                        .beats = std::move(beats->link),
                        .blocks = std::move(blocks_link),
                        .door = door.text(),
                        .reason = {},
                        .last_beat = Clock::now(),
                        .is_lost = false};
  }
  try {
    const RankFrame frame = receive(node, std::max(until, Clock::now() + kMeetingTime));
    if (frame.head.type == RankFrameType::kDone) return true;
    throw DeviceError(frame.head.type == RankFrameType::kFailed ? read_text_payload(frame.payload)
                                                                : "it answers something else");
  } catch (const DeviceError& error) {
    followers_[node].reason = error.what();
    lose(followers_[node]);
    return false;
  }
}

void NodeLeader::await_all(Deadline until) {
  for (size_t node = 1; node < followers_.size(); ++node) {
    const auto is_missing = [&] {
      const std::lock_guard lock(mutex_);
      return followers_[node].is_lost;
    };
    take(node, Clock::now());  // anew, before its end was noticed
    while (is_missing() && !take(node, until) && Clock::now() < until && !door_.is_closed()) {
    }
    if (!is_missing()) continue;
    if (door_.is_closed()) throw DeviceError("the engine is closed");
    std::string refusal = followers_[node].reason;
    if (refusal.empty()) refusal = door_.last_refusal();
    throw DeviceError(concat("node ", node, " has not come to ", door_.address().text(), " in ",
                             parallel_.cluster_timeout_s, " s",
                             refusal.empty() ? "" : concat("; last: ", refusal)));
  }
}

void NodeLeader::lose(Follower& follower) {
  std::shared_ptr<BlocksLink> blocks;
  {
    const std::lock_guard lock(mutex_);
    blocks = follower.blocks;
  }
  lose(follower, blocks);
}

void NodeLeader::lose(Follower& follower, const std::shared_ptr<BlocksLink>& blocks) {
  const std::lock_guard lock(mutex_);
  if (follower.blocks != blocks) return;
  follower.is_lost = true;
  if (follower.orders) follower.orders->cancel();
  if (follower.blocks) follower.blocks->link->cancel();
  follower.beats.reset();
}

std::vector<RankEnds> NodeLeader::meet() {
  const Deadline until = Clock::now() + std::chrono::seconds(parallel_.cluster_timeout_s);
  while (true) {
    await_all(until);
    try {
      return try_to_meet(until);
    } catch (const DeviceError&) {  // one has gone meanwhile
      if (door_.is_closed() || Clock::now() > until) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
}

std::vector<RankEnds> NodeLeader::try_to_meet(Deadline until) {
  RankMeeting meeting{.epoch = ++epoch_};
  for (const Follower& follower : followers_) meeting.doors.push_back(follower.door);
  meeting.doors[0] = door_.address().text();
  const auto each = [&](const auto& work) {
    for (size_t node = 1; node < followers_.size(); ++node) {
      try {
        work(node);
      } catch (const DeviceError&) {
        lose(followers_[node]);
        throw;
      }
    }
  };
  each([&](size_t node) {
    followers_[node].orders->send(RankFrameType::kMeet, to_bytes(meeting), kPatience);
  });
  const Deadline soon = std::min(until, Clock::now() + kMeetingTime);
  std::vector<RankEnds> ends = meet_nodes(parallel_,
                                          {.node = 0,
                                           .key = parallel_.cluster_key,
                                           .door = &door_,
                                           .meeting = meeting,
                                           .timeout = std::chrono::minutes(10)},
                                          soon);
  each([&](size_t node) {
    // What it says of earlier steps and meetings comes first.
    while (true) {
      const RankFrame frame = receive(node, soon);
      const bool is_met = frame.head.type == RankFrameType::kMet;
      if (is_met && read_epoch_payload(frame.payload) == meeting.epoch) return;
      if (!is_met && frame.head.type != RankFrameType::kFailed)
        throw DeviceError(concat("node ", node, " answers something else"));
    }
  });
  return ends;
}

RankFrame NodeLeader::receive(size_t node, Deadline until) {
  try {
    return followers_[node].orders->receive(until);
  } catch (const DeviceError& error) {
    throw DeviceError(concat("node ", node, ": ", error.what()));
  }
}

bool NodeLeader::has_lost() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(followers_.begin() + 1, followers_.end(), &Follower::is_lost);
}

void NodeLeader::run(RankFrameType type, Bytes payload) {
  for (size_t node = 1; node < followers_.size(); ++node) {
    try {
      followers_[node].orders->send(type, payload, kPatience);
    } catch (const DeviceError& error) {
      lose(followers_[node]);
      throw DeviceError(concat("node ", node, ": ", error.what()));
    }
  }
}

void NodeLeader::order(RankFrameType type, uint8_t part) {
  const std::array payload{static_cast<std::byte>(part)};
  for (size_t node = 1; node < followers_.size(); ++node)
    followers_[node].orders->send(type, payload, kPatience);
  std::string failure;
  for (size_t node = 1; node < followers_.size(); ++node) {
    const RankFrame frame = receive(node, Clock::now() + kOrderTime);
    if (frame.head.type == RankFrameType::kFailed)
      failure += concat(failure.empty() ? "" : "; ", "node ", node, ": ",
                        read_text_payload(frame.payload));
  }
  if (!failure.empty()) throw DeviceError(failure);
}

void NodeLeader::ask_blocks(RankFrameType type, Bytes payload, RankFrameType answer,
                            const std::function<void(Bytes payload)>& take) {
  for (size_t node = 1; node < followers_.size(); ++node) {
    std::shared_ptr<BlocksLink> blocks;
    {
      const std::lock_guard lock(mutex_);
      if (followers_[node].is_lost) throw DeviceError(concat("node ", node, " has gone"));
      blocks = followers_[node].blocks;
    }
    const std::lock_guard lock(blocks->mutex);
    std::string refusal;
    try {
      blocks->link->send(type, payload, kBlockTime);
      const RankFrame frame = blocks->link->receive(Clock::now() + kBlockTime);
      if (frame.head.type == RankFrameType::kFailed)
        refusal = read_text_payload(frame.payload);
      else if (frame.head.type == answer)
        take(frame.payload);
      else
        throw DeviceError("it answers something else");
    } catch (const DeviceError& error) {
      lose(followers_[node], blocks);
      on_loss_();
      throw DeviceError(concat("node ", node, ": ", error.what()));
    }
    if (!refusal.empty()) throw DeviceError(concat("node ", node, ": ", refusal));
  }
}

std::string NodeLeader::reasons() {
  std::string text;
  const Deadline until = Clock::now() + kReasonTime;
  for (size_t node = 1; node < followers_.size(); ++node) {
    Follower& follower = followers_[node];
    if (!follower.orders) continue;
    std::string reason;
    try {
      if (follower.orders->is_readable(until)) {
        const RankFrame frame = receive(node, Clock::now() + kReasonTime);
        if (frame.head.type == RankFrameType::kFailed) reason = read_text_payload(frame.payload);
      }
    } catch (const DeviceError&) {
      lose(follower);
      reason = "it has gone";
    }
    if (!reason.empty()) text += concat("; node ", node, ": ", reason);
  }
  return text;
}

// Says that this process lives, and looks who else does.
void NodeLeader::watch() {
  while (true) {
    bool is_loss = false;
    {
      std::unique_lock lock(mutex_);
      if (over_.wait_for(lock, kBeatInterval, [this] { return is_over_; })) return;
      for (Follower& follower : followers_) {
        if (!follower.beats) continue;
        try {
          while (follower.beats->is_readable(Clock::now())) {
            follower.beats->receive(Clock::now() + kBeatInterval);
            follower.last_beat = Clock::now();
          }
          follower.beats->send(RankFrameType::kBeat, {}, std::chrono::milliseconds(1));
          if (Clock::now() - follower.last_beat < kLostAfter) continue;
        } catch (const DeviceError&) {
        }
        follower.is_lost = is_loss = true;
        follower.beats.reset();
        follower.orders->cancel();
        follower.blocks->link->cancel();
      }
    }
    if (!is_loss) continue;
    on_loss_();
    door_.end_meeting();
  }
}

}  // namespace llmserve
