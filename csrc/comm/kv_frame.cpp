#include "comm/kv_frame.h"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace llmserve {
namespace {

constexpr uint32_t kMagic = 0x31564b4c;  // "LKV1"
constexpr size_t kMaxClassBytes = 256;
constexpr size_t kMaxTextBytes = 512;

[[noreturn]] void fail(const char* what) {
  throw HandOverError(HandOverCause::kCorrupt, concat("a frame of KV blocks: ", what));
}

class Reader {
 public:
  explicit Reader(Bytes bytes) : bytes_(bytes) {}

  template <class T>
  T integer() {
    const Bytes bytes = take(sizeof(T));
    uint64_t value = 0;
    for (size_t i = sizeof(T); i-- > 0;) value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
    return static_cast<T>(value);
  }
  TokenHash hash() {
    TokenHash hash;
    std::memcpy(hash.bytes.data(), take(hash.bytes.size()).data(), hash.bytes.size());
    return hash;
  }
  std::string text(size_t max_bytes) {
    const size_t count = integer<uint16_t>();
    if (count > max_bytes) fail("a text is too long");
    const Bytes bytes = take(count);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  BlockPlace place() {
    BlockPlace place;
    place.group = integer<uint16_t>();
    place.place = integer<uint32_t>();
    return place;
  }
  Bytes rest() { return take(bytes_.size()); }
  size_t num_left() const { return bytes_.size(); }
  void end() const {
    if (!bytes_.empty()) fail("it is longer than what it says");
  }

 private:
  Bytes take(size_t count) {
    if (count > bytes_.size()) fail("it is cut short");
    const Bytes taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }

  Bytes bytes_;
};

class Writer {
 public:
  template <class T>
  Writer& integer(T value) {
    for (size_t i = 0; i < sizeof(T); ++i)
      bytes_.push_back(static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i)));
    return *this;
  }
  Writer& hash(const TokenHash& hash) {
    const Bytes bytes = bytes_of(hash);
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Writer& text(std::string_view text, size_t max_bytes) {
    text = text.substr(0, max_bytes);
    integer(static_cast<uint16_t>(text.size()));
    const Bytes bytes = std::as_bytes(std::span(text));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Writer& place(const BlockPlace& block) { return integer(block.group).integer(block.place); }
  FrameBytes take() { return std::move(bytes_); }

 private:
  FrameBytes bytes_;
};

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
  if (reader.integer<uint32_t>() != kMagic) fail("it does not begin as one");
  FrameHead head;
  const auto type = reader.integer<uint8_t>();
  if (type < static_cast<uint8_t>(FrameType::kHello) ||
      type > static_cast<uint8_t>(FrameType::kWait))
    fail("its type is not known");
  head.type = static_cast<FrameType>(type);
  const bool is_zero = reader.integer<uint8_t>() == 0 && reader.integer<uint16_t>() == 0;
  head.num_bytes = reader.integer<uint32_t>();
  if (!is_zero || reader.integer<uint32_t>() != 0) fail("what has to be 0 is not");
  if (head.num_bytes > max_payload_bytes(head.type)) fail("it is too long for its type");
  head.number = reader.integer<uint64_t>();
  head.code = reader.hash();
  return head;
}

HelloFrame read_hello(Bytes payload) {
  Reader reader(payload);
  HelloFrame hello;
  hello.version = reader.integer<uint32_t>();
  hello.nonce = reader.hash();
  hello.numerics_class = reader.text(kMaxClassBytes);
  hello.shape.block_size = reader.integer<uint32_t>();
  const size_t num_groups = reader.integer<uint16_t>();
  if (num_groups > kMaxCacheGroups) fail("it has too many groups");
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
  if (cause >= kNumHandOverCauses) fail("its cause is not known");
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
  if (count > reader.num_left() / kBlockPlaceBytes) fail("it is cut short");
  pull.blocks.reserve(count);
  for (size_t i = 0; i < count; ++i) pull.blocks.push_back(reader.place());
  reader.end();
  return pull;
}

BlockPlace read_block(Bytes payload, Bytes& rest) {
  Reader reader(payload);
  const BlockPlace block = reader.place();
  rest = reader.rest();
  return block;
}

SlotFrame read_slot(Bytes payload) {
  Reader reader(payload);
  SlotFrame slot;
  slot.slot = reader.integer<uint32_t>();
  slot.block = reader.place();
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
  const FrameBytes head = Writer()
                              .integer(kMagic)
                              .integer(static_cast<uint8_t>(type))
                              .integer(uint8_t{0})
                              .integer(uint16_t{0})
                              .integer(num_bytes)
                              .integer(uint32_t{0})
                              .integer(number)
                              .take();
  std::ranges::copy(head, bytes.begin());
}

FrameBytes to_bytes(const HelloFrame& hello) {
  Writer writer;
  writer.integer(hello.version)
      .hash(hello.nonce)
      .text(hello.numerics_class, kMaxClassBytes)
      .integer(hello.shape.block_size)
      .integer(static_cast<uint16_t>(hello.shape.block_bytes.size()));
  for (const uint64_t num_bytes : hello.shape.block_bytes) writer.integer(num_bytes);
  return writer.take();
}

FrameBytes to_bytes(const WelcomeFrame& welcome) {
  return Writer().integer(welcome.epoch).hash(welcome.nonce).take();
}

FrameBytes to_bytes(const RefusalFrame& refusal) {
  return Writer()
      .integer(static_cast<uint8_t>(refusal.cause))
      .text(refusal.text, kMaxTextBytes)
      .take();
}

FrameBytes to_bytes(const PullFrame& pull) {
  Writer writer;
  writer.integer(pull.id)
      .integer(pull.epoch)
      .integer(pull.num_tokens)
      .hash(pull.prefix)
      .integer(pull.num_slots)
      .integer(static_cast<uint32_t>(pull.blocks.size()));
  for (const BlockPlace& block : pull.blocks) writer.place(block);
  return writer.take();
}

FrameBytes to_bytes(const BlockPlace& block) { return Writer().place(block).take(); }

FrameBytes to_bytes(const SlotFrame& slot) {
  return Writer().integer(slot.slot).place(slot.block).take();
}

FrameBytes to_bytes(uint32_t free_slot) { return Writer().integer(free_slot).take(); }

}  // namespace llmserve
