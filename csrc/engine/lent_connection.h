// A server's connection while nothing but plain lines goes over it: the engine's thread writes them
// to the socket, and Python is not woken for a token.
//
// Who owns what. The server's transport owns the connection and its descriptor. A LentConnection
// has a descriptor of its own for the same socket, duplicated when it is made and closed once, by
// close(); no byte is sent before EventBuffer::lend() or after close(). Between the two the server
// writes nothing: one of both writes, never both. The connection comes back
//   - by itself, with the first event of one of its streams that is not plain (an end, an error),
//   or
//     when the socket does not take a whole line at once: nothing waits here for a slow client;
//   - when the server asks, by EventBuffer::take_back().
// Either way take_back() says what has been written and which bytes of the last line have not.
//
// Once lent, everything but last_us() runs under the mutex of the EventBuffer.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "api/token_event.h"
#include "text/line_template.h"

namespace llmserve {

// What the streams of a connection have got while it was lent.
struct WrittenLines {
  struct Sample {
    RequestId request_id = 0;
    int32_t sample_index = 0;
    std::vector<int32_t> token_ids;  // whose text has been written
  };
  std::vector<Sample> samples;
  std::string rest;  // of the last line: what the socket did not take, to be written next
};

class LentConnection {
 public:
  enum class Outcome : uint8_t {
    kWritten,   // or there was nothing to say
    kNotPlain,  // nothing was done: the event is the server's
    kStuck,     // what the socket did not take is in the rest; nothing more can be written
  };

  // fd: of a connected stream socket; the answer on it is in HTTP/1.1's chunks. Throws
  // ResourceExhausted where the process may have no more descriptors.
  explicit LentConnection(int fd);
  ~LentConnection() { close(); }
  LentConnection(const LentConnection&) = delete;
  LentConnection& operator=(const LentConnection&) = delete;

  // A stream that goes over it, and how its lines look. Before it is lent.
  void add(RequestId id, int32_t sample_index, LineTemplate line);
  const std::map<std::pair<RequestId, int32_t>, LineTemplate>& lines() const { return lines_; }

  // The event's line, as a chunk. Never waits for the socket.
  Outcome write(const TokenEvent& event);
  // Whether lines can still be written.
  bool is_open() const { return fd_ >= 0; }
  void close();
  // What was written since the last call.
  WrittenLines take_written();

  // When a line was written last, on the engine's clock; 0: none was.
  int64_t last_us() const { return last_us_.load(std::memory_order_relaxed); }

 private:
  size_t send_chunk();

  int fd_ = -1;
  std::map<std::pair<RequestId, int32_t>, LineTemplate> lines_;
  std::map<std::pair<RequestId, int32_t>, std::vector<int32_t>> written_;
  std::string line_, chunk_;  // kept for their memory
  std::string rest_;
  std::atomic<int64_t> last_us_ = 0;
};

}  // namespace llmserve
