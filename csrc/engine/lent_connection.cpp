#include "engine/lent_connection.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "core/clock.h"
#include "core/error.h"

namespace llmserve {
namespace {

// RFC 9112, section 7.1.
void append_chunk(std::string_view body, std::string& out) {
  std::array<char, 16> size;
  const auto end = std::to_chars(size.data(), size.data() + size.size(), body.size(), 16).ptr;
  out.append(size.data(), end).append("\r\n").append(body).append("\r\n");
}

}  // namespace

LentConnection::LentConnection(int fd) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
  if (fd_ < 0) {
    throw ResourceExhausted(concat("a second descriptor for connection ", fd, ": ",
                                   std::strerror(errno), "; close files or raise ulimit -n"));
  }
}

void LentConnection::add(RequestId id, int32_t sample_index, LineTemplate line) {
  lines_.emplace(std::pair(id, sample_index), std::move(line));
}

LentConnection::Outcome LentConnection::write(const TokenEvent& event) {
  const std::pair key(event.request_id, event.sample_index);
  const auto line = lines_.find(key);
  line_.clear();
  if (line == lines_.end() || !line->second.append(event, line_)) return Outcome::kNotPlain;
  std::vector<int32_t>& written = written_[key];
  written.insert(written.end(), event.token_ids.begin(), event.token_ids.end());
  if (line_.empty()) return Outcome::kWritten;
  chunk_.clear();
  append_chunk(line_, chunk_);
  const size_t num_sent = send_chunk();
  if (num_sent < chunk_.size()) {
    rest_ = chunk_.substr(num_sent);
    return Outcome::kStuck;
  }
  last_us_.store(SteadyClock().now_us(), std::memory_order_relaxed);
  return Outcome::kWritten;
}

// Whatever the error, the server's transport meets it, too.
size_t LentConnection::send_chunk() {
  ssize_t num_sent = -1;
  do {
    num_sent = send(fd_, chunk_.data(), chunk_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (num_sent < 0 && errno == EINTR);
  return num_sent < 0 ? 0 : static_cast<size_t>(num_sent);
}

void LentConnection::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

WrittenLines LentConnection::take_written() {
  WrittenLines taken;
  for (auto& [key, token_ids] : std::exchange(written_, {}))
    taken.samples.push_back({key.first, key.second, std::move(token_ids)});
  taken.rest = std::exchange(rest_, {});
  return taken;
}

}  // namespace llmserve
