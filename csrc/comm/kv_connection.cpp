#include "comm/kv_connection.h"

#include <algorithm>
#include <cstring>

namespace llmserve {
namespace {

Bytes text_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

TokenHash make_nonce() {
  TokenHash nonce;
  fill_random(std::as_writable_bytes(std::span(nonce.bytes)));
  return nonce;
}

}  // namespace

TokenHash KvConnection::derive(const char* use, std::initializer_list<Bytes> parts) const {
  TokenHash key = message_code(text_bytes(link_.key), {text_bytes(use)});
  for (const Bytes part : parts) key = message_code(bytes_of(key), {part});
  return key;
}

void KvConnection::begin_session(const TokenHash& own, const TokenHash& peer, bool is_receiver) {
  const TokenHash& receiver = is_receiver ? own : peer;
  const TokenHash& sender = is_receiver ? peer : own;
  const auto session = [&](const char* use) {
    return derive(use, {bytes_of(receiver), bytes_of(sender)});
  };
  send_key_ = session(is_receiver ? "receiver to sender" : "sender to receiver");
  receive_key_ = session(is_receiver ? "sender to receiver" : "receiver to sender");
}

uint64_t KvConnection::greet() {
  const HelloFrame hello{
      .nonce = make_nonce(), .numerics_class = link_.numerics_class, .shape = link_.shape};
  send_key_ = derive("hello", {});
  receive_key_ = derive("welcome", {bytes_of(hello.nonce)});
  send(FrameType::kHello, {to_bytes(hello)});
  const WelcomeFrame welcome = read_welcome(receive_greeting(FrameType::kWelcome).payload);
  begin_session(hello.nonce, welcome.nonce, true);
  return welcome.epoch;
}

void KvConnection::welcome(uint64_t epoch) {
  receive_key_ = derive("hello", {});
  const HelloFrame hello = read_hello(receive_greeting(FrameType::kHello).payload);
  send_key_ = derive("welcome", {bytes_of(hello.nonce)});
  const auto refuse_and_throw = [this](const std::string& why) {
    refuse(HandOverCause::kRefused, why);
    throw HandOverError(HandOverCause::kRefused, why);
  };
  if (hello.version != kKvProtocolVersion) {
    refuse_and_throw(concat("the peer speaks version ", hello.version, " of the protocol, not ",
                            kKvProtocolVersion));
  }
  if (hello.numerics_class != link_.numerics_class) {
    refuse_and_throw(concat("the peer is of numerics class ", hello.numerics_class.substr(0, 12),
                            " and not of ", link_.numerics_class.substr(0, 12)));
  }
  if (hello.shape != link_.shape)
    refuse_and_throw("the peer's cache has other blocks; give both the same block_size");
  const WelcomeFrame answer{.epoch = epoch, .nonce = make_nonce()};
  send(FrameType::kWelcome, {to_bytes(answer)});
  begin_session(answer.nonce, hello.nonce, false);
}

KvConnection::Head KvConnection::sign(FrameType type, std::initializer_list<Bytes> parts) {
  size_t num_bytes = 0;
  for (const Bytes part : parts) num_bytes += part.size();
  check_internal(num_bytes <= max_payload_bytes(type), "a frame is no longer than its type allows");
  Head head{};
  write_frame_head(type, static_cast<uint32_t>(num_bytes), num_sent_++, head);
  const Bytes signed_head = Bytes(head).first(kSignedHeadBytes);
  check_internal(parts.size() <= 2, "a payload has up to two parts");
  const Bytes first = parts.size() > 0 ? parts.begin()[0] : Bytes();
  const Bytes second = parts.size() > 1 ? parts.begin()[1] : Bytes();
  const TokenHash code = message_code(bytes_of(send_key_), {signed_head, first, second});
  std::ranges::copy(bytes_of(code), head.begin() + kSignedHeadBytes);
  return head;
}

void KvConnection::send(FrameType type, std::initializer_list<Bytes> parts) {
  const Head head = sign(type, parts);
  socket_.write(head, link_.timeout);
  for (const Bytes part : parts) socket_.write(part, link_.timeout);
}

void KvConnection::send_with_file(FrameType type, Bytes payload, int file) {
  const Head head = sign(type, {payload});
  socket_.write_with_file(head, file, link_.timeout);
  socket_.write(payload, link_.timeout);
}

void KvConnection::refuse(HandOverCause cause, const std::string& text) {
  send(FrameType::kRefusal, {to_bytes(RefusalFrame{.cause = cause, .text = text})});
}

// Whoever has not shown the key has the timeout for all of it. The sender says nothing to one who
// has another key.
Frame KvConnection::receive_greeting(FrameType type) {
  try {
    return receive({type}, std::chrono::milliseconds(0));
  } catch (const HandOverError& error) {
    if (error.cause() != HandOverCause::kUnreachable || type != FrameType::kWelcome) throw;
    throw HandOverError(HandOverCause::kRefused,
                        "the peer ended the connection at its greeting; give both sides the same "
                        "key");
  }
}

Frame KvConnection::receive(std::initializer_list<FrameType> types) {
  return receive(types, link_.timeout);
}

uint64_t KvConnection::max_payload(FrameType type) const {
  uint64_t num_bytes = max_payload_bytes(type);
  if (type != FrameType::kBlock) return num_bytes;
  uint64_t largest = 0;
  for (const uint64_t block : link_.shape.block_bytes) largest = std::max(largest, block);
  return std::min(num_bytes, largest + kBlockPlaceBytes);
}

Frame KvConnection::receive(std::initializer_list<FrameType> types,
                            std::chrono::milliseconds patience) {
  const auto corrupt = [](const char* why) {
    throw HandOverError(HandOverCause::kCorrupt, concat("a frame of KV blocks: ", why));
  };
  const Deadline until = std::chrono::steady_clock::now() + link_.timeout;
  Head bytes;
  socket_.read(bytes, until, patience);
  const FrameHead head = read_frame_head(bytes);
  const bool is_refusal = head.type == FrameType::kRefusal;
  if (!is_refusal && std::ranges::find(types, head.type) == types.end())
    corrupt("it is not expected now");
  if (head.num_bytes > max_payload(head.type)) corrupt("it is too long");
  if (head.number != num_received_) corrupt("its number is not the next");
  payload_.resize(head.num_bytes);
  socket_.read(payload_, until, patience);
  const TokenHash code =
      message_code(bytes_of(receive_key_), {Bytes(bytes).first(kSignedHeadBytes), payload_});
  if (!are_equal(code, head.code)) {
    throw HandOverError(num_received_ == 0 ? HandOverCause::kRefused : HandOverCause::kCorrupt,
                        "a frame of KV blocks is not signed with this engine's key; give both "
                        "sides the same one");
  }
  ++num_received_;
  if (is_refusal) {
    const RefusalFrame refusal = read_refusal(payload_);
    throw HandOverError(refusal.cause, concat("the peer refuses: ", refusal.text));
  }
  return {.type = head.type, .payload = payload_};
}

}  // namespace llmserve
