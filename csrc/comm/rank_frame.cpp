#include "comm/rank_frame.h"

#include <algorithm>

#include "comm/wire_bytes.h"

namespace llmserve {
namespace {

constexpr uint32_t kMagic = 0x314b524c;  // "LRK1"
constexpr size_t kMaxSettingsBytes = 8 << 10;
constexpr size_t kMaxTextBytes = 4 << 10;
constexpr size_t kMaxAddressBytes = 128;
constexpr int64_t kMaxNodes = 64;

}  // namespace

const char* name(RankOp op) {
  switch (op) {
    case RankOp::kNone:
      return "none";
    case RankOp::kAllReduce:
      return "all_reduce";
    case RankOp::kAllGather:
      return "all_gather";
    case RankOp::kGatherColumns:
      return "gather_columns";
    case RankOp::kReduceScatter:
      return "reduce_scatter";
    case RankOp::kAllToAll:
      return "all_to_all";
    case RankOp::kBroadcast:
      return "broadcast";
    case RankOp::kSend:
      return "send";
    case RankOp::kBarrier:
      return "barrier";
  }
  return "none";
}

uint64_t max_payload_bytes(RankFrameType type) {
  switch (type) {
    case RankFrameType::kHello:
    case RankFrameType::kWelcome:
    case RankFrameType::kRefusal:
    case RankFrameType::kFailed:
    case RankFrameType::kMeet:
      return kMaxRankGreetingBytes;
    case RankFrameType::kStep:
    case RankFrameType::kKeepStates:
    case RankFrameType::kHeadStep:
    case RankFrameType::kWriteBlock:
    case RankFrameType::kBlock:
      return kMaxStepBytes;
    case RankFrameType::kReadBlock:
      return 10;
    case RankFrameType::kRelease:
    case RankFrameType::kRestore:
      return 1;
    case RankFrameType::kExchange:
      return uint64_t{1} << 40;  // who reads knows how many it awaits
    case RankFrameType::kMet:
      return 8;
    case RankFrameType::kBeat:
    case RankFrameType::kDone:
    case RankFrameType::kEnd:
      return 0;
  }
  return 0;
}

RankHeadBytes to_bytes(const RankHead& head) {
  RankHeadBytes bytes{};
  const auto put = [&](size_t at, size_t size, uint64_t value) {
    for (size_t i = 0; i < size; ++i) bytes[at + i] = static_cast<std::byte>(value >> (8 * i));
  };
  put(0, 4, kMagic);
  put(4, 1, static_cast<uint64_t>(head.type));
  put(5, 1, static_cast<uint64_t>(head.op));
  put(6, 1, static_cast<uint64_t>(head.dtype));
  put(8, 8, head.num_bytes);
  put(16, 8, head.number);
  return bytes;
}

RankHead read_rank_head(const RankHeadBytes& bytes) {
  WireReader reader(bytes);
  if (reader.integer<uint32_t>() != kMagic) WireReader::fail("it does not begin as one");
  RankHead head;
  head.type = static_cast<RankFrameType>(
      reader.integer<uint8_t>(static_cast<int64_t>(RankFrameType::kHello),
                              static_cast<int64_t>(RankFrameType::kExchange), "its type"));
  const bool is_exchange = head.type == RankFrameType::kExchange;
  head.op = static_cast<RankOp>(reader.integer<uint8_t>(
      is_exchange ? 1 : 0, is_exchange ? static_cast<int64_t>(RankOp::kBarrier) : 0, "its op"));
  head.dtype = static_cast<DType>(
      reader.integer<uint8_t>(0, static_cast<int64_t>(DType::kF8E5M2), "its dtype"));
  reader.integer<uint8_t>(0, 0, "what has to be 0 is not");
  head.num_bytes = reader.integer<uint64_t>();
  if (head.num_bytes > max_payload_bytes(head.type)) WireReader::fail("it is too long");
  head.number = reader.integer<uint64_t>();
  return head;
}

RankBytes to_bytes(const RankHello& hello) {
  RankBytes bytes;
  WireWriter(bytes)
      .integer(hello.version)
      .hash(hello.nonce)
      .integer(static_cast<uint8_t>(hello.place.purpose))
      .integer(hello.place.node)
      .integer(hello.place.epoch)
      .integer(hello.place.group)
      .integer(hello.place.from)
      .integer(hello.place.to)
      .integer(hello.port)
      .text(hello.settings, kMaxSettingsBytes);
  return bytes;
}

RankHello read_rank_hello(Bytes payload) {
  WireReader reader(payload);
  RankHello hello;
  hello.version = reader.integer<uint32_t>();
  hello.nonce = reader.hash();
  hello.place.purpose = static_cast<RankPurpose>(
      reader.integer<uint8_t>(0, static_cast<int64_t>(RankPurpose::kBlocks), "its purpose"));
  hello.place.node = reader.integer<uint32_t>();
  hello.place.epoch = reader.integer<uint64_t>();
  hello.place.group = reader.integer<uint32_t>();
  hello.place.from = reader.integer<uint32_t>();
  hello.place.to = reader.integer<uint32_t>();
  hello.port = reader.integer<uint32_t>(0, 65535, "its port");
  hello.settings = reader.text(kMaxSettingsBytes);
  reader.end();
  return hello;
}

RankBytes to_bytes(const RankWelcome& welcome) {
  RankBytes bytes;
  WireWriter(bytes).hash(welcome.nonce).text(welcome.settings, kMaxSettingsBytes);
  return bytes;
}

RankWelcome read_rank_welcome(Bytes payload) {
  WireReader reader(payload);
  RankWelcome welcome;
  welcome.nonce = reader.hash();
  welcome.settings = reader.text(kMaxSettingsBytes);
  reader.end();
  return welcome;
}

RankBytes to_bytes(const RankMeeting& meeting) {
  RankBytes bytes;
  WireWriter writer(bytes);
  writer.integer(meeting.epoch).integer(static_cast<uint16_t>(meeting.doors.size()));
  for (const std::string& door : meeting.doors) writer.text(door, kMaxAddressBytes);
  return bytes;
}

RankMeeting read_rank_meeting(Bytes payload) {
  WireReader reader(payload);
  RankMeeting meeting;
  meeting.epoch = reader.integer<uint64_t>();
  const auto count = reader.integer<uint16_t>(1, kMaxNodes, "its nodes");
  for (int i = 0; i < count; ++i) meeting.doors.push_back(reader.text(kMaxAddressBytes));
  reader.end();
  return meeting;
}

RankBytes epoch_payload(uint64_t epoch) {
  RankBytes bytes;
  WireWriter(bytes).integer(epoch);
  return bytes;
}

uint64_t read_epoch_payload(Bytes payload) {
  WireReader reader(payload);
  const auto epoch = reader.integer<uint64_t>();
  reader.end();
  return epoch;
}

RankBytes text_payload(const std::string& text) {
  RankBytes bytes;
  WireWriter(bytes).text(text, kMaxTextBytes);
  return bytes;
}

std::string read_text_payload(Bytes payload) {
  WireReader reader(payload);
  std::string text = reader.text(kMaxTextBytes);
  reader.end();
  return text;
}

}  // namespace llmserve
