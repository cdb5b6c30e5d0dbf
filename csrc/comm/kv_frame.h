// The frames in which KV blocks travel, as bytes: little-endian, of a fixed head and a payload.
//
//   head     magic u32, type u8, 0 u8, 0 u16, payload bytes u32, 0 u32, number u64, code [32]
//   payload  of the type, below
//
// The code is HMAC-SHA-256 of the head before it and the payload. `number` counts the frames of a
// direction from 0, so that none can be left out, repeated or moved. Readers take nothing from a
// payload before its code is right, but for the hello, whose size is bounded.
//
//   hello    receiver: version u32, nonce [32], numerics class (u16 and so many characters),
//            tokens of a block u32, groups u16, of each group bytes of a block u64
//   welcome  sender: epoch u64, nonce [32]
//   refusal  sender: cause u8, text (u16 and so many characters)
//   pull     receiver: id u64, epoch u64, tokens u32, their hash [32], slots u32, blocks u32,
//            of each block group u16 and place u32
//   block    sender: group u16, place u32, then the block's bytes
//   slot     sender: slot u32 of shared memory, group u16, place u32
//   free     receiver: slot u32, which may be written to again
//   end      sender: these were all, and are of the tokens that were asked for; receiver: it has
//            them, and the sender may let go
//   wait     sender: what comes next is not computed yet
//
// Blocks are named by their place in the sequence of tokens that has this hash. No frame has an
// address, and none a size that is not bounded here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/hand_over_error.h"
#include "comm/message_code.h"

namespace llmserve {

enum class FrameType : uint8_t {
  kHello = 1,
  kWelcome,
  kRefusal,
  kPull,
  kBlock,
  kSlot,
  kFree,
  kEnd,
  kWait,
};

inline constexpr uint32_t kKvProtocolVersion = 3;
inline constexpr size_t kFrameHeadBytes = 56;
inline constexpr size_t kSignedHeadBytes = 24;    // of the head, before the code
inline constexpr uint32_t kMaxHelloBytes = 1024;  // read before anything is known of the peer
inline constexpr uint32_t kMaxPullBytes = 8 << 20;
inline constexpr uint32_t kMaxBlockBytes = 256 << 20;
inline constexpr size_t kBlockPlaceBytes = 6;  // of a payload
inline constexpr size_t kMaxCacheGroups = 64;

// Where a block is in a sequence's tables.
struct BlockPlace {
  uint16_t group = 0;
  uint32_t place = 0;

  friend bool operator==(const BlockPlace&, const BlockPlace&) = default;
};

// How a cache's blocks look on the wire: equal on both sides, whatever their own layouts are.
struct KvWireShape {
  uint32_t block_size = 0;            // tokens
  std::vector<uint64_t> block_bytes;  // [groups]

  friend bool operator==(const KvWireShape&, const KvWireShape&) = default;
};

struct FrameHead {
  FrameType type = FrameType::kEnd;
  uint32_t num_bytes = 0;  // of the payload
  uint64_t number = 0;
  TokenHash code;
};
struct HelloFrame {
  uint32_t version = kKvProtocolVersion;
  TokenHash nonce;
  std::string numerics_class;
  KvWireShape shape;
};
struct WelcomeFrame {
  uint64_t epoch = 0;
  TokenHash nonce;
};
struct RefusalFrame {
  HandOverCause cause = HandOverCause::kGone;
  std::string text;
};
struct PullFrame {
  uint64_t id = 0;
  uint64_t epoch = 0;
  uint32_t num_tokens = 0;
  TokenHash prefix;        // of all of them, as KvCacheManager chains it
  uint32_t num_slots = 0;  // of shared memory; 0: blocks come as frames
  std::vector<BlockPlace> blocks;
};
struct SlotFrame {
  uint32_t slot = 0;
  BlockPlace block;
};

// The most that a payload of this type has.
uint32_t max_payload_bytes(FrameType type);

// Each read_x() throws HandOverError (kCorrupt) for what is not exactly one x.
FrameHead read_frame_head(std::span<const std::byte, kFrameHeadBytes> bytes);
// Of another version the version and the nonce alone, with which it can be refused.
HelloFrame read_hello(Bytes payload);
WelcomeFrame read_welcome(Bytes payload);
RefusalFrame read_refusal(Bytes payload);
PullFrame read_pull(Bytes payload);
// The block's bytes are `rest`, a part of the payload.
BlockPlace read_block(Bytes payload, Bytes& rest);
SlotFrame read_slot(Bytes payload);
uint32_t read_free(Bytes payload);

using FrameBytes = std::vector<std::byte>;

// The head without its code, which is the last 32 bytes.
void write_frame_head(FrameType type, uint32_t num_bytes, uint64_t number,
                      std::span<std::byte, kFrameHeadBytes> bytes);
FrameBytes to_bytes(const HelloFrame& hello);
FrameBytes to_bytes(const WelcomeFrame& welcome);
FrameBytes to_bytes(const RefusalFrame& refusal);
FrameBytes to_bytes(const PullFrame& pull);
FrameBytes to_bytes(const BlockPlace& block);
FrameBytes to_bytes(const SlotFrame& slot);
FrameBytes to_bytes(uint32_t free_slot);

}  // namespace llmserve
