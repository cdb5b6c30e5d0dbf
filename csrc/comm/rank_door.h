// Where a process listens for the others that run its model: it greets who comes, and keeps each
// connection until somebody asks for it.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/rank_link.h"

namespace llmserve {

class RankDoor {
 public:
  // What a comer is welcomed with. Throws RankRefusal, which the comer is told.
  using Admit = std::function<RankWelcome(const RankHello&)>;
  struct Comer {
    std::unique_ptr<RankLink> link;
    RankHello hello;
  };

  // Port 0 takes a free one. `admit` is called on threads of the door. Throws InvalidArgument where
  // it cannot listen.
  RankDoor(const SocketAddress& address, std::string key, Admit admit);
  ~RankDoor();
  RankDoor(const RankDoor&) = delete;
  RankDoor& operator=(const RankDoor&) = delete;

  const SocketAddress& address() const { return listener_.addresses().front(); }
  // The last who came for this place, once it has come; none past the deadline, or after close().
  std::optional<Comer> take(const RankPlaceName& place, Deadline until);
  // Whoever waits in take() for ranks that exchange waits no more: one of them has gone. Any
  // thread.
  void end_meeting() noexcept;
  // Whoever waits in take() waits no more. Any thread.
  void close() noexcept;
  bool is_closed() const;
  // Whom it refused last, and why; empty: nobody.
  std::string last_refusal() const;

 private:
  static constexpr size_t kMaxGreetings = 32;  // at a time
  struct Greeting {
    explicit Greeting(int fd) : link(std::make_unique<RankLink>(fd)) {}
    std::unique_ptr<RankLink> link;
    std::thread thread;
    bool is_over = false;
  };

  void run();
  void greet(Greeting& greeting);
  void reap(bool all);

  const std::string key_;
  const Admit admit_;
  Listener listener_;
  mutable std::mutex mutex_;
  std::condition_variable has_come_;
  std::list<Greeting> greetings_;
  std::map<RankPlaceName, Comer> comers_;
  std::string last_refusal_;
  int64_t num_ended_ = 0;  // meetings
  bool is_closed_ = false;
  std::thread thread_;
};

}  // namespace llmserve
