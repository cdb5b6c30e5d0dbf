#include "engine/device_watch.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/start_thread.h"

namespace llmserve {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks(50);
// Noticed within five seconds. The first step of a group loads kernels and measures algorithms.
constexpr std::chrono::seconds kLimit(4);
constexpr std::chrono::seconds kFirstLimit(60);

bool is_same(const QueueProgress& a, const QueueProgress& b) {
  return a.num_marks == b.num_marks && a.num_passed == b.num_passed;
}

}  // namespace

DeviceWatch::DeviceWatch(std::vector<Rank> ranks, std::function<void(const Failure&)> give_up)
    : ranks_(std::move(ranks)), give_up_(std::move(give_up)), last_(ranks_.size()) {
  thread_ = start_thread([this] { watch(); });
}

DeviceWatch::~DeviceWatch() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void DeviceWatch::begin_group(int64_t group) {
  const std::lock_guard lock(mutex_);
  group_ = group;
  failure_.reset();
  is_trusted_ = false;
}

void DeviceWatch::trust() {
  const std::lock_guard lock(mutex_);
  is_trusted_ = true;
}

void DeviceWatch::wake() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_awake_, true)) return;
  changed_.notify_all();
}

std::optional<DeviceWatch::Failure> DeviceWatch::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void DeviceWatch::watch() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_awake_ || is_stopping_; });
    if (is_stopping_) return;
    is_awake_ = false;
    since_ = Clock::now();
    while (!is_stopping_) {
      lock.unlock();
      const bool is_under_way = look();
      lock.lock();
      if (!is_under_way && !is_awake_) break;
      is_awake_ = false;
      changed_.wait_for(lock, kBetweenLooks, [this] { return is_stopping_; });
    }
  }
}

bool DeviceWatch::look() {
  int64_t group = 0;
  bool is_trusted = false;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return false;
    group = group_;
    is_trusted = is_trusted_;
  }
  std::optional<Failure> found;
  bool is_under_way = false;
  size_t behind = 0;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    try {
      ranks_[rank].check();
    } catch (const Error& error) {
      if (!found) found = Failure{group, static_cast<int>(rank), error.what()};
    }
    const QueueProgress progress = ranks_[rank].progress();
    is_under_way |= progress.num_passed < progress.num_marks;
    if (!is_same(progress, last_[rank])) since_ = Clock::now();
    last_[rank] = progress;
    if (progress.num_marks < last_[behind].num_marks) behind = rank;
  }
  if (!is_under_way) since_ = Clock::now();
  const std::chrono::seconds limit = is_trusted ? kLimit : kFirstLimit;
  if (!found && Clock::now() - since_ >= limit)
    found = Failure{group, static_cast<int>(behind),
                    concat("no exchange among the GPUs has got on for ", limit.count(), " s; rank ",
                           behind, " is the furthest behind")};
  if (!found) return is_under_way;
  {
    const std::lock_guard lock(mutex_);
    if (group != group_) return is_under_way;  // the ranks have noticed, and met anew
    failure_ = found;
  }
  give_up_(*found);
  return false;
}

}  // namespace llmserve
