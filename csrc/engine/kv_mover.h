// Carries out the transfers of plans to and from peers: those that go are kept for the peer to
// fetch, those that come are fetched by threads of its own, beside the steps.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "api/engine_metrics.h"
#include "comm/kv_host.h"
#include "comm/kv_leases.h"
#include "scheduler/news.h"

namespace llmserve {

struct HandOverOptions {
  std::string key;             // that both sides know: at least 16 characters
  std::string numerics_class;  // digest of what decides the tokens; both sides have the same
  // Where others fetch blocks: "tcp:HOST:PORT", "shm:NAME". Engines of this process need none.
  std::vector<std::string> addresses;
  double lease_s = 30;     // that blocks are kept for who does not fetch them
  double timeout_s = 5;    // in which a peer moves on
  double max_share = 0.5;  // of the KV pool that is kept for others

  // Throws InvalidArgument that names the field.
  void validate() const;
};

// Another engine, and the start of it that is meant.
struct KvPeer {
  std::vector<std::string> addresses;  // tried in this order
  uint64_t epoch = 0;

  friend bool operator==(const KvPeer&, const KvPeer&) = default;
};

class KvMover {
 public:
  // blocks: of the engine's KV cache, of num_blocks. `sink` is told of the end of transfers. host:
  // of another replica, whose leases are kept with its own; null: it makes one. Throws
  // InvalidArgument, ResourceExhausted.
  KvMover(const HandOverOptions& options, std::unique_ptr<KvBlocks> blocks, int32_t num_blocks,
          NewsSink sink, std::shared_ptr<KvHost> host);
  ~KvMover();
  KvMover(const KvMover&) = delete;
  KvMover& operator=(const KvMover&) = delete;

  // What others need to fetch from this engine, and those that keep their leases with it. Any
  // thread.
  const KvPeer& self() const { return self_; }
  std::shared_ptr<KvHost> host() const;  // null once closed
  // A number of the peer for HandOver, the same for the same one. Throws InvalidArgument,
  // ResourceExhausted. Any thread.
  int32_t add_peer(const KvPeer& peer);
  // Its own counters; the others are left alone. Any thread.
  void fill_metrics(EngineMetrics& metrics) const;
  // Whether blocks are kept under this id. Any thread.
  bool has_begun(int64_t id) const;
  // Why the last transfer failed, once; empty: nothing new. Any thread.
  std::string take_failure();

  // Of a plan. The engine's thread, as the next.
  void begin(const Transfer& transfer);
  // Ends all that is under way, as failed. When it returns nobody touches the KV cache.
  void end_all();
  // For good, before the workers go.
  void close();

 private:
  // What one thread fetches.
  struct Fetch {
    Transfer transfer;
    KvTransport* transport = nullptr;  // to be cancelled; null: it is not connected yet
    bool is_cancelled = false;
  };

  static KvLink link(const HandOverOptions& options, const KvWireShape& shape);
  void offer(const Transfer& transfer);
  void run();
  void fetch(Fetch& fetch);
  KvPeer peer_of(const Transfer& transfer) const;
  void pull(Fetch& fetch, const KvPull& pull, const KvPeer& peer);

  const HandOverOptions options_;
  const NewsSink sink_;
  const std::unique_ptr<KvBlocks> blocks_;
  std::shared_ptr<KvHost> host_;
  KvLeases& leases_;
  const KvOwnerId owner_;
  KvPeer self_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  KvLeases::Counts last_counts_;  // once closed
  std::vector<KvPeer> peers_;
  std::deque<Transfer> waiting_;
  std::list<Fetch> running_;
  bool is_stopped_ = false;
  int64_t num_received_ = 0;
  int64_t num_received_bytes_ = 0;
  int64_t receive_us_ = 0;
  std::array<int64_t, kNumHandOverCauses> num_failed_{};
  std::string failure_;
  std::vector<std::thread> threads_;
};

}  // namespace llmserve
