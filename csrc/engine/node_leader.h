// Rank 0's side of a model on several processes: it waits for the others, tells them each step, and
// notices when one has gone.
//
// Each of the other nodes has three connections to it. Orders go down the first. On the second both
// sides say ten times a second that they live, whatever they compute: a process that says nothing
// for three seconds, or a wire that brings nothing, is given up. KV blocks go over the third,
// beside the steps (engine/node_blocks.h).
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "api/engine_config.h"
#include "comm/rank_door.h"
#include "engine/local_ranks.h"

namespace llmserve {

inline constexpr std::chrono::milliseconds kBeatInterval{100};
inline constexpr std::chrono::milliseconds kLostAfter{3000};

class NodeLeader {
 public:
  // Listens from now on. settings: what all nodes have alike; decided: what the others take over
  // (node_settings.h). `on_loss` is called on a thread of this object when a node has gone. Throws
  // InvalidArgument where it cannot listen.
  NodeLeader(const ParallelConfig& parallel, std::string settings, std::string decided,
             std::function<void()> on_loss);
  ~NodeLeader();  // the others end
  NodeLeader(const NodeLeader&) = delete;
  NodeLeader& operator=(const NodeLeader&) = delete;

  // Waits until all nodes are here and have met. Throws DeviceError after the cluster's timeout,
  // and after cancel().
  std::vector<RankEnds> meet();
  bool has_lost() const;
  // Sends a step, or what a head does, to all. Throws DeviceError.
  void run(RankFrameType type, Bytes payload);
  // Sends an order to all, and waits until they have carried it out. Throws DeviceError with what a
  // node says of it.
  void order(RankFrameType type, uint8_t part);
  // A frame about a block to each node, one after another, and take(payload) of each answer, which
  // is of that type. Any thread. Throws DeviceError; a node that does not answer is lost.
  void ask_blocks(RankFrameType type, Bytes payload, RankFrameType answer,
                  const std::function<void(Bytes payload)>& take);
  // After a step that failed: what other nodes say of it, in a moment; empty: nothing.
  std::string reasons();
  // Whoever waits in it waits no more, for good. Any thread.
  void cancel() noexcept { door_.close(); }

 private:
  // Whoever has the mutex sends, and waits for the answer.
  struct BlocksLink {
    std::mutex mutex;
    std::unique_ptr<RankLink> link;
  };
  struct Follower {
    std::unique_ptr<RankLink> orders;
    std::unique_ptr<RankLink> beats;
    std::shared_ptr<BlocksLink> blocks;
    std::string door;    // where later nodes find it
    std::string reason;  // why it was lost, as it says
    Deadline last_beat;
    bool is_lost = true;  // has not come, or has gone
  };

  RankWelcome admit(const RankHello& hello) const;
  void await_all(Deadline until);
  bool take(size_t node, Deadline until);
  void lose(Follower& follower);
  // Unless it has come anew since.
  void lose(Follower& follower, const std::shared_ptr<BlocksLink>& blocks);
  std::vector<RankEnds> try_to_meet(Deadline until);
  RankFrame receive(size_t node, Deadline until);
  void watch();

  const ParallelConfig parallel_;
  const std::string settings_, decided_;
  const std::function<void()> on_loss_;
  uint64_t epoch_ = 0;
  // Of what other threads use, too: beats, blocks, last_beat, is_lost.
  mutable std::mutex mutex_;
  std::vector<Follower> followers_;  // [nodes], the first unused
  bool is_over_ = false;
  std::condition_variable over_;
  RankDoor door_;       // it asks who may come
  std::thread thread_;  // that watches
};

}  // namespace llmserve
