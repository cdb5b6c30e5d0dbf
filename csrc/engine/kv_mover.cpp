#include "engine/kv_mover.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/clock.h"
#include "core/start_thread.h"

namespace llmserve {
namespace {

// So many prompts are fetched at a time. Most of them wait for what is being computed.
constexpr size_t kNumThreads = 16;
constexpr size_t kMaxPeers = 4096;
constexpr size_t kMinKeyLength = 16;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

}  // namespace

void HandOverOptions::validate() const {
  if (key.size() < kMinKeyLength) {
    throw InvalidArgument(concat("key has ", key.size(), " characters, and at least ",
                                 kMinKeyLength, " are needed; both sides need the same"));
  }
  const auto check = [](const char* name, double value, double most) {
    if (!(value > 0 && value <= most))
      throw InvalidArgument(concat(name, " must be above 0 and at most ", most, ", got ", value));
  };
  check("lease_s", lease_s, 86'400);
  check("timeout_s", timeout_s, 3'600);
  check("max_share", max_share, 1);
  for (const std::string& address : addresses) SocketAddress::parse(address);
}

KvLink KvMover::link(const HandOverOptions& options, const KvWireShape& shape) {
  return {.key = options.key,
          .numerics_class = options.numerics_class,
          .shape = shape,
          .timeout = milliseconds(options.timeout_s)};
}

KvMover::KvMover(const HandOverOptions& options, std::unique_ptr<KvBlocks> blocks,
                 int32_t num_blocks, NewsSink sink, std::shared_ptr<KvHost> host)
    : options_((options.validate(), options)),
      sink_(std::move(sink)),
      blocks_(std::move(blocks)),
      host_(host ? std::move(host)
                 : std::make_shared<KvHost>(link(options, blocks_->shape()),
                                            milliseconds(options.lease_s), options.addresses)),
      leases_(host_->leases()),
      owner_(leases_.add_owner(
          {.blocks = blocks_.get(),
           .sink = [this](int64_t transfer, bool) { sink_(TransferDone{transfer}); },
           .max_blocks = static_cast<size_t>(std::max(1.0, options.max_share * num_blocks))})),
      self_{.addresses = host_->addresses(), .epoch = leases_.epoch()} {
  for (size_t i = 0; i < kNumThreads; ++i) threads_.push_back(start_thread([this] { run(); }));
}

KvMover::~KvMover() { close(); }

void KvMover::close() {
  std::shared_ptr<KvHost> host;
  {
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return;
    is_stopped_ = true;
    last_counts_ = leases_.counts(owner_);
    host.swap(host_);
  }
  changed_.notify_all();
  if (host.use_count() == 1) host->leases().stop();  // whoever waits need not
  host->leases().end_all(owner_);
  end_all();
  for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<KvHost> KvMover::host() const {
  const std::lock_guard lock(mutex_);
  return host_;
}

bool KvMover::has_begun(int64_t id) const {
  const std::lock_guard lock(mutex_);
  return host_ && leases_.has(static_cast<uint64_t>(id));
}

int32_t KvMover::add_peer(const KvPeer& peer) {
  if (peer.addresses.empty()) throw InvalidArgument("a peer has at least one address");
  for (const std::string& address : peer.addresses)
    if (!address.starts_with("local:")) SocketAddress::parse(address);
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(peers_, peer);
  if (found == peers_.end()) {
    if (peers_.size() >= kMaxPeers)
      throw ResourceExhausted(concat("more than ", kMaxPeers, " peers; start the engine anew"));
    peers_.push_back(peer);
    return static_cast<int32_t>(peers_.size() - 1);
  }
  return static_cast<int32_t>(found - peers_.begin());
}

KvPeer KvMover::peer_of(const Transfer& transfer) const {
  const std::lock_guard lock(mutex_);
  const auto idx = static_cast<size_t>(transfer.hand_over.peer);
  if (transfer.hand_over.peer < 0 || idx >= peers_.size())
    throw HandOverError(HandOverCause::kUnreachable, "the peer is not known");
  return peers_[idx];
}

void KvMover::begin(const Transfer& transfer) {
  if (transfer.is_withdrawal) {
    leases_.withdraw(owner_, static_cast<uint64_t>(transfer.hand_over.id));
    return sink_(TransferDone{transfer.id});
  }
  if (transfer.to == MemoryTier::kPeer) return offer(transfer);
  const std::lock_guard lock(mutex_);
  waiting_.push_back(transfer);
  changed_.notify_one();
}

void KvMover::offer(const Transfer& transfer) {
  KvOffer offer{.owner = owner_,
                .id = static_cast<uint64_t>(transfer.hand_over.id),
                .transfer = transfer.id,
                .is_first = transfer.is_first,
                .is_last = transfer.is_last,
                .token_ids = transfer.token_ids,
                .hashes = transfer.hashes};
  for (const BlockMove& move : transfer.moves)
    offer.blocks.push_back({{.group = static_cast<uint16_t>(move.group),
                             .place = static_cast<uint32_t>(move.destination)},
                            move.source});
  leases_.offer(std::move(offer));
}

void KvMover::end_all() {
  if (const std::shared_ptr<KvHost> host = this->host()) host->leases().end_all(owner_);
  std::deque<Transfer> dropped;
  std::unique_lock lock(mutex_);
  dropped.swap(waiting_);
  for (Fetch& fetch : running_) {
    fetch.is_cancelled = true;
    if (fetch.transport != nullptr) fetch.transport->cancel();
  }
  num_failed_[static_cast<size_t>(HandOverCause::kCancelled)] += std::ssize(dropped);
  changed_.wait(lock, [this] { return running_.empty(); });
  lock.unlock();
  for (const Transfer& transfer : dropped) sink_(TransferFailed{transfer.id});
}

void KvMover::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_stopped_ || !waiting_.empty(); });
    if (is_stopped_) return;
    const auto mine = running_.insert(running_.end(), {.transfer = std::move(waiting_.front())});
    waiting_.pop_front();
    lock.unlock();
    fetch(*mine);
    lock.lock();
    running_.erase(mine);
    changed_.notify_all();
  }
}

// The blocks are nobody's but this thread's until it has told of the end.
void KvMover::fetch(Fetch& fetch) {
  const SteadyClock clock;
  const int64_t start_us = clock.now_us();
  const Transfer& transfer = fetch.transfer;
  KvPull pull{.id = static_cast<uint64_t>(transfer.hand_over.id),
              .num_tokens = static_cast<uint32_t>(transfer.num_tokens)};
  for (const BlockMove& move : transfer.moves)
    pull.blocks.push_back(
        {.group = static_cast<uint16_t>(move.group), .place = static_cast<uint32_t>(move.source)});
  const auto block_size = static_cast<int64_t>(blocks_->shape().block_size);
  const int64_t num_full = transfer.num_tokens / block_size;
  pull.prefix = transfer.hashes[static_cast<size_t>(num_full)];
  if (transfer.num_tokens % block_size != 0) {
    pull.prefix = chain_hash(pull.prefix, std::span(transfer.token_ids)
                                              .first(static_cast<size_t>(transfer.num_tokens))
                                              .subspan(static_cast<size_t>(num_full * block_size)));
  }
  const auto fail = [&](HandOverCause cause, const char* why) {
    {
      const std::lock_guard lock(mutex_);
      ++num_failed_[static_cast<size_t>(cause)];
      failure_ = why;
    }
    sink_(TransferFailed{transfer.id});
  };
  try {
    const KvPeer peer = peer_of(transfer);
    pull.epoch = peer.epoch;
    this->pull(fetch, pull, peer);
  } catch (const HandOverError& error) {
    return fail(error.cause(), error.what());
  } catch (const std::exception& error) {  // no memory, no descriptor
    return fail(HandOverCause::kUnreachable, error.what());
  }
  {
    const std::lock_guard lock(mutex_);
    ++num_received_;
    receive_us_ += clock.now_us() - start_us;
  }
  sink_(TransferDone{transfer.id});
}

// By the first of the peer's addresses at which somebody listens.
void KvMover::pull(Fetch& fetch, const KvPull& pull, const KvPeer& peer) {
  for (size_t i = 0;; ++i) {
    const std::unique_ptr<KvTransport> transport =
        make_kv_transport(peer.addresses[i], link(options_, blocks_->shape()));
    {
      const std::lock_guard lock(mutex_);
      if (fetch.is_cancelled)
        throw HandOverError(HandOverCause::kCancelled, "the hand-over was cancelled");
      fetch.transport = transport.get();
    }
    size_t num_taken = 0;
    const auto let_go = [&] {
      const std::lock_guard lock(mutex_);
      fetch.transport = nullptr;
    };
    try {
      transport->pull(pull, [&](const BlockPlace& block, Bytes bytes) {
        blocks_->write(block.group, fetch.transfer.moves[num_taken++].destination, bytes);
        const std::lock_guard lock(mutex_);
        num_received_bytes_ += std::ssize(bytes);
      });
      return let_go();
    } catch (const HandOverError& error) {
      let_go();
      const bool is_next = error.cause() == HandOverCause::kUnreachable && num_taken == 0 &&
                           i + 1 < peer.addresses.size();
      if (!is_next) throw;
    } catch (...) {
      let_go();
      throw;
    }
  }
}

void KvMover::fill_metrics(EngineMetrics& metrics) const {
  const std::lock_guard lock(mutex_);
  const KvLeases::Counts counts = host_ ? leases_.counts(owner_) : last_counts_;
  metrics.num_leased_blocks = counts.num_blocks;
  metrics.num_hand_overs_sent = counts.num_fetched;
  metrics.num_hand_overs_lapsed = counts.num_lapsed;
  metrics.hand_over_sent_bytes = counts.num_sent_bytes;
  metrics.num_hand_overs_received = num_received_;
  metrics.hand_over_received_bytes = num_received_bytes_;
  metrics.hand_over_receive_us = receive_us_;
  metrics.num_hand_overs_failed = num_failed_;
}

std::string KvMover::take_failure() {
  const std::lock_guard lock(mutex_);
  return std::exchange(failure_, {});
}

}  // namespace llmserve
