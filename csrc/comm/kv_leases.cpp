#include "comm/kv_leases.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/start_thread.h"

namespace llmserve {
namespace {

[[noreturn]] void gone(const char* why) { throw HandOverError(HandOverCause::kGone, why); }

}  // namespace

KvLeases::KvLeases(int64_t block_size, std::chrono::milliseconds lease)
    : block_size_(block_size), lease_(lease) {
  fill_random(std::as_writable_bytes(std::span(&epoch_, 1)));
  thread_ = start_thread([this] { run(); });
}

KvLeases::~KvLeases() {
  stop();
  thread_.join();
  Lock lock(mutex_);
  while (!leases_.empty()) end(lock, leases_.begin()->first, false);
}

KvOwnerId KvLeases::add_owner(KvOwner owner) {
  const std::lock_guard lock(mutex_);
  owners_.push_back(std::move(owner));
  counts_.emplace_back();
  return static_cast<KvOwnerId>(owners_.size() - 1);
}

void KvLeases::offer(KvOffer offer) {
  Lock lock(mutex_);
  if (offer.is_first) {
    if (leases_.contains(offer.id)) end(lock, offer.id, false);  // a ticket is used once more
  } else if (!leases_.contains(offer.id)) {
    const TransferSink& sink = owner_of(offer.owner).sink;
    lock.unlock();
    return sink(offer.transfer, false);
  }
  Lease& lease = leases_[offer.id];
  if (lease.transfers.empty()) lease.order = next_order_++;
  lease.owner = offer.owner;
  lease.transfers.push_back(offer.transfer);
  counts_of(offer.owner).num_blocks += std::ssize(offer.blocks);
  for (const auto& [place, block] : offer.blocks) lease.blocks[{place.group, place.place}] = block;
  lease.until = std::chrono::steady_clock::now() + lease_;
  if (offer.is_last) {
    lease.is_whole = true;
    lease.token_ids = std::move(offer.token_ids);
    lease.hashes = std::move(offer.hashes);
  }
  changed_.notify_all();
  const auto max_blocks = static_cast<int64_t>(owner_of(offer.owner).max_blocks);
  while (counts_of(offer.owner).num_blocks > max_blocks) {
    const auto age = [&](const auto& entry) {
      return entry.second.owner == offer.owner ? entry.second.order
                                               : std::numeric_limits<uint64_t>::max();
    };
    const uint64_t oldest = std::ranges::min_element(leases_, {}, age)->first;
    if (oldest == offer.id) break;  // the only one
    end(lock, oldest, false);
  }
}

void KvLeases::withdraw(KvOwnerId owner, uint64_t id) {
  Lock lock(mutex_);
  const auto found = leases_.find(id);
  if (found != leases_.end() && found->second.owner == owner) end(lock, id, false);
}

bool KvLeases::has(uint64_t id) const {
  const std::lock_guard lock(mutex_);
  return leases_.contains(id);
}

KvLeases::Lease* KvLeases::find(Lock& lock, uint64_t id, Deadline until,
                                const std::function<bool(Lease&)>& is_ready) {
  const bool was_there = leases_.contains(id);
  while (true) {
    const auto found = leases_.find(id);
    if (found == leases_.end() && was_there) gone("the sender has let go of these blocks");
    if (found != leases_.end() && is_ready(found->second)) {
      found->second.until = std::chrono::steady_clock::now() + lease_;
      return &found->second;
    }
    if (is_stopped_) gone("the sender ends");
    if (changed_.wait_until(lock, until) == std::cv_status::timeout &&
        std::chrono::steady_clock::now() >= until) {
      if (leases_.contains(id)) return nullptr;
      gone("the sender has no such blocks");
    }
  }
}

void KvLeases::wait_for(uint64_t id, Deadline until) {
  Lock lock(mutex_);
  find(lock, id, until, [](Lease&) { return true; });
}

bool KvLeases::read(uint64_t id, const BlockPlace& place, std::span<std::byte> out,
                    Deadline until) {
  Lock lock(mutex_);
  const std::pair key(place.group, place.place);
  Lease* const found = find(lock, id, until, [&](Lease& one) {
    if (!one.blocks.contains(key) && one.is_whole) gone("the sender lacks one of these blocks");
    return one.blocks.contains(key);
  });
  if (found == nullptr) return false;
  Lease& lease = *found;
  const int32_t block = lease.blocks.at(key);
  const int64_t num_tokens =
      lease.is_whole
          ? std::min(block_size_, std::ssize(lease.token_ids) - place.place * block_size_)
          : block_size_;
  ++lease.num_reading;
  counts_of(lease.owner).num_sent_bytes += std::ssize(out);
  const KvBlocks& blocks = *owner_of(lease.owner).blocks;
  lock.unlock();
  const auto end_reading = [&] {
    lock.lock();
    if (--lease.num_reading == 0) changed_.notify_all();
  };
  try {
    blocks.read(place.group, block, std::max<int64_t>(num_tokens, 0), out);
  } catch (...) {  // another node has gone
    end_reading();
    throw;
  }
  end_reading();
  return true;
}

bool KvLeases::check(uint64_t id, uint32_t num_tokens, const TokenHash& prefix, Deadline until) {
  Lock lock(mutex_);
  const Lease* const found = find(lock, id, until, [](Lease& one) { return one.is_whole; });
  if (found == nullptr) return false;
  const Lease& lease = *found;
  if (num_tokens == 0 || num_tokens > lease.token_ids.size())
    gone("the sender has computed fewer tokens");
  const auto block_size = static_cast<size_t>(block_size_);
  const size_t num_full = num_tokens / block_size;
  if (lease.hashes.size() <= num_full) gone("the sender has computed fewer tokens");
  TokenHash hash = lease.hashes[num_full];
  if (num_tokens % block_size != 0) {
    hash = chain_hash(
        hash, std::span(lease.token_ids).subspan(num_full * block_size, num_tokens % block_size));
  }
  if (!are_equal(hash, prefix)) gone("the sender's blocks are of other tokens");
  return true;
}

void KvLeases::end(uint64_t id) {
  Lock lock(mutex_);
  if (leases_.contains(id)) end(lock, id, true);
}

// Waits for who reads from it.
void KvLeases::end(Lock& lock, uint64_t id, bool is_done) {
  changed_.wait(lock, [&] {
    const auto found = leases_.find(id);
    return found == leases_.end() || found->second.num_reading == 0;
  });
  const auto found = leases_.find(id);
  if (found == leases_.end()) return;
  const std::vector<int64_t> transfers = std::move(found->second.transfers);
  Counts& counts = counts_of(found->second.owner);
  const TransferSink& sink = owner_of(found->second.owner).sink;
  counts.num_blocks -= std::ssize(found->second.blocks);
  leases_.erase(found);
  ++(is_done ? counts.num_fetched : counts.num_lapsed);
  lock.unlock();
  changed_.notify_all();
  for (const int64_t transfer : transfers) sink(transfer, is_done);
  lock.lock();
}

void KvLeases::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
  }
  changed_.notify_all();
}

void KvLeases::end_all(KvOwnerId owner) {
  Lock lock(mutex_);
  const auto is_its = [&](const auto& entry) { return entry.second.owner == owner; };
  for (auto next = std::ranges::find_if(leases_, is_its); next != leases_.end();
       next = std::ranges::find_if(leases_, is_its))
    end(lock, next->first, false);
}

void KvLeases::run() {
  Lock lock(mutex_);
  while (!is_stopped_) {
    const auto now = std::chrono::steady_clock::now();
    const auto first =
        std::ranges::min_element(leases_, {}, [](const auto& entry) { return entry.second.until; });
    if (first == leases_.end()) {
      changed_.wait(lock);
    } else if (first->second.until > now) {
      const auto until = first->second.until;  // the lease may have ended when the wait looks at it
      changed_.wait_until(lock, until);
    } else {
      end(lock, first->first, false);
    }
  }
}

KvLeases::Counts KvLeases::counts(KvOwnerId owner) const {
  const std::lock_guard lock(mutex_);
  return counts_[static_cast<size_t>(owner)];
}

}  // namespace llmserve
