#include "engine/event_buffer.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace llmserve {
namespace {

template <class T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

// `earlier` becomes what one event with the news of both would be; nothing of `later` is needed
// afterwards. What grows stays where it is, since this is done for every token.
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

void EventBuffer::hold_until_finished(RequestId id) {
  const std::lock_guard lock(mutex_);
  held_requests_.insert(id);
}

void EventBuffer::push(std::span<TokenEvent> events) {
  const std::lock_guard lock(mutex_);
  for (TokenEvent& event : events) add(event);
  if (ready_.empty()) return;
  ready_to_take_.notify_all();
  const uint64_t one = 1;
  (void)!write(fd_, &one, sizeof(one));
}

void EventBuffer::add(TokenEvent& event) {
  const RequestId request_id = event.request_id;
  const bool is_held = held_requests_.contains(request_id);
  const bool is_last = event.is_request_finished;
  const bool is_due = !is_held || event.finish_reason != FinishReason::kNone;
  std::list<TokenEvent>& list = is_held ? held_ : ready_;
  const auto [place, is_new] = places_.try_emplace({request_id, event.sample_index});
  if (is_new) {
    place->second = list.insert(list.end(), std::move(event));
  } else {
    merge(*place->second, event);
  }
  // To the end also where it waits already: a request's last event stays behind its others.
  if (is_due) ready_.splice(ready_.end(), list, place->second);
  if (is_last) held_requests_.erase(request_id);
}

std::vector<TokenEvent> EventBuffer::take(std::chrono::duration<double> timeout) {
  std::unique_lock lock(mutex_);
  ready_to_take_.wait_for(lock, timeout, [&] { return !ready_.empty() || is_closed_; });
  uint64_t count = 0;
  if (fd_ >= 0) (void)!read(fd_, &count, sizeof(count));
  std::vector<TokenEvent> events;
  events.reserve(ready_.size());
  for (TokenEvent& event : ready_) {
    places_.erase({event.request_id, event.sample_index});
    events.push_back(std::move(event));
  }
  ready_.clear();
  return events;
}

void EventBuffer::close() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_closed_, true)) return;
  ready_.clear();
  held_.clear();
  places_.clear();
  ready_to_take_.notify_all();
  ::close(fd_.exchange(-1));
}

}  // namespace llmserve
