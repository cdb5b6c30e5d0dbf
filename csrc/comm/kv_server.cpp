#include "comm/kv_server.h"

#include <algorithm>
#include <deque>
#include <optional>

#include "comm/shared_slots.h"
#include "core/start_thread.h"

namespace llmserve {
namespace {

constexpr uint32_t kMaxSlots = 1024;

}  // namespace

KvServer::KvServer(KvLeases& leases, const KvLink& link,
                   const std::vector<SocketAddress>& addresses)
    : leases_(leases), link_(link), listener_(addresses) {
  thread_ = start_thread([this] { run(); });
}

KvServer::~KvServer() {
  listener_.stop();
  thread_.join();
  reap(true);
}

void KvServer::run() {
  while (true) {
    const int fd = listener_.accept();
    if (fd < 0) return;
    reap(false);
    const std::lock_guard lock(mutex_);
    Connection& connection = connections_.emplace_back(fd);
    if (connections_.size() > kMaxConnections) {
      connections_.pop_back();
      continue;
    }
    try {
      connection.thread = start_thread([this, &connection] {
        serve(connection.socket);
        connection.socket.cancel();  // the peer is told now, its place is free with the next one
        connection.is_over = true;
      });
    } catch (const Error&) {  // the receiver computes what it does not get
      connections_.pop_back();
    }
  }
}

// Ends those that are over, or all.
void KvServer::reap(bool all) {
  std::list<Connection> over;
  {
    const std::lock_guard lock(mutex_);
    for (auto next = connections_.begin(); next != connections_.end();) {
      const auto one = next++;
      if (all) one->socket.cancel();
      if (all || one->is_over) over.splice(over.end(), connections_, one);
    }
  }
  for (Connection& connection : over) connection.thread.join();
}

// Whatever goes wrong here, the receiver computes the blocks by itself, and is told why.
void KvServer::serve(StreamSocket& socket) {
  KvConnection connection(socket, link_);
  try {
    connection.welcome(leases_.epoch());
  } catch (const Error&) {
    return;
  }
  try {
    const PullFrame pull = read_pull(connection.receive({FrameType::kPull}).payload);
    const int file = socket.take_file();
    send_blocks(connection, pull, file);
    connection.receive({FrameType::kEnd});
    leases_.end(pull.id);
  } catch (const HandOverError& error) {
    try {
      connection.refuse(error.cause(), error.what());
    } catch (const Error&) {
    }
  } catch (const Error&) {  // no memory to share
  }
}

// Until it has come, or the lease ends: the receiver hears as often as it needs to know that this
// side lives.
template <class Try>
void KvServer::await(KvConnection& connection, const Try& has_come) const {
  while (!has_come(std::chrono::steady_clock::now() + link_.timeout / 4))
    connection.send(FrameType::kWait, {});
}

void KvServer::send_blocks(KvConnection& connection, const PullFrame& pull, int file) {
  const KvWireShape& shape = link_.shape;
  std::optional<SharedSlots> slots;
  if (file >= 0) {
    const uint64_t largest = *std::ranges::max_element(shape.block_bytes);
    slots.emplace(file, std::clamp<uint32_t>(pull.num_slots, 1, kMaxSlots), largest);
  }
  if (pull.epoch != leases_.epoch())
    throw HandOverError(HandOverCause::kGone, "the sender has started anew since");
  // Less than the receiver waits, who would not learn why nothing came.
  leases_.wait_for(pull.id, std::chrono::steady_clock::now() + link_.timeout / 2);
  for (const BlockPlace& block : pull.blocks)
    if (block.group >= shape.block_bytes.size())
      throw HandOverError(HandOverCause::kCorrupt, "a block is of a group that there is not");
  std::deque<uint32_t> free;
  for (uint32_t i = 0; slots && i < slots->num_slots(); ++i) free.push_back(i);
  std::vector<std::byte> bytes;
  for (const BlockPlace& block : pull.blocks) {
    const uint64_t num_bytes = shape.block_bytes[block.group];
    if (!slots) {
      bytes.resize(num_bytes);
      await(connection, [&](Deadline until) { return leases_.read(pull.id, block, bytes, until); });
      connection.send(FrameType::kBlock, {to_bytes(block), bytes});
      continue;
    }
    while (free.empty()) {
      const uint32_t slot = read_free(connection.receive({FrameType::kFree}).payload);
      if (slot >= slots->num_slots())
        throw HandOverError(HandOverCause::kCorrupt, "a slot that there is not");
      free.push_back(slot);
    }
    const SlotFrame slot{.slot = free.front(), .block = block};
    free.pop_front();
    const std::span<std::byte> out = slots->slot(slot.slot).first(num_bytes);
    await(connection, [&](Deadline until) { return leases_.read(pull.id, block, out, until); });
    connection.send(FrameType::kSlot, {to_bytes(slot)});
  }
  await(connection, [&](Deadline until) {
    return leases_.check(pull.id, pull.num_tokens, pull.prefix, until);
  });
  connection.send(FrameType::kEnd, {});
  // What was freed meanwhile comes before the receiver's end.
  for (size_t i = free.size(); slots && i < slots->num_slots(); ++i)
    connection.receive({FrameType::kFree});
}

}  // namespace llmserve
