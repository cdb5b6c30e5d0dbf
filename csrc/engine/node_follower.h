// A process that has some ranks of a model and takes no requests: it computes what rank 0's process
// tells it (node_leader.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "api/engine_config.h"
#include "comm/rank_door.h"
#include "engine/config_resolver.h"
#include "engine/head_wire.h"
#include "engine/kv_block_bytes.h"
#include "engine/local_head.h"
#include "engine/local_ranks.h"
#include "engine/step_copy.h"
#include "engine/step_wire.h"

namespace llmserve {

class NodeFollower {
 public:
  // checkpoint: request.model, opened. Throws what plan_memory throws but for what does not fit.
  // wrap: changes the ends of each of its ranks, for tests; none: they stay.
  using WrapEnds = std::function<void(RankEnds&)>;
  NodeFollower(ConfigRequest request, std::shared_ptr<const Checkpoint> checkpoint,
               const RankPatience& patience = kHostPatience, WrapEnds wrap = {});
  ~NodeFollower();
  NodeFollower(const NodeFollower&) = delete;
  NodeFollower& operator=(const NodeFollower&) = delete;

  // Finds rank 0's process, loads the weights of its own ranks, and computes until that process
  // ends, or stop(). Where the connection breaks it looks for that process anew, with the weights
  // that it has. Throws DeviceError where there is none within the cluster's timeout,
  // InvalidArgument where that process refuses it, and what loading throws. On one thread, once.
  // Throws RankLeft where the thread of a rank hangs. If that is the caller's own it does not
  // return: left() says so.
  void run();
  // Why a thread was left where it is; then this must not be destroyed. Empty: none was. Any
  // thread.
  std::string left() const;
  // Any thread.
  void stop() noexcept;
  // Steps that it has computed.
  int64_t num_steps() const { return num_steps_; }

 private:
  void load();
  void find_leader();
  void say_hello();
  bool obey(const RankFrame& frame);
  std::vector<RankEnds> meet(RankMeeting meeting);
  void join(std::vector<RankEnds> ends);
  SocketAddress leader_address() const;
  void load_head();
  bool has_last_stage() const { return config_.parallel.num_local_last_ranks() > 0; }
  void run_step(Bytes payload);
  void run_head(Bytes payload);
  void keep_states(Bytes payload);
  void begin_blocks();
  void end_blocks();
  void give_up_exchanges() noexcept;
  void leave();
  void leave_thread(const std::string& reason) noexcept;
  void lose_leader() noexcept;
  void watch();
  void check_devices() noexcept;
  void check_goes_on() const;

  ConfigRequest request_;
  const std::shared_ptr<const Checkpoint> checkpoint_;
  EngineConfig config_;
  const std::string settings_;
  const WrapEnds wrap_;
  int32_t num_blocks_ = 0;  // that rank 0's process has decided when this one came first
  RankThreads ranks_;
  std::vector<std::unique_ptr<Worker>> workers_;  // [local ranks]
  std::unique_ptr<StepReader> reader_;
  StepCopy copy_;                    // of what it reads, for devices
  std::unique_ptr<LocalHead> head_;  // that drafts; null: there is none
  std::unique_ptr<HeadStepReader> head_reader_;
  std::unique_ptr<RankDoor> door_;  // null until rank 0's process is found, and of the last node
  // Of KV blocks that node 0 reads and writes, for each time that it is found.
  std::unique_ptr<KvBlockBytes> block_bytes_;
  std::thread blocks_thread_;
  std::atomic<bool> has_cache_{true};
  bool has_met_ = false;
  std::atomic<int64_t> num_steps_{0};
  std::atomic<bool> is_stopped_{false};
  std::atomic<bool> has_ended_{false};  // rank 0's process, and has said so

  mutable std::mutex mutex_;  // of what other threads end
  std::condition_variable over_;
  std::unique_ptr<RankLink> orders_, beats_, blocks_;
  Deadline last_beat_;
  std::string left_;        // why a thread was
  bool can_abort_ = false;  // the workers have ends that nobody replaces now
  std::thread thread_;      // that watches
};

}  // namespace llmserve
