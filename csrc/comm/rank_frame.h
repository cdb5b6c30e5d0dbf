// The frames that ranks of several processes exchange, as bytes: little-endian, of a head, a
// payload and a code.
//
//   head     magic u32, type u8, op u8, dtype u8, 0 u8, payload bytes u64, number u64
//   payload  of the type, below
//   code     [16] of head and payload: of the hello and the welcome the first half of
//            HMAC-SHA-256, then SipHash-2-4 under a key of the connection and direction
//
// `number` counts the frames of a direction from 0, so that none can be left out, repeated or
// moved.
//
//   hello     who comes: RankHello        welcome  who is come to: RankWelcome
//   refusal   text                        beat     nothing: the process lives
//   meet      rank 0 to others: epoch u64, nodes u16, of each the address of its door
//   met       the answer: its epoch u64   failed   text: a step or order has failed
//   step      what to run (engine/step_wire.h); answered by nothing
//   keep states, head step   of a head that drafts (engine/head_wire.h); likewise
//   release, restore   part u8; answered by `done`, which also says that weights are loaded
//   read block, write block   answered by `block` and `done` (engine/node_blocks.h)
//   end       no more steps               exchange a part of a tensor: op and dtype in the head
//
// Frames name blocks by their numbers, which whoever reads checks. No frame has an address of
// memory, and none a size that is not bounded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/message_code.h"
#include "core/dtype.h"

namespace llmserve {

enum class RankFrameType : uint8_t {
  kHello = 1,
  kWelcome,
  kRefusal,
  kBeat,
  kMeet,
  kMet,
  kStep,
  kFailed,
  kRelease,
  kRestore,
  kDone,
  kEnd,
  kKeepStates,
  kHeadStep,
  kReadBlock,
  kWriteBlock,
  kBlock,
  kExchange,
};

// What a rank asks of its communicator.
enum class RankOp : uint8_t {
  kNone,
  kAllReduce,
  kAllGather,
  kGatherColumns,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kSend,
  kBarrier,
};
// "all_reduce".
const char* name(RankOp op);

inline constexpr uint32_t kRankProtocolVersion = 2;
inline constexpr size_t kRankHeadBytes = 24;
inline constexpr uint64_t kMaxRankGreetingBytes = 16 << 10;
inline constexpr uint64_t kMaxStepBytes = 1 << 30;  // of prompts' embeddings, most of it
// Payload bytes of the type.
uint64_t max_payload_bytes(RankFrameType type);

struct RankHead {
  RankFrameType type = RankFrameType::kBeat;
  RankOp op = RankOp::kNone;
  DType dtype = DType::kU8;
  uint64_t num_bytes = 0;
  uint64_t number = 0;
};
using RankHeadBytes = std::array<std::byte, kRankHeadBytes>;
RankHeadBytes to_bytes(const RankHead& head);
// Throws DeviceError for what is no head.
RankHead read_rank_head(const RankHeadBytes& bytes);

// What a connection is for.
enum class RankPurpose : uint8_t { kOrders, kBeats, kExchange, kBlocks };

// Whose connection it is. Two ranks of a group exchange through one of their own.
struct RankPlaceName {
  RankPurpose purpose = RankPurpose::kOrders;
  uint32_t node = 0;   // who comes
  uint64_t epoch = 0;  // of the meeting; 0 but for exchanges
  uint32_t group = 0;
  uint32_t from = 0, to = 0;  // ranks of the group: who comes, and to whom
  auto operator<=>(const RankPlaceName&) const = default;
};

struct RankHello {
  uint32_t version = kRankProtocolVersion;
  TokenHash nonce;
  RankPlaceName place;
  uint32_t port = 0;     // of the node's own door
  std::string settings;  // lines of name=value that all nodes have alike; for orders
};
struct RankWelcome {
  TokenHash nonce;
  std::string settings;  // of rank 0, that the others take
};
using RankBytes = std::vector<std::byte>;
RankBytes to_bytes(const RankHello& hello);
RankBytes to_bytes(const RankWelcome& welcome);
// Each throws DeviceError.
RankHello read_rank_hello(Bytes payload);
RankWelcome read_rank_welcome(Bytes payload);

struct RankMeeting {
  uint64_t epoch = 0;
  std::vector<std::string> doors;  // [nodes] addresses, as SocketAddress has them
};
RankBytes to_bytes(const RankMeeting& meeting);
RankMeeting read_rank_meeting(Bytes payload);

RankBytes epoch_payload(uint64_t epoch);
uint64_t read_epoch_payload(Bytes payload);
RankBytes text_payload(const std::string& text);
std::string read_text_payload(Bytes payload);

}  // namespace llmserve
