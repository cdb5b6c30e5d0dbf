#include "comm/shm_group.h"

#include <cstring>
#include <thread>

#include "core/error.h"
#include "core/spin_pause.h"
#include "core/thread_beat.h"

namespace llmserve {
namespace {

// About 50 µs of pauses: longer than ranks of equal work are apart.
constexpr int kSpinsBeforeSleep = 1000;

}  // namespace

class ShmGroup::Use {
 public:
  Use(ShmGroup& group, int rank) : rank_(group.ranks_[static_cast<size_t>(rank)]) {
    rank_.is_using = true;
    // Before a rank whose call has failed looks for users, it has set has_failed_.
    if (!group.has_failed_) return;
    rank_.is_using = false;
    group.throw_failure(rank);
  }
  ~Use() { rank_.is_using = false; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Rank& rank_;
};

ShmGroup::ShmGroup(int world_size, std::chrono::milliseconds timeout)
    : timeout_(timeout),
      ranks_(static_cast<size_t>(world_size)),
      mailboxes_(static_cast<size_t>(world_size * world_size)) {}

std::string ShmGroup::who(int rank) const { return concat("rank ", rank, " of ", world_size()); }

template <class IsDone, class Lacks>
void ShmGroup::wait(int rank, const IsDone& is_done, const Lacks& lacks) {
  const auto gone = [&] {
    for (int other = 0; other < world_size(); ++other)
      if (lacks(other) && ranks_[static_cast<size_t>(other)].is_gone && lacks(other)) return other;
    return -1;
  };
  const auto has_ended = [&] { return is_done() || has_failed_ || gone() >= 0; };
  for (int spins = 0; !has_ended(); spin_pause()) {
    if (++spins < kSpinsBeforeSleep) continue;
    const BeatPause pause;
    std::unique_lock lock(mutex_);
    ++num_sleeping_;
    const bool is_in_time = changed_.wait_for(lock, timeout_, has_ended);
    --num_sleeping_;
    lock.unlock();
    if (is_in_time) break;
    int late = 0;
    while (late + 1 < world_size() && !lacks(late)) ++late;
    fail(rank, concat("rank ", late, " has not come within ", timeout_.count(),
                      " ms; it may be gone, or may not have made the call"));
  }
  if (has_failed_) throw_failure(rank);
  const int left = is_done() ? -1 : gone();
  if (left >= 0) fail(rank, concat("rank ", left, " has gone"));
}

// Whoever sleeps has said so before it looked for the last time.
void ShmGroup::notify() {
  if (num_sleeping_ == 0) return;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void ShmGroup::note_failure(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (reason_.empty()) reason_ = reason;
  has_failed_ = true;
  changed_.notify_all();
}

void ShmGroup::fail(int rank, const std::string& reason) {
  note_failure(reason);
  throw_failure(rank);
}

void ShmGroup::throw_failure(int rank) {
  for (const Rank& other : ranks_)
    while (other.is_using) std::this_thread::yield();
  check(rank);
  throw InternalError("a group of ranks has failed for no reason; please report this");
}

void ShmGroup::check(int rank) const {
  if (!has_failed_) return;
  const std::lock_guard lock(mutex_);
  throw DeviceError(concat("exchange among ranks failed on ", who(rank), ": ", reason_));
}

void ShmGroup::abort(int rank) noexcept { note_failure(concat(who(rank), " was aborted")); }

void ShmGroup::leave(int rank) noexcept {
  ranks_[static_cast<size_t>(rank)].is_gone = true;
  notify();
}

void ShmGroup::meet(int rank) {
  const int64_t meeting = ++ranks_[static_cast<size_t>(rank)].num_meetings;
  notify();
  const auto lacks = [&](int other) {
    return ranks_[static_cast<size_t>(other)].num_meetings < meeting;
  };
  wait(
      rank,
      [&] {
        for (int other = 0; other < world_size(); ++other)
          if (lacks(other)) return false;
        return true;
      },
      lacks);
}

void ShmGroup::exchange(int rank, const ShmCall& call, const Agree& agree,
                        const std::function<void()>& work) {
  check(rank);
  ranks_[static_cast<size_t>(rank)].call = call;
  meet(rank);
  std::string difference;
  {
    const Use use(*this, rank);
    for (int other = 0; other < world_size() && difference.empty(); ++other) {
      const ShmCall& theirs = call_of(other);
      const bool is_same = std::strcmp(theirs.op, call.op) == 0 && theirs.dtype == call.dtype &&
                           theirs.argument == call.argument;
      const std::string problem =
          is_same ? agree(other, theirs) : concat("another call, ", theirs.op);
      if (!problem.empty())
        difference = concat(call.op, " of rank ", rank, " meets ", problem, " of rank ", other);
    }
    if (difference.empty()) work();
  }
  if (!difference.empty()) fail(rank, difference);
  meet(rank);
}

void ShmGroup::send(int from, int to, const ConstTensor& x) {
  check(from);
  Mailbox& box = mailbox(from, to);
  box.message = x;
  const int64_t number = ++box.num_sent;
  notify();
  wait(from, [&] { return box.num_received >= number; }, [&](int other) { return other == to; });
}

void ShmGroup::receive(int from, int to, const Tensor& out) {
  check(to);
  Mailbox& box = mailbox(from, to);
  const int64_t number = box.num_received + 1;
  wait(to, [&] { return box.num_sent >= number; }, [&](int other) { return other == from; });
  std::string difference;
  {
    const Use use(*this, to);
    const ConstTensor& x = box.message;
    if (x.dtype != out.dtype || x.num_elements() != out.num_elements())
      difference = concat("rank ", from, " sends ", describe(x), ", and rank ", to, " receives ",
                          describe(out));
    else if (x.num_elements() > 0)
      std::memcpy(out.data, x.data, static_cast<size_t>(x.num_bytes()));
  }
  if (!difference.empty()) fail(to, difference);
  box.num_received = number;
  notify();
}

}  // namespace llmserve
