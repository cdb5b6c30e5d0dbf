#include "engine/node_follower.h"

#include <string_view>
#include <utility>

#include "core/start_thread.h"
#include "engine/memory_planner.h"
#include "engine/node_blocks.h"
#include "engine/node_leader.h"
#include "engine/node_settings.h"
#include "engine/rank_devices.h"
#include "engine/worker_plan.h"
#include "kernels/device_steps.h"
#include "kv_cache/cache_groups.h"
#include "speculation/registry.h"

namespace llmserve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kBetweenTries{200};
constexpr std::chrono::seconds kGreetingTime{10};
constexpr std::chrono::seconds kMeetingTime{30};
constexpr std::chrono::seconds kPatience{60};
constexpr std::chrono::hours kForever{24 * 365};

// A device may take as long as it likes.
bool is_host(std::string_view device) { return device == "cpu" || device == "ref"; }

// Logits and hidden states are rank 0's.
class NoSink final : public StepSink {
  void take_hidden(const ConstTensor&) override { fail(); }
  void take_pooled_logits(const ConstTensor&, const PooledRows&) override { fail(); }
  void take_logits(const ConstTensor&, size_t) override { fail(); }
  [[noreturn]] static void fail() {
    throw InternalError("a rank of another process has no outputs; please report this");
  }
};

StepLimits limits_of(const EngineConfig& config, const Worker& worker) {
  return {.max_tokens = config.scheduler.max_num_batched_tokens,
          .max_sequences = config.scheduler.max_num_seqs,
          .max_model_len = config.scheduler.max_model_len,
          .vocab_size = worker.vocab_size(),
          .hidden_size = worker.hidden_size(),
          .num_layers = worker.model().config().num_layers,
          .num_blocks = config.cache.num_blocks,
          .block_size = config.cache.block_size,
          .num_state_slots = config.cache.num_state_slots,
          .num_groups = row_groups(config.cache.groups).size(),
          .max_wanted_layers = config.max_wanted_layers,
          .has_halves = config.parallel.has_halves()};
}

}  // namespace

NodeFollower::NodeFollower(ConfigRequest request, std::shared_ptr<const Checkpoint> checkpoint,
                           const RankPatience& patience, WrapEnds wrap)
    : request_(std::move(request)),
      checkpoint_(std::move(checkpoint)),
      config_(plan_memory(request_, *checkpoint_).config),
      settings_(node_settings(config_, *checkpoint_)),
      wrap_(std::move(wrap)),
      ranks_(config_.parallel.num_local_ranks(),
             {.on_failure = [this] { give_up_exchanges(); },
              .patience = is_host(config_.device) ? patience : RankPatience(),
              .has_far_ranks = true,
              .on_left = [this](const std::string& reason) { leave_thread(reason); }}) {
  if (config_.parallel.node == 0)
    throw InvalidArgument("node_rank=0 has rank 0 and takes requests: make an LLM of it");
  thread_ = start_thread([this] { watch(); });
}

NodeFollower::~NodeFollower() {
  stop();
  thread_.join();
  end_blocks();
  head_.reset();
  if (workers_.empty()) return;
  ranks_.run([this](int local) { workers_[static_cast<size_t>(local)].reset(); });
}

// Its memory has to hold the blocks that rank 0's process has decided on.
void NodeFollower::load() {
  try {
    request_.num_blocks = num_blocks_;
    config_ = resolve_config(request_, *checkpoint_);
    config_.defer_packing = false;  // nobody gives it time between two steps
    auto workers = make_workers(ranks_, config_, *checkpoint_, nullptr);
    {
      const std::lock_guard lock(mutex_);
      workers_ = std::move(workers);
    }
    load_head();
  } catch (const Error& error) {
    orders_->send(RankFrameType::kFailed, text_payload(error.what()), kPatience);
    throw;
  }
  reader_ = std::make_unique<StepReader>(limits_of(config_, *workers_[0]));
}

void NodeFollower::load_head() {
  if (!config_.draft || !find_drafter(config_.speculation.method).has_head()) return;
  if (config_.parallel.num_local_last_ranks() == 0) return;
  std::vector<const Worker*> workers;
  for (const auto& worker : workers_) workers.push_back(worker.get());
  head_ = std::make_unique<LocalHead>(
      HeadSource{.kind = head_kind(config_.speculation.method), .config = *config_.draft},
      std::move(workers), [this](const std::function<void(int rank)>& work) { ranks_.run(work); });
  const EngineConfig& draft = *config_.draft;
  const HeadConfig& head = head_->config();
  head_reader_ = std::make_unique<HeadStepReader>(
      HeadLimits{.max_rows = draft.scheduler.max_num_batched_tokens,
                 .max_model_len = draft.scheduler.max_model_len,
                 .vocab_size = workers_[0]->vocab_size(),
                 .num_kept = head_->num_kept(),
                 .num_outputs = num_head_outputs(head, draft),
                 .max_place = config_.speculation.num_speculative_tokens - 1,
                 .num_blocks = head.has_cache() ? draft.cache.num_blocks : 0,
                 .block_size = draft.cache.block_size});
}

void NodeFollower::stop() noexcept {
  is_stopped_ = true;
  {
    const std::lock_guard lock(mutex_);
    if (door_) door_->close();
  }
  lose_leader();
}

void NodeFollower::check_goes_on() const {
  if (is_stopped_) throw DeviceError("the node has been stopped");
}

// Tries until the time is over: rank 0's process may start later, or anew.
void NodeFollower::find_leader() {
  const Deadline until = Clock::now() + std::chrono::seconds(config_.parallel.cluster_timeout_s);
  while (true) {
    check_goes_on();
    try {
      return say_hello();
    } catch (const RankRefusal& error) {
      throw InvalidArgument(concat("node 0 refuses this one: ", error.what()));
    } catch (const DeviceError& error) {
      check_goes_on();
      if (Clock::now() > until)
        throw DeviceError(concat("node 0 is not found at ", config_.parallel.master_address, ":",
                                 config_.parallel.master_port, " in ",
                                 config_.parallel.cluster_timeout_s, " s: ", error.what()));
      std::this_thread::sleep_for(kBetweenTries);
    }
  }
}

SocketAddress NodeFollower::leader_address() const {
  return {.scheme = "tcp",
          .host = config_.parallel.master_address,
          .port = static_cast<uint16_t>(config_.parallel.master_port)};
}

void NodeFollower::say_hello() {
  const ParallelConfig& parallel = config_.parallel;
  const SocketAddress leader = leader_address();
  const auto node = static_cast<uint32_t>(parallel.node);
  const Deadline until = Clock::now() + kGreetingTime;
  auto orders = std::make_unique<RankLink>(-1);
  orders->connect(leader, until);
  if (!door_ && parallel.node + 1 < parallel.nodes) {
    SocketAddress own = orders->socket().own_address();
    own.port = 0;
    auto door = std::make_unique<RankDoor>(own, parallel.cluster_key,
                                           [](const RankHello& hello) -> RankWelcome {
                                             if (hello.place.purpose != RankPurpose::kExchange)
                                               throw RankRefusal("orders come from node 0");
                                             return {};
                                           });
    const std::lock_guard lock(mutex_);
    door_ = std::move(door);
  }
  const RankWelcome welcome =
      orders->greet(parallel.cluster_key,
                    {.place = {.purpose = RankPurpose::kOrders, .node = node},
                     .port = door_ ? uint32_t{door_->address().port} : 0,
                     .settings = settings_},
                    until);
  const int32_t num_blocks = read_decided_blocks(welcome.settings);
  if (num_blocks_ > 0 && num_blocks != num_blocks_)
    throw RankRefusal("node 0 has another KV cache than before; start this node anew");
  num_blocks_ = num_blocks;
  auto beats = std::make_unique<RankLink>(-1);
  beats->connect(leader, until);
  beats->greet(parallel.cluster_key, {.place = {.purpose = RankPurpose::kBeats, .node = node}},
               until);
  auto blocks = std::make_unique<RankLink>(-1);
  blocks->connect(leader, until);
  blocks->greet(parallel.cluster_key, {.place = {.purpose = RankPurpose::kBlocks, .node = node}},
                until);
  const std::lock_guard lock(mutex_);
  orders_ = std::move(orders);
  beats_ = std::move(beats);
  blocks_ = std::move(blocks);
  last_beat_ = Clock::now();
}

void NodeFollower::run() {
  while (!is_stopped_) {
    try {
      if (!orders_) find_leader();
      if (workers_.empty()) load();
      begin_blocks();
      orders_->send(RankFrameType::kDone, {}, kPatience);
      while (obey(orders_->receive(Clock::now() + kForever))) {
      }
      return;
    } catch (const RankLeft&) {
      throw;
    } catch (const DeviceError&) {
      if (is_stopped_ || has_ended_) return;
      leave();
      end_blocks();
      const std::lock_guard lock(mutex_);
      const bool was_known = orders_ != nullptr;
      orders_.reset();
      beats_.reset();
      blocks_.reset();
      if (!was_known) throw;  // it was looked for in vain
    }
  }
}

// Whether there may be more to do. A step or an order that fails is told to rank 0's process.
bool NodeFollower::obey(const RankFrame& frame) {
  std::string failure;
  try {
    switch (frame.head.type) {
      case RankFrameType::kMeet: {
        const RankMeeting meeting = read_rank_meeting(frame.payload);
        std::vector<RankEnds> ends = meet(meeting);
        orders_->send(RankFrameType::kMet, epoch_payload(meeting.epoch), kPatience);
        join(std::move(ends));
        return true;
      }
      case RankFrameType::kStep:
        if (has_met_) run_step(frame.payload);  // else of before a failure
        return true;
      // What is said of a head is said to nodes that have none of it, too.
      case RankFrameType::kKeepStates:
        if (has_met_ && has_last_stage()) keep_states(frame.payload);
        return true;
      case RankFrameType::kHeadStep:
        if (has_met_ && has_last_stage()) run_head(frame.payload);
        return true;
      case RankFrameType::kRelease:
      case RankFrameType::kRestore: {
        const auto part = std::to_integer<uint8_t>(frame.payload[0]);
        if (frame.payload.size() != 1 || part >= kNumMemoryParts)
          throw DeviceError("an order about memory that there is not");
        const bool is_release = frame.head.type == RankFrameType::kRelease;
        if (static_cast<MemoryPart>(part) == MemoryPart::kKvCache) has_cache_ = false;
        ranks_.run([&](int local) {
          Worker& worker = *workers_[static_cast<size_t>(local)];
          if (is_release)
            worker.release(static_cast<MemoryPart>(part));
          else
            worker.restore(static_cast<MemoryPart>(part));
        });
        if (!is_release && static_cast<MemoryPart>(part) == MemoryPart::kKvCache) has_cache_ = true;
        if (head_ && is_release) head_->release(static_cast<MemoryPart>(part));
        if (head_ && !is_release) head_->restore(static_cast<MemoryPart>(part));
        orders_->send(RankFrameType::kDone, {}, kPatience);
        return true;
      }
      case RankFrameType::kEnd:
        return false;
      default:
        throw DeviceError("an order that is none");
    }
  } catch (const RankLeft& error) {
    leave_thread(error.what());
    throw;
  } catch (const std::exception& error) {
    failure = error.what();
  }
  leave();
  orders_->send(RankFrameType::kFailed, text_payload(failure), kPatience);
  return true;
}

std::vector<RankEnds> NodeFollower::meet(RankMeeting meeting) {
  leave();
  if (meeting.doors.size() != static_cast<size_t>(config_.parallel.nodes))
    throw DeviceError("a meeting of other nodes");
  meeting.doors[0] = leader_address().text();  // as this node has found it
  return meet_nodes(config_.parallel,
                    {.node = config_.parallel.node,
                     .key = config_.parallel.cluster_key,
                     .door = door_.get(),
                     .meeting = std::move(meeting),
                     .timeout = std::chrono::minutes(10)},
                    Clock::now() + kMeetingTime);
}

// Devices meet when all nodes have, node 0's among them.
void NodeFollower::join(std::vector<RankEnds> ends) {
  if (has_rank_devices(config_))
    ranks_.run([&](int local) {
      RankEnds& end = ends[static_cast<size_t>(local)];
      end = meet_on_devices(std::move(end), *workers_[static_cast<size_t>(local)], nullptr);
    });
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < ends.size(); ++i) {
    if (wrap_) wrap_(ends[i]);
    workers_[i]->join(std::move(ends[i]));
  }
  has_met_ = can_abort_ = true;
}

void NodeFollower::run_step(Bytes payload) {
  const StepBatch& read = reader_->read(payload);
  DeviceSteps* const first = workers_[0]->steps();
  std::span<std::byte> block;
  if (first != nullptr) block = first->begin(StepCopy::num_bytes(read), 0, 0);
  const StepBatch& batch = first != nullptr ? copy_.lay_out(read, block) : read;
  const RankThreads::Awaited awaited(ranks_);
  ranks_.run([&](int local) {
    Worker& worker = *workers_[static_cast<size_t>(local)];
    DeviceSteps* const steps = worker.steps();
    if (steps != nullptr) {
      if (local > 0) steps->follow(block, 0, 0);
      steps->bring_over();
    }
    NoSink sink;
    worker.prepare(batch);
    worker.run(batch, sink);
    if (steps != nullptr) steps->end();
  });
  ++num_steps_;
}

void NodeFollower::run_head(Bytes payload) {
  if (!head_) throw DeviceError("a step of a head that there is not");
  const HeadStep& step = head_reader_->read(payload);
  head_->lay_out(step);
  const RankThreads::Awaited awaited(ranks_);
  ranks_.run([&](int local) {
    head_->run(local, step, [](const ConstTensor&, size_t) {
      throw InternalError("a rank of another process draws nothing; please report this");
    });
  });
  head_->check_files();
}

// Copies of a device need not follow its steps: what a step does to the KV cache comes before what
// it exchanges, and rank 0's process asks for blocks of steps whose results it has.
void NodeFollower::begin_blocks() {
  std::vector<const Worker*> workers;
  for (const auto& worker : workers_) {
    worker->open_copies();
    workers.push_back(worker.get());
  }
  block_bytes_ = std::make_unique<KvBlockBytes>(workers);
  blocks_thread_ = start_thread([this, &link = *blocks_] {
    try {
      serve_blocks(link, *block_bytes_, config_.cache.num_blocks,
                   [this] { return has_cache_.load(); });
    } catch (const std::exception&) {
      lose_leader();
    }
  });
}

// When it returns nobody writes to the KV cache beside the steps.
void NodeFollower::end_blocks() {
  {
    const std::lock_guard lock(mutex_);
    if (blocks_) blocks_->cancel();
  }
  if (blocks_thread_.joinable()) blocks_thread_.join();
}

// Of what the last step has left.
void NodeFollower::keep_states(Bytes payload) {
  if (!head_) throw DeviceError("states for a head that there is not");
  const Tensor& states = workers_[0]->layer_states();
  const int64_t num_tokens = states.data == nullptr ? 0 : states.shape[1];
  head_->keep(states, head_reader_->read_kept_places(payload, num_tokens));
}

// Ends what the ranks are exchanging. Any thread.
void NodeFollower::give_up_exchanges() noexcept {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(can_abort_, false)) return;
  for (const auto& worker : workers_) worker->abort_exchanges();
}

// The other ranks notice that this one's ends are closed.
void NodeFollower::leave() {
  give_up_exchanges();  // so that no device waits for others in them
  const std::lock_guard lock(mutex_);
  has_met_ = can_abort_ = false;
  for (const auto& worker : workers_)
    if (worker) worker->join(RankEnds::alone());
}

// Node 0 finds that this one has gone, and waits for another.
void NodeFollower::leave_thread(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    left_ = reason;
  }
  is_stopped_ = true;
  lose_leader();
}

std::string NodeFollower::left() const {
  const std::lock_guard lock(mutex_);
  return left_;
}

void NodeFollower::lose_leader() noexcept {
  give_up_exchanges();
  const std::lock_guard lock(mutex_);
  if (orders_) orders_->cancel();
  if (beats_) beats_->cancel();
  if (blocks_) blocks_->cancel();
  over_.notify_one();
}

// Says that this process lives, and looks whether rank 0's does.
void NodeFollower::watch() {
  while (true) {
    bool is_lost = false;
    {
      std::unique_lock lock(mutex_);
      if (over_.wait_for(lock, kBeatInterval, [this] { return is_stopped_.load(); })) return;
      if (!beats_) continue;
      try {
        while (beats_->is_readable(Clock::now())) {
          const RankFrame frame = beats_->receive(Clock::now() + kBeatInterval);
          if (frame.head.type == RankFrameType::kEnd) has_ended_ = true;
          last_beat_ = Clock::now();
        }
        beats_->send(RankFrameType::kBeat, {}, std::chrono::milliseconds(1));
        is_lost = Clock::now() - last_beat_ > kLostAfter;
      } catch (const DeviceError&) {
        is_lost = true;
      }
      if (is_lost) beats_.reset();
    }
    if (is_lost) lose_leader();
    check_devices();
  }
}

// What devices exchange the host does not wait for: it is looked at here whether another rank has
// given it up.
void NodeFollower::check_devices() noexcept {
  if (!has_rank_devices(config_)) return;
  try {
    const std::lock_guard lock(mutex_);
    if (!can_abort_) return;
    for (const auto& worker : workers_) worker->check_exchanges();
    return;
  } catch (const Error&) {
  }
  give_up_exchanges();
}

}  // namespace llmserve
