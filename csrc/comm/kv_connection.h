// A connection on which both sides have proved that they know the key, and every frame is signed.
//
//   receiver -> hello    code under HMAC(key, "hello")
//   sender   -> welcome  code under HMAC(key, "welcome" + the receiver's nonce), or refusal
//
// Then each direction has a key of its own, made of both nonces: a frame of another connection, or
// of the other direction, is not taken. Deriving keys: RFC 2104 as a pseudo-random function.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "comm/kv_frame.h"
#include "comm/stream_socket.h"

namespace llmserve {

// What two engines that hand over to each other have to have alike.
struct KvLink {
  std::string key;
  std::string numerics_class;
  KvWireShape shape;
  std::chrono::milliseconds timeout{5000};  // in which the other side moves on
};

struct Frame {
  FrameType type = FrameType::kEnd;
  Bytes payload;  // valid until the next receive()
};

class KvConnection {
 public:
  KvConnection(StreamSocket& socket, const KvLink& link) : socket_(socket), link_(link) {}

  // The receiver's handshake; returns the sender's epoch. Throws HandOverError, kRefused where the
  // sender says so or has another key.
  uint64_t greet();
  // The sender's. Throws HandOverError; the receiver has been told why as far as it may know.
  void welcome(uint64_t epoch);

  // The parts are one payload.
  void send(FrameType type, std::initializer_list<Bytes> parts);
  // With a descriptor, over a socket of this machine.
  void send_with_file(FrameType type, Bytes payload, int file);
  // Throws HandOverError: what a refusal says, kCorrupt for a frame of none of these types.
  Frame receive(std::initializer_list<FrameType> types);
  void refuse(HandOverCause cause, const std::string& text);
  StreamSocket& socket() { return socket_; }

 private:
  using Head = std::array<std::byte, kFrameHeadBytes>;
  Head sign(FrameType type, std::initializer_list<Bytes> parts);
  Frame receive(std::initializer_list<FrameType> types, std::chrono::milliseconds patience);
  Frame receive_greeting(FrameType type);
  uint64_t max_payload(FrameType type) const;
  TokenHash derive(const char* use, std::initializer_list<Bytes> parts) const;
  void begin_session(const TokenHash& own, const TokenHash& peer, bool is_receiver);

  StreamSocket& socket_;
  const KvLink& link_;
  TokenHash send_key_, receive_key_;
  uint64_t num_sent_ = 0, num_received_ = 0;
  std::vector<std::byte> payload_;
};

}  // namespace llmserve
