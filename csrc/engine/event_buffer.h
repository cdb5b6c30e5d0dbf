// Events on their way out: written by the engine thread, taken by one consumer.
//
// There is at most one event a sequence in it: news of a sequence whose last event has not been
// taken yet are added to that event, so that a slow consumer costs no more memory than the tokens
// themselves.
//
// What the consumer does per token takes the processor from the kernels. The lines of a connection
// that was lent (lent_connection.h) are therefore written here, as their events are pushed, and the
// consumer is not woken.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/token_event.h"
#include "engine/lent_connection.h"

namespace llmserve {

class EventBuffer {
 public:
  EventBuffer();  // throws ResourceExhausted without a file descriptor
  ~EventBuffer();
  EventBuffer(const EventBuffer&) = delete;
  EventBuffer& operator=(const EventBuffer&) = delete;

  // Takes what is in them. One thread at a time, and not while close() runs.
  void push(std::span<TokenEvent> events);

  // What was pushed since the last call, in the order of each sequence's last news; waits up to
  // `timeout` for the first, not once closed.
  std::vector<TokenEvent> take(std::chrono::duration<double> timeout);

  // Readable (level-triggered) while events are waiting, and now and then when they have just been
  // taken; -1 once closed.
  int fd() const { return fd_; }

  // From now on the lines of its streams are written as their events come, until it comes back.
  // False, with nothing done, where one of their events is still to be taken: it goes first.
  bool lend(std::shared_ptr<LentConnection> connection);
  // Writes no more to it, and says what was written since it was lent; nothing the second time.
  WrittenLines take_back(LentConnection& connection);

  // Lines written to lent connections, and the processor time that they took.
  int64_t num_lines() const { return num_lines_; }
  int64_t line_us() const { return line_ns_ / 1000; }

  // Drops what is there and wakes the consumer.
  void close();

 private:
  // Where the news of a sequence go, from its first event until its last has been taken.
  struct Place {
    RequestId request_id = -1;
    int32_t sample_index = 0;
    bool has_event = false;  // one is in ready_:
    bool has_last = false;   // and it is the last one
    std::list<TokenEvent>::iterator event;
  };
  struct KeyHash {
    size_t operator()(const std::pair<RequestId, int32_t>& key) const {
      return static_cast<size_t>(key.first * 31 + key.second);
    }
  };

  bool add_all(std::span<TokenEvent> events);
  size_t find_place(const TokenEvent& event, size_t expected);
  void add(TokenEvent& event, Place& place);
  bool write_line(TokenEvent& event);
  void let_go(LentConnection& connection);

  std::mutex mutex_;
  std::condition_variable ready_to_take_;
  std::list<TokenEvent> ready_;
  // From one step to the next the same sequences come in the same order: the place behind the last
  // one is looked at first, and the index only where that is another's.
  std::vector<Place> places_;
  std::vector<size_t> free_places_;
  std::unordered_map<std::pair<RequestId, int32_t>, size_t, KeyHash> place_idx_;
  std::vector<size_t> found_;  // of the events of one push()
  std::unordered_map<RequestId, std::shared_ptr<LentConnection>> lent_;
  std::atomic<int64_t> num_lines_ = 0;
  std::atomic<int64_t> line_ns_ = 0;
  bool is_closed_ = false;
  std::atomic<int> fd_ = -1;  // read without the mutex
};

}  // namespace llmserve
