// One connection between two processes that run a model together, or between two of its ranks.
//
// Whoever connects says hello, and the other welcomes or refuses it. Both sides have the same key,
// or are told nothing. Every error is a DeviceError.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "comm/rank_frame.h"
#include "comm/short_code.h"
#include "comm/stream_socket.h"

namespace llmserve {

// The other side has refused the connection, and will again. The text says why.
class RankRefusal final : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

struct RankFrame {
  RankHead head;
  Bytes payload;  // valid until the next one
};

class RankLink {
 public:
  explicit RankLink(int fd) : socket_(fd) {}
  // Two ends between threads of this process.
  static std::pair<std::unique_ptr<RankLink>, std::unique_ptr<RankLink>> make_pair();

  void connect(const SocketAddress& address, Deadline until);
  // After it. Throws RankRefusal where it is refused, or the keys differ.
  RankWelcome greet(const std::string& key, RankHello hello, Deadline until);
  // The other side of it: then welcome() or refuse().
  RankHello await_hello(const std::string& key, Deadline until);
  void welcome(RankWelcome welcome);
  void refuse(const std::string& why);

  // Throws once the peer has taken nothing for `patience`.
  void send(RankFrameType type, Bytes payload, std::chrono::milliseconds patience);
  // The next frame that is no exchange.
  RankFrame receive(Deadline until);
  // Whether a byte is there to be read before the deadline, or the peer has gone.
  bool is_readable(Deadline until) const;

  // An exchange: begin() says what goes and what is to come, and advance() does as much as can be
  // done without waiting. It returns the events of poll() that it waits for next; 0: all is done.
  // Spans stay valid until then. Throws where the peer exchanges something else.
  struct Exchange {
    RankOp op = RankOp::kBarrier;
    DType dtype = DType::kU8;
    bool sends = false, receives = false;
    Bytes out;
    std::span<std::byte> in;
  };
  void begin(const Exchange& exchange);
  short advance();
  int fd() const { return socket_.fd(); }
  StreamSocket& socket() { return socket_; }

  // Whoever waits in it throws. Any thread.
  void cancel() noexcept { socket_.cancel(); }

 private:
  TokenHash derive(const char* use, std::initializer_list<Bytes> parts) const;
  void begin_session(const TokenHash& comer, const TokenHash& host, bool is_comer);
  void send_greeting(RankFrameType type, Bytes payload, const TokenHash& key);
  RankBytes receive_greeting(RankFrameType type, const TokenHash& key, Deadline until);
  void write(Bytes bytes, std::chrono::milliseconds patience);
  void read(std::span<std::byte> bytes, Deadline until);
  bool send_some();
  bool receive_some();
  void check_exchange_head();

  StreamSocket socket_;
  std::string key_;  // of the greeting
  TokenHash comer_nonce_;
  ShortKey send_key_{}, receive_key_{};
  uint64_t num_sent_ = 0, num_received_ = 0;
  RankBytes payload_;

  // The exchange at hand: head, payload and code follow one another.
  Exchange exchange_;
  RankHeadBytes out_head_{}, in_head_{};
  ShortCode out_code_{}, in_code_{};
  size_t num_out_ = 0, num_in_ = 0;  // bytes that have gone, and come
};

}  // namespace llmserve
