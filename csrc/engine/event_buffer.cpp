#include "engine/event_buffer.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/clock.h"
#include "core/error.h"
#include "core/prefetch.h"

namespace llmserve {
namespace {

template <class T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

// `earlier` becomes what one event with the news of both would be; nothing of `later` is needed
// afterwards. What grows stays where it is, since this may be done for every token.
void merge(TokenEvent& earlier, TokenEvent& later) {
  append(earlier.token_ids, later.token_ids);
  earlier.text += later.text;
  append(earlier.logprobs, later.logprobs);
  append(earlier.top_logprobs, later.top_logprobs);
  later.token_ids = std::move(earlier.token_ids);
  later.text = std::move(earlier.text);
  later.logprobs = std::move(earlier.logprobs);
  later.top_logprobs = std::move(earlier.top_logprobs);
  later.prompt_logprobs = std::move(earlier.prompt_logprobs);
  later.prompt_top_logprobs = std::move(earlier.prompt_top_logprobs);
  earlier = std::move(later);
}

}  // namespace

EventBuffer::EventBuffer() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0)
    throw ResourceExhausted(
        concat("eventfd: ", std::strerror(errno), "; close files or raise ulimit -n"));
}

EventBuffer::~EventBuffer() { close(); }

void EventBuffer::push(std::span<TokenEvent> events) {
  if (events.empty() || !add_all(events)) return;
  // With the mutex free: who wakes takes it, and would have to wait again.
  ready_to_take_.notify_all();
  const uint64_t one = 1;
  (void)!write(fd_, &one, sizeof(one));
}

// Whether any is to be taken by the consumer.
bool EventBuffer::add_all(std::span<TokenEvent> events) {
  const std::lock_guard lock(mutex_);
  const int64_t begin_ns = lent_.empty() ? 0 : thread_cpu_ns();
  found_.clear();
  size_t expected = 0;
  for (const TokenEvent& event : events) {
    found_.push_back(find_place(event, expected));
    expected = found_.back() + 1;
    const Place& place = places_[found_.back()];
    if (place.has_event) prefetch(*place.event);
  }
  for (size_t i = 0; i < events.size(); ++i)
    if (lent_.empty() || !write_line(events[i])) add(events[i], places_[found_[i]]);
  if (begin_ns > 0) line_ns_ += thread_cpu_ns() - begin_ns;
  return !ready_.empty();
}

// Whether the event has been dealt with; else the connection, if it has one, has come back and the
// event is the consumer's, who finds the connection so.
bool EventBuffer::write_line(TokenEvent& event) {
  const auto found = lent_.find(event.request_id);
  if (found == lent_.end()) return false;
  LentConnection& connection = *found->second;
  switch (connection.write(event)) {
    case LentConnection::Outcome::kWritten:
      ++num_lines_;
      return true;
    case LentConnection::Outcome::kStuck:  // its news have been noted and it only wakes
      event.token_ids.clear();
      event.text.clear();
      break;
    case LentConnection::Outcome::kNotPlain:
      break;
  }
  let_go(connection);
  return false;
}

bool EventBuffer::lend(std::shared_ptr<LentConnection> connection) {
  const std::lock_guard lock(mutex_);
  if (is_closed_ || !connection->is_open()) return false;
  for (const auto& [key, line] : connection->lines()) {
    const auto is_its = [&](const TokenEvent& event) { return event.request_id == key.first; };
    if (std::ranges::any_of(ready_, is_its)) return false;
  }
  for (const auto& [key, line] : connection->lines()) lent_[key.first] = connection;
  return true;
}

WrittenLines EventBuffer::take_back(LentConnection& connection) {
  const std::lock_guard lock(mutex_);
  let_go(connection);
  return connection.take_written();
}

// What it wrote stays with it until it is asked for.
void EventBuffer::let_go(LentConnection& connection) {
  connection.close();
  for (const auto& [key, line] : connection.lines()) {
    const auto found = lent_.find(key.first);
    if (found != lent_.end() && found->second.get() == &connection) lent_.erase(found);
  }
}

size_t EventBuffer::find_place(const TokenEvent& event, size_t expected) {
  if (expected < places_.size() && places_[expected].request_id == event.request_id &&
      places_[expected].sample_index == event.sample_index)
    return expected;
  const auto [found, is_new] =
      place_idx_.try_emplace({event.request_id, event.sample_index}, places_.size());
  if (!is_new) return found->second;
  if (free_places_.empty()) {
    places_.emplace_back();
  } else {
    found->second = free_places_.back();
    free_places_.pop_back();
  }
  Place& place = places_[found->second];
  place = Place();
  place.request_id = event.request_id;
  place.sample_index = event.sample_index;
  return found->second;
}

void EventBuffer::add(TokenEvent& event, Place& place) {
  place.has_last = event.finish_reason != FinishReason::kNone;
  if (!place.has_event) {
    place.event = ready_.insert(ready_.end(), std::move(event));
    place.has_event = true;
    return;
  }
  merge(*place.event, event);
  // To the end, so that a request's last event stays behind its others.
  ready_.splice(ready_.end(), ready_, place.event);
}

std::vector<TokenEvent> EventBuffer::take(std::chrono::duration<double> timeout) {
  std::unique_lock lock(mutex_);
  ready_to_take_.wait_for(lock, timeout, [&] { return !ready_.empty() || is_closed_; });
  uint64_t count = 0;
  if (fd_ >= 0) (void)!read(fd_, &count, sizeof(count));
  std::vector<TokenEvent> events;
  events.reserve(ready_.size());
  for (TokenEvent& event : ready_) {
    const auto found = place_idx_.find({event.request_id, event.sample_index});
    Place& place = places_[found->second];
    place.has_event = false;
    if (place.has_last) {
      place.request_id = -1;
      free_places_.push_back(found->second);
      place_idx_.erase(found);
    }
    events.push_back(std::move(event));
  }
  ready_.clear();
  return events;
}

void EventBuffer::close() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_closed_, true)) return;
  ready_.clear();
  places_.clear();
  free_places_.clear();
  place_idx_.clear();
  while (!lent_.empty()) let_go(*std::shared_ptr(lent_.begin()->second));
  ready_to_take_.notify_all();
  ::close(fd_.exchange(-1));
}

}  // namespace llmserve
