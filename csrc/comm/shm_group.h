// Where rank threads of one process meet: what each brings to an exchange, and who waits for whom.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "comm/exchange_checks.h"
#include "core/prefetch.h"

namespace llmserve {

// What a rank asks of a collective. The pointers are the rank's until it has met the others again.
struct ShmCall {
  const char* op = "";  // its name: one literal of this library
  DType dtype = DType::kF32;
  const void* from = nullptr;
  void* to = nullptr;
  int64_t num_elements = 0;         // of `from`, where all ranks have as many
  int argument = 0;                 // the reduction, or the root
  int64_t row_stride = 0;           // of `from`, where rows may be strided
  std::span<const int64_t> counts;  // of gather_columns
  // Of all_gather and reduce_scatter the whole's, of all_to_all what is sent and what is received.
  const Parts* parts = nullptr;
  const Parts* received = nullptr;
};

// A rank that waits spins first, then sleeps. Waiting ends with a DeviceError when the group has
// failed: a rank has gone, was too late, or somebody has called abort().
class ShmGroup {
 public:
  ShmGroup(int world_size, std::chrono::milliseconds timeout);

  int world_size() const { return static_cast<int>(ranks_.size()); }

  // Brings `call` to the others, runs `work` with everybody's calls, and lets no rank go before all
  // have done so. `agree` says why another rank's call does not fit this one's; empty: it does.
  using Agree = std::function<std::string(int other, const ShmCall& call)>;
  void exchange(int rank, const ShmCall& call, const Agree& agree,
                const std::function<void()>& work);
  const ShmCall& call_of(int rank) const { return ranks_[static_cast<size_t>(rank)].call; }

  void send(int from, int to, const ConstTensor& x);
  void receive(int from, int to, const Tensor& out);

  // The rank makes no calls any more. Who waits for it fails.
  void leave(int rank) noexcept;
  void abort(int rank) noexcept;
  // Throws if the group has failed.
  void check(int rank) const;

 private:
  struct alignas(kCacheLineBytes) Rank {
    std::atomic<int64_t> num_meetings{0};  // that it has come to
    std::atomic<bool> is_gone{false};
    // It uses what others have brought. A call that fails waits for such ranks, since its caller
    // may free the memory.
    std::atomic<bool> is_using{false};
    ShmCall call;
  };
  // Messages from one rank to another: one at a time.
  struct Mailbox {
    std::atomic<int64_t> num_sent{0};
    std::atomic<int64_t> num_received{0};
    ConstTensor message;
  };
  // While it lives the rank may use what others have brought.
  class Use;

  Mailbox& mailbox(int from, int to) {
    return mailboxes_[static_cast<size_t>(from * world_size() + to)];
  }
  // Waits until every rank is here.
  void meet(int rank);
  // Waits until is_done(), as long as nobody of whom `lacks` says so has gone.
  template <class IsDone, class Lacks>
  void wait(int rank, const IsDone& is_done, const Lacks& lacks);
  void notify();
  void note_failure(const std::string& reason) noexcept;
  [[noreturn]] void fail(int rank, const std::string& reason);
  [[noreturn]] void throw_failure(int rank);
  std::string who(int rank) const;  // "rank 0 of 2"

  const std::chrono::milliseconds timeout_;
  std::vector<Rank> ranks_;
  std::vector<Mailbox> mailboxes_;  // [from, to]
  std::atomic<bool> has_failed_{false};
  std::atomic<int> num_sleeping_{0};
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::string reason_;  // of the failure
};

}  // namespace llmserve
