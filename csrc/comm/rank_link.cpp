#include "comm/rank_link.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace llmserve {
namespace {

constexpr std::chrono::milliseconds kGreetingPatience{5000};
constexpr size_t kCodeBytes = sizeof(ShortCode);
// Room is made for so much of a payload at a time: what its head says is not signed yet.
constexpr size_t kPieceBytes = 1 << 20;

Bytes text_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

TokenHash make_nonce() {
  TokenHash nonce;
  fill_random(std::as_writable_bytes(std::span(nonce.bytes)));
  return nonce;
}

ShortCode first_half(const TokenHash& hash) {
  ShortCode code;
  std::memcpy(code.data(), hash.bytes.data(), code.size());
  return code;
}

bool are_alike(const ShortCode& a, const ShortCode& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= std::to_integer<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

// StreamSocket's words are about hand-overs of KV blocks.
template <class Work>
void with_words_of_ranks(const Work& work) {
  try {
    work();
  } catch (const HandOverError& error) {
    switch (error.cause()) {
      case HandOverCause::kCancelled:
        throw DeviceError("the exchange with another rank was ended");
      case HandOverCause::kTimeout:
        throw DeviceError("another rank does not answer");
      default:
        throw DeviceError(concat("another rank cannot be reached: ", error.what()));
    }
  }
}

[[noreturn]] void fail_connection(int error) {
  if (error == EPIPE || error == ECONNRESET) throw DeviceError("it has gone");
  throw DeviceError(concat("the connection broke: ", std::strerror(error)));
}

// The parts of head, payload and code that follow the first `done` bytes.
template <class Byte>
std::array<iovec, 3> rest_of(std::array<std::span<Byte>, 3> parts, size_t done) {
  std::array<iovec, 3> rest{};
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t skipped = std::min(done, parts[i].size());
    done -= skipped;
    const std::span<Byte> left = parts[i].subspan(skipped);
    rest[i] = {.iov_base = const_cast<std::byte*>(left.data()), .iov_len = left.size()};
  }
  return rest;
}

}  // namespace

std::pair<std::unique_ptr<RankLink>, std::unique_ptr<RankLink>> RankLink::make_pair() {
  int fds[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0)
    throw DeviceError(concat("two ranks of a process get no sockets: ", std::strerror(errno)));
  std::pair ends{std::make_unique<RankLink>(fds[0]), std::make_unique<RankLink>(fds[1])};
  fill_random(ends.first->send_key_);
  fill_random(ends.first->receive_key_);
  ends.second->send_key_ = ends.first->receive_key_;
  ends.second->receive_key_ = ends.first->send_key_;
  return ends;
}

TokenHash RankLink::derive(const char* use, std::initializer_list<Bytes> parts) const {
  TokenHash key = message_code(text_bytes(key_), {text_bytes(use)});
  for (const Bytes part : parts) key = message_code(bytes_of(key), {part});
  return key;
}

void RankLink::begin_session(const TokenHash& comer, const TokenHash& host, bool is_comer) {
  const auto session = [&](const char* use) {
    return first_half(derive(use, {bytes_of(comer), bytes_of(host)}));
  };
  send_key_ = session(is_comer ? "rank, to host" : "rank, to comer");
  receive_key_ = session(is_comer ? "rank, to comer" : "rank, to host");
  num_sent_ = num_received_ = 0;
}

void RankLink::write(Bytes bytes, std::chrono::milliseconds patience) {
  with_words_of_ranks([&] { socket_.write(bytes, patience); });
}

void RankLink::read(std::span<std::byte> bytes, Deadline until) {
  with_words_of_ranks([&] { socket_.read(bytes, until); });
}

void RankLink::send_greeting(RankFrameType type, Bytes payload, const TokenHash& key) {
  const RankHeadBytes head = to_bytes(RankHead{.type = type, .num_bytes = payload.size()});
  const ShortCode code = first_half(message_code(bytes_of(key), {head, payload}));
  RankBytes all(head.begin(), head.end());
  all.insert(all.end(), payload.begin(), payload.end());
  all.insert(all.end(), code.begin(), code.end());
  write(all, kGreetingPatience);
}

// Nothing of a payload is believed before its code.
RankBytes RankLink::receive_greeting(RankFrameType type, const TokenHash& key, Deadline until) {
  RankHeadBytes bytes{};
  read(bytes, until);
  const RankHead head = read_rank_head(bytes);
  if (head.type != type && head.type != RankFrameType::kRefusal)
    throw DeviceError("a frame of another rank: it is not expected now");
  if (head.num_bytes > kMaxRankGreetingBytes)
    throw DeviceError("a frame of another rank is too long");
  RankBytes payload(head.num_bytes);
  read(payload, until);
  ShortCode code{};
  read(code, until);
  if (!are_alike(code, first_half(message_code(bytes_of(key), {bytes, payload}))))
    throw RankRefusal(
        "a greeting is not signed with this engine's key; give all nodes the same "
        "cluster_key");
  if (head.type == RankFrameType::kRefusal) throw RankRefusal(read_text_payload(payload));
  return payload;
}

void RankLink::connect(const SocketAddress& address, Deadline until) {
  with_words_of_ranks([&] { socket_.connect(address, until); });
}

// Who has another key is told nothing, and hears that the connection has ended.
RankWelcome RankLink::greet(const std::string& key, RankHello hello, Deadline until) {
  key_ = key;
  hello.nonce = make_nonce();
  send_greeting(RankFrameType::kHello, to_bytes(hello), derive("rank, hello", {}));
  const TokenHash answer_key = derive("rank, welcome", {bytes_of(hello.nonce)});
  const RankWelcome welcome =
      read_rank_welcome(receive_greeting(RankFrameType::kWelcome, answer_key, until));
  begin_session(hello.nonce, welcome.nonce, true);
  return welcome;
}

RankHello RankLink::await_hello(const std::string& key, Deadline until) {
  key_ = key;
  RankHello hello =
      read_rank_hello(receive_greeting(RankFrameType::kHello, derive("rank, hello", {}), until));
  comer_nonce_ = hello.nonce;
  return hello;
}

void RankLink::welcome(RankWelcome welcome) {
  welcome.nonce = make_nonce();
  send_greeting(RankFrameType::kWelcome, to_bytes(welcome),
                derive("rank, welcome", {bytes_of(comer_nonce_)}));
  begin_session(comer_nonce_, welcome.nonce, false);
}

void RankLink::refuse(const std::string& why) {
  send_greeting(RankFrameType::kRefusal, text_payload(why),
                derive("rank, welcome", {bytes_of(comer_nonce_)}));
}

void RankLink::send(RankFrameType type, Bytes payload, std::chrono::milliseconds patience) {
  check_internal(payload.size() <= max_payload_bytes(type),
                 "a frame is no longer than its type allows");
  const RankHeadBytes head =
      to_bytes(RankHead{.type = type, .num_bytes = payload.size(), .number = num_sent_++});
  const ShortCode code = short_code(send_key_, {head, payload});
  if (payload.size() > 4096) {
    write(head, patience);
    write(payload, patience);
    write(code, patience);
    return;
  }
  std::array<std::byte, kRankHeadBytes + 4096 + kCodeBytes> all;  // one packet
  std::byte* end = std::ranges::copy(head, all.begin()).out;
  end = std::ranges::copy(payload, end).out;
  end = std::ranges::copy(code, end).out;
  write(Bytes(all.data(), end), patience);
}

RankFrame RankLink::receive(Deadline until) {
  RankHeadBytes bytes{};
  read(bytes, until);
  const RankHead head = read_rank_head(bytes);
  if (head.type == RankFrameType::kExchange)
    throw DeviceError("a frame of another rank: it is not expected now");
  if (head.number != num_received_)
    throw DeviceError("a frame of another rank: its number is not the next");
  payload_.clear();
  while (payload_.size() < head.num_bytes) {
    const size_t done = payload_.size();
    payload_.resize(done + std::min<size_t>(kPieceBytes, head.num_bytes - done));
    read(std::span(payload_).subspan(done), until);
  }
  ShortCode code{};
  read(code, until);
  if (!are_alike(code, short_code(receive_key_, {bytes, payload_})))
    throw DeviceError("a frame of another rank is not signed as it has to be");
  ++num_received_;
  return {.head = head, .payload = payload_};
}

bool RankLink::is_readable(Deadline until) const {
  pollfd waited{.fd = socket_.fd(), .events = POLLIN, .revents = 0};
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  const int timeout = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 3'600'000));
  return poll(&waited, 1, timeout) > 0;
}

void RankLink::begin(const Exchange& exchange) {
  exchange_ = exchange;
  num_out_ = num_in_ = 0;
  if (!exchange.sends) return;
  out_head_ = to_bytes(RankHead{.type = RankFrameType::kExchange,
                                .op = exchange.op,
                                .dtype = exchange.dtype,
                                .num_bytes = exchange.out.size(),
                                .number = num_sent_++});
  out_code_ = short_code(send_key_, {out_head_, exchange.out});
}

// False: the socket takes no more now.
bool RankLink::send_some() {
  const size_t all = kRankHeadBytes + exchange_.out.size() + kCodeBytes;
  while (num_out_ < all) {
    std::array<iovec, 3> parts =
        rest_of<const std::byte>({Bytes(out_head_), exchange_.out, Bytes(out_code_)}, num_out_);
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t count = sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      num_out_ += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return false;
    } else if (errno != EINTR) {
      fail_connection(errno);
    }
  }
  return true;
}

void RankLink::check_exchange_head() {
  const RankHead head = read_rank_head(in_head_);
  if (head.type != RankFrameType::kExchange || head.number != num_received_)
    throw DeviceError("a frame of another rank: it is not expected now");
  if (head.op != exchange_.op || head.dtype != exchange_.dtype ||
      head.num_bytes != exchange_.in.size())
    throw DeviceError(concat("ranks exchange different things: ", name(exchange_.op), " of ",
                             exchange_.in.size(), " bytes in ", name(exchange_.dtype),
                             " is expected, and ", name(head.op), " of ", head.num_bytes, " in ",
                             name(head.dtype), " came"));
}

// What comes lands where it is to be; it counts for nothing before its code is right.
bool RankLink::receive_some() {
  const size_t all = kRankHeadBytes + exchange_.in.size() + kCodeBytes;
  while (num_in_ < all) {
    // Up to the head first: another rank's mistake must not write where a tensor is.
    const bool has_head = num_in_ >= kRankHeadBytes;
    std::array<iovec, 3> parts = rest_of<std::byte>(
        {std::span<std::byte>(in_head_), exchange_.in, std::span<std::byte>(in_code_)}, num_in_);
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = has_head ? parts.size() : 1;
    const ssize_t count = recvmsg(fd(), &message, MSG_DONTWAIT);
    if (count == 0) throw DeviceError("it has gone");
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
      if (errno == EINTR) continue;
      fail_connection(errno);
    }
    num_in_ += static_cast<size_t>(count);
    if (!has_head && num_in_ >= kRankHeadBytes) check_exchange_head();
  }
  if (!are_alike(in_code_, short_code(receive_key_, {in_head_, exchange_.in})))
    throw DeviceError("what another rank sent is not signed as it has to be");
  ++num_received_;
  return true;
}

short RankLink::advance() {
  short events = 0;
  if (exchange_.sends) {
    if (send_some())
      exchange_.sends = false;
    else
      events |= POLLOUT;
  }
  if (exchange_.receives) {
    if (receive_some())
      exchange_.receives = false;
    else
      events |= POLLIN;
  }
  return events;
}

}  // namespace llmserve
