// Sockets of byte streams, TCP and of this machine, with deadlines. Nothing here waits without one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "comm/hand_over_error.h"
#include "comm/message_code.h"

namespace llmserve {

using Deadline = std::chrono::steady_clock::time_point;

// Where a socket listens or goes to.
//   "tcp:127.0.0.1:4711", "tcp:[::1]:4711"   a number, not a name, so that nothing is looked up
//   "shm:NAME"                               on this machine: NAME of the abstract namespace, which
//                                            leaves no file behind
struct SocketAddress {
  std::string scheme;  // "tcp" or "shm"
  std::string host;    // or the name
  uint16_t port = 0;

  // Throws InvalidArgument.
  static SocketAddress parse(const std::string& text);
  std::string text() const;
};

// Errors are HandOverError, of the cause kTimeout past the deadline and kCancelled after cancel().
class StreamSocket {
 public:
  explicit StreamSocket(int fd) : fd_(fd) {}
  ~StreamSocket();
  StreamSocket(const StreamSocket&) = delete;
  StreamSocket& operator=(const StreamSocket&) = delete;

  void connect(const SocketAddress& address, Deadline until);
  // Once bytes come, the next ones have `patience` at least: a slow link is none that hangs.
  void read(std::span<std::byte> bytes, Deadline until,
            std::chrono::milliseconds patience = std::chrono::milliseconds(0));
  // Likewise as bytes leave.
  void write(Bytes bytes, std::chrono::milliseconds patience);
  // With a file's descriptor beside the first byte, over a socket of this machine.
  void write_with_file(Bytes bytes, int file, std::chrono::milliseconds patience);
  // The descriptor that came beside what was read last, which is the caller's now; -1: none did.
  int take_file();
  // Whoever waits in it, or comes to wait, throws. Any thread.
  void cancel() noexcept;
  // For who waits for several at once.
  int fd() const { return fd_; }
  // The address that it goes to the peer from.
  SocketAddress own_address() const;
  // The address of the peer, without its port.
  SocketAddress peer_address() const;

 private:
  void wait(short events, Deadline until) const;
  [[noreturn]] void fail(const char* what, int error) const;

  int fd_ = -1;
  int file_ = -1;
  mutable std::mutex mutex_;
  bool is_cancelled_ = false;
};

// Listens at several addresses.
class Listener {
 public:
  // Port 0 takes a free one. Throws InvalidArgument where it cannot listen.
  explicit Listener(const std::vector<SocketAddress>& addresses);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // As they were bound.
  const std::vector<SocketAddress>& addresses() const { return addresses_; }
  // The next connection; -1 after stop().
  int accept();
  void stop() noexcept;

 private:
  std::vector<SocketAddress> addresses_;
  std::vector<int> fds_;
  int wake_fd_ = -1;
};

}  // namespace llmserve
