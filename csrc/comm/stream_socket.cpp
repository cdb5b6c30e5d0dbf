#include "comm/stream_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/thread_beat.h"

namespace llmserve {
namespace {

constexpr int kBacklog = 64;

// What the system calls take.
struct RawAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  int family = AF_UNSPEC;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

RawAddress raw(const SocketAddress& address) {
  RawAddress result;
  if (address.scheme == "shm") {
    auto& local = reinterpret_cast<sockaddr_un&>(result.storage);
    local.sun_family = AF_UNIX;
    std::copy(address.host.begin(), address.host.end(), local.sun_path + 1);  // after a 0: no file
    result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.host.size());
    result.family = AF_UNIX;
    return result;
  }
  auto& four = reinterpret_cast<sockaddr_in&>(result.storage);
  if (inet_pton(AF_INET, address.host.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(address.port);
    result.size = sizeof(four);
    result.family = AF_INET;
    return result;
  }
  auto& six = reinterpret_cast<sockaddr_in6&>(result.storage);
  if (inet_pton(AF_INET6, address.host.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(address.port);
    result.size = sizeof(six);
    result.family = AF_INET6;
  }
  return result;
}

std::string host_of(const sockaddr_storage& storage) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* const address =
      storage.ss_family == AF_INET
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in&>(storage).sin_addr)
          : &reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
  inet_ntop(storage.ss_family, address, text.data(), text.size());
  return text.data();
}

uint16_t bound_port(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return 0;
  if (storage.ss_family == AF_INET)
    return ntohs(reinterpret_cast<const sockaddr_in&>(storage).sin_port);
  return ntohs(reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
}

void set_option(int fd, int level, int option) {
  const int on = 1;
  setsockopt(fd, level, option, &on, sizeof(on));
}

int milliseconds_until(Deadline until) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 3'600'000));
}

}  // namespace

SocketAddress SocketAddress::parse(const std::string& text) {
  const auto fail = [&](const char* why) -> SocketAddress {
    throw InvalidArgument(concat("'", text, "' is no address for KV blocks: ", why,
                                 "; write tcp:127.0.0.1:4711, tcp:[::1]:4711 or shm:NAME"));
  };
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return fail("it has no scheme");
  SocketAddress address{.scheme = text.substr(0, colon), .host = text.substr(colon + 1)};
  if (address.scheme == "shm") {
    if (address.host.empty() || address.host.size() > sizeof(sockaddr_un::sun_path) - 2)
      return fail("a name has 1 to 106 characters");
    return address;
  }
  if (address.scheme != "tcp") return fail("its scheme is not known");
  const size_t last = address.host.rfind(':');
  if (last == std::string::npos) return fail("it has no port");
  const char* const end = address.host.data() + address.host.size();
  const auto [read, error] = std::from_chars(address.host.data() + last + 1, end, address.port);
  if (error != std::errc() || read != end) return fail("its port is none");
  address.host.resize(last);
  if (address.host.size() > 2 && address.host.front() == '[' && address.host.back() == ']')
    address.host = address.host.substr(1, address.host.size() - 2);
  if (raw(address).family == AF_UNSPEC) return fail("its host is no number of an IP address");
  return address;
}

std::string SocketAddress::text() const {
  if (scheme == "shm") return concat("shm:", host);
  const bool is_six = host.find(':') != std::string::npos;
  return is_six ? concat("tcp:[", host, "]:", port) : concat("tcp:", host, ":", port);
}

StreamSocket::~StreamSocket() {
  if (file_ >= 0) close(file_);
  if (fd_ >= 0) close(fd_);
}

SocketAddress StreamSocket::own_address() const {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&storage), &size) != 0)
    fail("the connection has no address", errno);
  return {.scheme = "tcp", .host = host_of(storage), .port = bound_port(fd_)};
}

SocketAddress StreamSocket::peer_address() const {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getpeername(fd_, reinterpret_cast<sockaddr*>(&storage), &size) != 0)
    fail("the connection has no peer", errno);
  return {.scheme = "tcp", .host = host_of(storage)};
}

void StreamSocket::fail(const char* what, int error) const {
  const std::lock_guard lock(mutex_);
  if (is_cancelled_) throw HandOverError(HandOverCause::kCancelled, "the hand-over was cancelled");
  throw HandOverError(HandOverCause::kUnreachable,
                      error == 0 ? std::string(what) : concat(what, ": ", std::strerror(error)));
}

void StreamSocket::cancel() noexcept {
  const std::lock_guard lock(mutex_);
  is_cancelled_ = true;
  if (fd_ >= 0) shutdown(fd_, SHUT_RDWR);
}

void StreamSocket::wait(short events, Deadline until) const {
  const BeatPause pause;
  pollfd waited{.fd = fd_, .events = events, .revents = 0};
  while (true) {
    const int count = poll(&waited, 1, milliseconds_until(until));
    if (count > 0) return;
    if (count < 0 && errno != EINTR) fail("the connection cannot be waited for", errno);
    if (count == 0 && std::chrono::steady_clock::now() >= until)
      throw HandOverError(HandOverCause::kTimeout, "the peer does not answer");
  }
}

void StreamSocket::connect(const SocketAddress& address, Deadline until) {
  RawAddress to = raw(address);
  {
    const std::lock_guard lock(mutex_);
    if (!is_cancelled_) fd_ = socket(to.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  }
  if (fd_ < 0) fail("no socket", errno);
  if (to.family != AF_UNIX) set_option(fd_, IPPROTO_TCP, TCP_NODELAY);
  if (::connect(fd_, to.get(), to.size) == 0) return;
  if (errno != EINPROGRESS) fail(address.text().c_str(), errno);
  wait(POLLOUT, until);
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) fail(address.text().c_str(), error);
}

void StreamSocket::read(std::span<std::byte> bytes, Deadline until,
                        std::chrono::milliseconds patience) {
  while (!bytes.empty()) {
    iovec part{.iov_base = bytes.data(), .iov_len = bytes.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t count = recvmsg(fd_, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (count == 0) fail("the peer closed the connection", 0);
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        wait(POLLIN, until);
      } else if (errno != EINTR) {
        fail("the connection broke", errno);
      }
      continue;
    }
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      if (file_ >= 0) close(file_);
      std::memcpy(&file_, CMSG_DATA(c), sizeof(file_));
    }
    bytes = bytes.subspan(static_cast<size_t>(count));
    if (patience.count() > 0) until = std::max(until, std::chrono::steady_clock::now() + patience);
  }
}

int StreamSocket::take_file() { return std::exchange(file_, -1); }

void StreamSocket::write(Bytes bytes, std::chrono::milliseconds patience) {
  while (!bytes.empty()) {
    const ssize_t count = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      bytes = bytes.subspan(static_cast<size_t>(count));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait(POLLOUT, std::chrono::steady_clock::now() + patience);
    } else if (errno != EINTR) {
      fail("the connection broke", errno);
    }
  }
}

void StreamSocket::write_with_file(Bytes bytes, int file, std::chrono::milliseconds patience) {
  iovec part{.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(c), &file, sizeof(file));
  while (sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait(POLLOUT, std::chrono::steady_clock::now() + patience);
    } else if (errno != EINTR) {
      fail("the connection broke", errno);
    }
  }
  write(bytes.subspan(1), patience);
}

Listener::Listener(const std::vector<SocketAddress>& addresses) : addresses_(addresses) {
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  for (SocketAddress& address : addresses_) {
    RawAddress at = raw(address);
    const int fd = socket(at.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0) fds_.push_back(fd);
    if (fd >= 0 && at.family != AF_UNIX) set_option(fd, SOL_SOCKET, SO_REUSEADDR);
    if (fd >= 0 && at.family == AF_INET6) set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY);
    if (fd < 0 || bind(fd, at.get(), at.size) != 0 || listen(fd, kBacklog) != 0) {
      const int error = errno;
      for (const int open : fds_) close(open);
      close(wake_fd_);
      throw InvalidArgument(
          concat("cannot listen on ", address.text(), ": ", std::strerror(error)));
    }
    if (at.family != AF_UNIX) address.port = bound_port(fd);
  }
}

Listener::~Listener() {
  for (const int fd : fds_) close(fd);
  close(wake_fd_);
}

int Listener::accept() {
  std::vector<pollfd> waited;
  for (const int fd : fds_) waited.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  waited.push_back({.fd = wake_fd_, .events = POLLIN, .revents = 0});
  while (true) {
    if (poll(waited.data(), waited.size(), -1) < 0 && errno != EINTR) return -1;
    if (waited.back().revents != 0) return -1;
    for (const pollfd& one : waited) {
      if ((one.revents & POLLIN) == 0) continue;
      const int fd = accept4(one.fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) {
        // Out of descriptors: those who wait stay in the backlog.
        if (errno == EMFILE || errno == ENFILE) poll(&waited.back(), 1, 100);
        continue;
      }
      set_option(fd, IPPROTO_TCP, TCP_NODELAY);
      return fd;
    }
  }
}

void Listener::stop() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t count = ::write(wake_fd_, &one, sizeof(one));
}

}  // namespace llmserve
