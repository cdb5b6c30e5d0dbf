#include "comm/kv_frame.h"

#include <algorithm>

#include "comm/wire_bytes.h"

namespace llmserve {
namespace {

constexpr uint32_t kMagic = 0x31564b4c;  // "LKV1"
constexpr size_t kMaxClassBytes = 256;
constexpr size_t kMaxTextBytes = 512;

struct KvFrameFailure {
  [[noreturn]] static void fail(const char* what) {
    throw HandOverError(HandOverCause::kCorrupt, concat("a frame of KV blocks: ", what));
  }
};
using Reader = BasicWireReader<KvFrameFailure>;

BlockPlace read_place(Reader& reader) {
  BlockPlace place;
  place.group = reader.integer<uint16_t>();
  place.place = reader.integer<uint32_t>();
  return place;
}

void write_place(WireWriter& writer, const BlockPlace& block) {
  writer.integer(block.group).integer(block.place);
}

// What `write` gives the writer.
template <class Write>
FrameBytes written(const Write& write) {
  FrameBytes bytes;
  WireWriter writer(bytes);
  write(writer);
  return bytes;
}

}  // namespace

uint32_t max_payload_bytes(FrameType type) {
  switch (type) {
    case FrameType::kHello:
    case FrameType::kWelcome:
    case FrameType::kRefusal:
      return kMaxHelloBytes;
    case FrameType::kPull:
      return kMaxPullBytes;
    case FrameType::kBlock:
      return kMaxBlockBytes;
    case FrameType::kSlot:
    case FrameType::kFree:
      return 16;
    case FrameType::kEnd:
    case FrameType::kWait:
      return 0;
  }
  return 0;
}

FrameHead read_frame_head(std::span<const std::byte, kFrameHeadBytes> bytes) {
  Reader reader(bytes);
  if (reader.integer<uint32_t>() != kMagic) Reader::fail("it does not begin as one");
  FrameHead head;
  const auto type = reader.integer<uint8_t>();
  if (type < static_cast<uint8_t>(FrameType::kHello) ||
      type > static_cast<uint8_t>(FrameType::kWait))
    Reader::fail("its type is not known");
  head.type = static_cast<FrameType>(type);
  const bool is_zero = reader.integer<uint8_t>() == 0 && reader.integer<uint16_t>() == 0;
  head.num_bytes = reader.integer<uint32_t>();
  if (!is_zero || reader.integer<uint32_t>() != 0) Reader::fail("what has to be 0 is not");
  if (head.num_bytes > max_payload_bytes(head.type)) Reader::fail("it is too long for its type");
  head.number = reader.integer<uint64_t>();
  head.code = reader.hash();
  return head;
}

HelloFrame read_hello(Bytes payload) {
  Reader reader(payload);
  HelloFrame hello;
  hello.version = reader.integer<uint32_t>();
  hello.nonce = reader.hash();
  if (hello.version != kKvProtocolVersion) return hello;  // nobody knows what follows
  hello.numerics_class = reader.text(kMaxClassBytes);
  hello.shape.block_size = reader.integer<uint32_t>();
  const size_t num_groups = reader.integer<uint16_t>();
  if (num_groups > kMaxCacheGroups) Reader::fail("it has too many groups");
  for (size_t i = 0; i < num_groups; ++i)
    hello.shape.block_bytes.push_back(reader.integer<uint64_t>());
  reader.end();
  return hello;
}

WelcomeFrame read_welcome(Bytes payload) {
  Reader reader(payload);
  WelcomeFrame welcome;
  welcome.epoch = reader.integer<uint64_t>();
  welcome.nonce = reader.hash();
  reader.end();
  return welcome;
}

RefusalFrame read_refusal(Bytes payload) {
  Reader reader(payload);
  RefusalFrame refusal;
  const auto cause = reader.integer<uint8_t>();
  if (cause >= kNumHandOverCauses) Reader::fail("its cause is not known");
  refusal.cause = static_cast<HandOverCause>(cause);
  refusal.text = reader.text(kMaxTextBytes);
  reader.end();
  return refusal;
}

PullFrame read_pull(Bytes payload) {
  Reader reader(payload);
  PullFrame pull;
  pull.id = reader.integer<uint64_t>();
  pull.epoch = reader.integer<uint64_t>();
  pull.num_tokens = reader.integer<uint32_t>();
  pull.prefix = reader.hash();
  pull.num_slots = reader.integer<uint32_t>();
  const size_t count = reader.integer<uint32_t>();
  if (count > reader.num_left() / kBlockPlaceBytes) Reader::fail("it is cut short");
  pull.blocks.reserve(count);
  for (size_t i = 0; i < count; ++i) pull.blocks.push_back(read_place(reader));
  reader.end();
  return pull;
}

BlockPlace read_block(Bytes payload, Bytes& rest) {
  Reader reader(payload);
  const BlockPlace block = read_place(reader);
  rest = reader.take(reader.num_left());
  return block;
}

SlotFrame read_slot(Bytes payload) {
  Reader reader(payload);
  SlotFrame slot;
  slot.slot = reader.integer<uint32_t>();
  slot.block = read_place(reader);
  reader.end();
  return slot;
}

uint32_t read_free(Bytes payload) {
  Reader reader(payload);
  const auto slot = reader.integer<uint32_t>();
  reader.end();
  return slot;
}

void write_frame_head(FrameType type, uint32_t num_bytes, uint64_t number,
                      std::span<std::byte, kFrameHeadBytes> bytes) {
  const FrameBytes head = written([&](WireWriter& writer) {
    writer.integer(kMagic)
        .integer(static_cast<uint8_t>(type))
        .integer(uint8_t{0})
        .integer(uint16_t{0})
        .integer(num_bytes)
        .integer(uint32_t{0})
        .integer(number);
  });
  std::ranges::copy(head, bytes.begin());
}

FrameBytes to_bytes(const HelloFrame& hello) {
  return written([&](WireWriter& writer) {
    writer.integer(hello.version)
        .hash(hello.nonce)
        .text(hello.numerics_class, kMaxClassBytes)
        .integer(hello.shape.block_size)
        .integer(static_cast<uint16_t>(hello.shape.block_bytes.size()));
    for (const uint64_t num_bytes : hello.shape.block_bytes) writer.integer(num_bytes);
  });
}

FrameBytes to_bytes(const WelcomeFrame& welcome) {
  return written([&](WireWriter& writer) { writer.integer(welcome.epoch).hash(welcome.nonce); });
}

FrameBytes to_bytes(const RefusalFrame& refusal) {
  return written([&](WireWriter& writer) {
    writer.integer(static_cast<uint8_t>(refusal.cause)).text(refusal.text, kMaxTextBytes);
  });
}

FrameBytes to_bytes(const PullFrame& pull) {
  return written([&](WireWriter& writer) {
    writer.integer(pull.id)
        .integer(pull.epoch)
        .integer(pull.num_tokens)
        .hash(pull.prefix)
        .integer(pull.num_slots)
        .integer(static_cast<uint32_t>(pull.blocks.size()));
    for (const BlockPlace& block : pull.blocks) write_place(writer, block);
  });
}

FrameBytes to_bytes(const BlockPlace& block) {
  return written([&](WireWriter& writer) { write_place(writer, block); });
}

FrameBytes to_bytes(const SlotFrame& slot) {
  return written([&](WireWriter& writer) {
    writer.integer(slot.slot);
    write_place(writer, slot.block);
  });
}

FrameBytes to_bytes(uint32_t free_slot) {
  return written([&](WireWriter& writer) { writer.integer(free_slot); });
}

}  // namespace llmserve
