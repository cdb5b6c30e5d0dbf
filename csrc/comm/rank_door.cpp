#include "comm/rank_door.h"

#include <utility>

#include "core/start_thread.h"

namespace llmserve {
namespace {

// For a greeting, of whoever has not shown the key.
constexpr std::chrono::seconds kPatience{5};
// Connections that nobody has asked for: of processes that have the key, and come again and again.
constexpr size_t kMaxComers = 1024;

}  // namespace

RankDoor::RankDoor(const SocketAddress& address, std::string key, Admit admit)
    : key_(std::move(key)), admit_(std::move(admit)), listener_({address}) {
  thread_ = start_thread([this] { run(); });
}

RankDoor::~RankDoor() {
  close();
  listener_.stop();
  thread_.join();
  reap(true);
}

void RankDoor::close() noexcept {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  has_come_.notify_all();
}

void RankDoor::end_meeting() noexcept {
  const std::lock_guard lock(mutex_);
  ++num_ended_;
  has_come_.notify_all();
}

bool RankDoor::is_closed() const {
  const std::lock_guard lock(mutex_);
  return is_closed_;
}

std::string RankDoor::last_refusal() const {
  const std::lock_guard lock(mutex_);
  return last_refusal_;
}

void RankDoor::run() {
  while (true) {
    const int fd = listener_.accept();
    if (fd < 0) return;
    reap(false);
    const std::lock_guard lock(mutex_);
    Greeting& greeting = greetings_.emplace_back(fd);
    if (greetings_.size() > kMaxGreetings) {
      greetings_.pop_back();
      continue;
    }
    try {
      greeting.thread = start_thread([this, &greeting] { greet(greeting); });
    } catch (const Error&) {  // who comes tries again
      greetings_.pop_back();
    }
  }
}

void RankDoor::reap(bool all) {
  std::list<Greeting> over;
  {
    const std::lock_guard lock(mutex_);
    for (auto next = greetings_.begin(); next != greetings_.end();) {
      const auto one = next++;
      if (all && one->link) one->link->cancel();
      if (all || one->is_over) over.splice(over.end(), greetings_, one);
    }
  }
  for (Greeting& greeting : over) greeting.thread.join();
}

void RankDoor::greet(Greeting& greeting) {
  RankLink& link = *greeting.link;
  Comer comer;
  std::string refusal;
  try {
    comer.hello = link.await_hello(key_, std::chrono::steady_clock::now() + kPatience);
    if (comer.hello.version != kRankProtocolVersion)
      throw RankRefusal(concat("node ", comer.hello.place.node, " speaks version ",
                               comer.hello.version, " of the protocol of ranks, not ",
                               kRankProtocolVersion, "; give all nodes the same llmserve"));
    link.welcome(admit_(comer.hello));
  } catch (const RankRefusal& error) {
    refusal = error.what();
    try {
      // Who has shown the key is told why.
      if (comer.hello.nonce != TokenHash()) link.refuse(refusal);
    } catch (const Error&) {
    }
  } catch (const Error& error) {  // no node, or one whose connection broke
    refusal = error.what();
  }
  const std::lock_guard lock(mutex_);
  greeting.is_over = true;
  if (!refusal.empty()) {
    last_refusal_ = refusal;
    link.cancel();
    return;
  }
  if (comers_.size() >= kMaxComers) comers_.clear();
  comer.link = std::move(greeting.link);
  comers_.insert_or_assign(comer.hello.place, std::move(comer));
  has_come_.notify_all();
}

std::optional<RankDoor::Comer> RankDoor::take(const RankPlaceName& place, Deadline until) {
  std::unique_lock lock(mutex_);
  std::erase_if(comers_, [&](const auto& item) {  // of meetings that came to nothing
    return item.first.purpose == RankPurpose::kExchange && place.epoch > item.first.epoch;
  });
  const int64_t num_ended = num_ended_;
  has_come_.wait_until(lock, until, [&] {
    const bool has_ended = place.purpose == RankPurpose::kExchange && num_ended != num_ended_;
    return is_closed_ || has_ended || comers_.contains(place);
  });
  const auto found = comers_.find(place);
  if (is_closed_ || found == comers_.end()) return std::nullopt;
  std::optional<Comer> comer = std::move(found->second);
  comers_.erase(found);
  return comer;
}

}  // namespace llmserve
