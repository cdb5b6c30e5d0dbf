// What engines keep for others to fetch: the blocks of sequences whose prompts they have computed.
// Replicas of one process keep their leases together, so that who fetches need not know which of
// them has computed a prompt.
//
// A lease begins with its first offer, grows with further ones while the prompt is being computed,
// and ends when its blocks have been fetched, when it is withdrawn, when for `lease` nothing was
// offered or read, or when too many blocks are kept: then the oldest goes first. At its end its
// transfers are told, and the blocks are the pool's again; until then nobody writes to them, so
// that they are read where they are, without a copy.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "comm/kv_frame.h"
#include "comm/stream_socket.h"

namespace llmserve {

// Blocks of a KV pool as bytes of the wire. Any thread; nobody else touches a block meanwhile.
class KvBlocks {
 public:
  virtual ~KvBlocks() = default;
  virtual const KvWireShape& shape() const = 0;
  // The first num_tokens rows of the block, and zeros after them. out: as many bytes as the shape
  // says of the group.
  virtual void read(uint16_t group, int32_t block, int64_t num_tokens,
                    std::span<std::byte> out) const = 0;
  virtual void write(uint16_t group, int32_t block, Bytes in) = 0;
};

// Whoever began a transfer is told of its end.
using TransferSink = std::function<void(int64_t transfer, bool is_done)>;

// An engine that keeps blocks. What it refers to outlives it.
struct KvOwner {
  const KvBlocks* blocks = nullptr;
  TransferSink sink;
  size_t max_blocks = 1 << 20;  // that it keeps; beyond them its oldest lease ends
};
using KvOwnerId = int32_t;

struct KvOffer {
  KvOwnerId owner = 0;
  uint64_t id = 0;
  int64_t transfer = 0;
  bool is_first = true;  // others add to it, if it is there still
  bool is_last = true;
  // All tokens up to the last block's end, and the hashes of their chain: of the root, and after
  // each full block. Nothing in offers that others follow.
  std::vector<int32_t> token_ids;
  std::vector<TokenHash> hashes;
  std::vector<std::pair<BlockPlace, int32_t>> blocks;  // and which block of the pool it is
};

class KvLeases {
 public:
  // block_size: tokens of a block, of all owners.
  KvLeases(int64_t block_size, std::chrono::milliseconds lease);
  ~KvLeases();  // ends all of them
  KvLeases(const KvLeases&) = delete;
  KvLeases& operator=(const KvLeases&) = delete;

  KvOwnerId add_owner(KvOwner owner);
  uint64_t epoch() const { return epoch_; }  // of this start, by chance
  void offer(KvOffer offer);
  // The rest will not be offered. Nothing happens where the owner has no such lease.
  void withdraw(KvOwnerId owner, uint64_t id);
  bool has(uint64_t id) const;

  // All that follows throws HandOverError: kGone where the lease has ended, was never begun by the
  // deadline, or is of other tokens.
  // The lease is there, or begins by then.
  void wait_for(uint64_t id, Deadline until);
  // Reads a block once it is offered; false: it was not by then, but still may be.
  bool read(uint64_t id, const BlockPlace& block, std::span<std::byte> out, Deadline until);
  // The first num_tokens of the lease have this hash; false: its last offer has not come by then.
  bool check(uint64_t id, uint32_t num_tokens, const TokenHash& prefix, Deadline until);
  // All was fetched.
  void end(uint64_t id);

  // Ends all of an owner, as not fetched, once nobody reads any more.
  void end_all(KvOwnerId owner);

  // Whoever waits for one, or comes to wait, is told that it is gone.
  void stop();

  // Of an owner's.
  struct Counts {
    int64_t num_blocks = 0;  // that they keep now
    int64_t num_fetched = 0;
    int64_t num_lapsed = 0;  // ended without having been fetched
    int64_t num_sent_bytes = 0;
  };
  Counts counts(KvOwnerId owner) const;

 private:
  struct Lease {
    KvOwnerId owner = 0;
    std::map<std::pair<uint16_t, uint32_t>, int32_t> blocks;
    std::vector<int64_t> transfers;
    std::vector<int32_t> token_ids;
    std::vector<TokenHash> hashes;
    bool is_whole = false;
    int num_reading = 0;
    uint64_t order = 0;
    Deadline until;
  };
  using Lock = std::unique_lock<std::mutex>;

  // Null: it is there by then, but not ready.
  Lease* find(Lock& lock, uint64_t id, Deadline until, const std::function<bool(Lease&)>& is_ready);
  void end(Lock& lock, uint64_t id, bool is_done);
  void run();
  Counts& counts_of(KvOwnerId owner) { return counts_[static_cast<size_t>(owner)]; }
  const KvOwner& owner_of(KvOwnerId owner) const { return owners_[static_cast<size_t>(owner)]; }

  const int64_t block_size_;
  const std::chrono::milliseconds lease_;
  uint64_t epoch_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Lease> leases_;
  uint64_t next_order_ = 0;
  std::deque<KvOwner> owners_;  // which stay where they are
  std::vector<Counts> counts_;  // [owners]
  bool is_stopped_ = false;
  std::thread thread_;  // ends what has lapsed
};

}  // namespace llmserve
