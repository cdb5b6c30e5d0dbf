#include "comm/kv_transport.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "comm/shared_slots.h"

namespace llmserve {
namespace {

constexpr std::chrono::milliseconds kLocalWait{50};  // then it looks whether it was cancelled
constexpr uint32_t kNumSlots = 8;  // one is filled, one is emptied, and some smooth it

// -- in process -----------------------------------------------------------------------------------

struct LocalHosts {
  std::shared_mutex mutex;  // shared by who reads from one, for as long as a block takes
  std::map<std::string, std::pair<KvLeases*, KvLink>> hosts;
};

LocalHosts& local_hosts() {
  static auto* const hosts = new LocalHosts;
  return *hosts;
}

class LocalTransport final : public KvTransport {
 public:
  LocalTransport(std::string address, const KvLink& link)
      : address_(std::move(address)), link_(link) {}

  void pull(const KvPull& pull, const Take& take) override {
    in_host([&](KvLeases& leases, const KvLink& link) {
      if (link.numerics_class != link_.numerics_class || link.shape != link_.shape ||
          link.key != link_.key)
        throw HandOverError(HandOverCause::kRefused,
                            "the peer has another key, numerics class or block_size");
      if (leases.epoch() != pull.epoch)
        throw HandOverError(HandOverCause::kGone, "the sender has started anew since");
      leases.wait_for(pull.id, std::chrono::steady_clock::now() + link_.timeout);
    });
    std::vector<std::byte> bytes;
    for (const BlockPlace& block : pull.blocks) {
      bytes.resize(link_.shape.block_bytes[block.group]);
      await([&](KvLeases& leases, Deadline until) {
        return leases.read(pull.id, block, bytes, until);
      });
      take(block, bytes);
    }
    await([&](KvLeases& leases, Deadline until) {
      return leases.check(pull.id, pull.num_tokens, pull.prefix, until);
    });
    in_host([&](KvLeases& leases, const KvLink&) { leases.end(pull.id); });
  }
  void cancel() noexcept override { is_cancelled_ = true; }

 private:
  template <class Do>
  void in_host(const Do& act) const {
    if (is_cancelled_)
      throw HandOverError(HandOverCause::kCancelled, "the hand-over was cancelled");
    LocalHosts& all = local_hosts();
    const std::shared_lock lock(all.mutex);
    const auto found = all.hosts.find(address_);
    if (found == all.hosts.end())
      throw HandOverError(HandOverCause::kUnreachable, "no such engine in this process");
    act(*found->second.first, found->second.second);
  }

  // Until it has come, or the lease ends.
  template <class Try>
  void await(const Try& has_come) const {
    bool is_there = false;
    while (!is_there) {
      in_host([&](KvLeases& leases, const KvLink&) {
        is_there = has_come(leases, std::chrono::steady_clock::now() + kLocalWait);
      });
    }
  }

  const std::string address_;
  const KvLink link_;
  std::atomic<bool> is_cancelled_{false};
};

// -- by sockets -----------------------------------------------------------------------------------

class SocketTransport : public KvTransport {
 public:
  SocketTransport(SocketAddress address, const KvLink& link)
      : address_(std::move(address)), link_(link), connection_(socket_, link_) {}

  void pull(const KvPull& pull, const Take& take) override {
    socket_.connect(address_, std::chrono::steady_clock::now() + link_.timeout);
    if (connection_.greet() != pull.epoch)
      throw HandOverError(HandOverCause::kGone, "the sender has started anew since");
    PullFrame asked{.id = pull.id,
                    .epoch = pull.epoch,
                    .num_tokens = pull.num_tokens,
                    .prefix = pull.prefix,
                    .blocks = pull.blocks};
    fetch(asked, take);
    receive(FrameType::kEnd);
    connection_.send(FrameType::kEnd, {});
  }
  void cancel() noexcept override { socket_.cancel(); }

 protected:
  virtual void fetch(PullFrame& asked, const Take& take) {
    connection_.send(FrameType::kPull, {to_bytes(asked)});
    for (const BlockPlace& block : asked.blocks) {
      Bytes bytes;
      check(read_block(receive(FrameType::kBlock), bytes), block);
      if (bytes.size() != link_.shape.block_bytes[block.group])
        throw HandOverError(HandOverCause::kCorrupt, "a block has not its length");
      take(block, bytes);
    }
  }
  // The payload of what comes next, once it is computed.
  Bytes receive(FrameType type) {
    while (true) {
      const Frame frame = connection_.receive({type, FrameType::kWait});
      if (frame.type == type) return frame.payload;
    }
  }
  static void check(const BlockPlace& came, const BlockPlace& asked) {
    if (came != asked)
      throw HandOverError(HandOverCause::kCorrupt, "a block came that was not asked for now");
  }

  const SocketAddress address_;
  const KvLink link_;
  StreamSocket socket_{-1};
  KvConnection connection_;
};

class SharedMemoryTransport final : public SocketTransport {
 public:
  using SocketTransport::SocketTransport;

 protected:
  void fetch(PullFrame& asked, const Take& take) override {
    const uint64_t largest = *std::ranges::max_element(link_.shape.block_bytes);
    const SharedSlots slots(kNumSlots, largest);
    asked.num_slots = kNumSlots;
    connection_.send_with_file(FrameType::kPull, to_bytes(asked), slots.file());
    for (const BlockPlace& block : asked.blocks) {
      const SlotFrame slot = read_slot(receive(FrameType::kSlot));
      check(slot.block, block);
      if (slot.slot >= kNumSlots)
        throw HandOverError(HandOverCause::kCorrupt, "a slot that there is not");
      take(block, slots.slot(slot.slot).first(link_.shape.block_bytes[block.group]));
      connection_.send(FrameType::kFree, {to_bytes(slot.slot)});
    }
  }
};

}  // namespace

LocalKvHost::LocalKvHost(KvLeases& leases, const KvLink& link) : leases_(leases) {
  LocalHosts& all = local_hosts();
  const std::lock_guard lock(all.mutex);
  all.hosts.emplace(address(), std::pair(&leases, link));
}

LocalKvHost::~LocalKvHost() {
  LocalHosts& all = local_hosts();
  const std::lock_guard lock(all.mutex);
  all.hosts.erase(address());
}

std::string LocalKvHost::address() const { return concat("local:", leases_.epoch()); }

std::unique_ptr<KvTransport> make_kv_transport(const std::string& address, const KvLink& link) {
  if (address.starts_with("local:")) return std::make_unique<LocalTransport>(address, link);
  SocketAddress parsed = SocketAddress::parse(address);
  if (parsed.scheme == "shm")
    return std::make_unique<SharedMemoryTransport>(std::move(parsed), link);
  return std::make_unique<SocketTransport>(std::move(parsed), link);
}

}  // namespace llmserve
