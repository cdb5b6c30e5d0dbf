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
#include "comm/kv_leases.h"
#include "comm/kv_server.h"
#include "comm/kv_transport.h"
#include "engine/kv_block_bytes.h"
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
  // The workers outlive it. `sink` is told of the end of transfers. Throws InvalidArgument,
  // ResourceExhausted.
  KvMover(const HandOverOptions& options, std::vector<const Worker*> workers, NewsSink sink);
  ~KvMover();
  KvMover(const KvMover&) = delete;
  KvMover& operator=(const KvMover&) = delete;

  // What others need to fetch from this engine. Any thread.
  const KvPeer& self() const { return self_; }
  // A number of the peer for HandOver, the same for the same one. Throws InvalidArgument,
  // ResourceExhausted. Any thread.
  int32_t add_peer(const KvPeer& peer);
  // Its own counters; the others are left alone. Any thread.
  void fill_metrics(EngineMetrics& metrics) const;
  // Whether blocks are kept under this id. Any thread.
  bool has_begun(int64_t id) const { return leases_.has(static_cast<uint64_t>(id)); }
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

  KvLink link() const;
  void offer(const Transfer& transfer);
  void run();
  void fetch(Fetch& fetch);
  KvPeer peer_of(const Transfer& transfer) const;
  void pull(Fetch& fetch, const KvPull& pull, const KvPeer& peer);

  const HandOverOptions options_;
  const NewsSink sink_;
  KvBlockBytes blocks_;
  KvLeases leases_;
  std::optional<LocalKvHost> host_;
  std::optional<KvServer> server_;
  KvPeer self_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
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
