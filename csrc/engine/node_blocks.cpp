#include "engine/node_blocks.h"

#include <chrono>
#include <cstring>
#include <functional>

#include "comm/wire_bytes.h"
#include "engine/node_leader.h"

namespace llmserve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience{10};
constexpr std::chrono::hours kForever{24 * 365};
constexpr size_t kAskedBytes = 10;

RankBytes asked(uint16_t group, int32_t block, int64_t num_tokens) {
  RankBytes bytes;
  WireWriter(bytes)
      .integer(group)
      .integer(static_cast<uint32_t>(block))
      .integer(static_cast<uint32_t>(num_tokens));
  return bytes;
}

// What of a block a node has sent goes to its places.
void take_ranges(Bytes payload, std::span<std::byte> out) {
  WireReader reader(payload);
  const auto most = static_cast<int64_t>(out.size());
  const auto count = reader.integer<uint32_t>(0, most, "a block of too many ranges");
  const size_t head_bytes = sizeof(uint32_t) * (1 + 2 * size_t{count});
  if (payload.size() < head_bytes) WireReader::fail("a block that is cut short");
  Bytes left = payload.subspan(head_bytes);
  for (uint32_t i = 0; i < count; ++i) {
    const size_t begin = reader.integer<uint32_t>(0, most, "a range of a block");
    const size_t size =
        reader.integer<uint32_t>(0, most - static_cast<int64_t>(begin), "a range of a block");
    if (size > left.size()) WireReader::fail("a block that is cut short");
    std::memcpy(out.data() + begin, left.data(), size);
    left = left.subspan(size);
  }
  if (!left.empty()) WireReader::fail("a block that is too long");
}

RankBytes own_ranges(const KvBlockBytes& blocks, uint16_t group, Bytes whole) {
  const std::vector<ByteRange> ranges = blocks.ranges(group);
  RankBytes bytes;
  WireWriter writer(bytes);
  writer.integer(static_cast<uint32_t>(ranges.size()));
  for (const ByteRange& range : ranges)
    writer.integer(static_cast<uint32_t>(range.begin)).integer(static_cast<uint32_t>(range.size));
  for (const ByteRange& range : ranges) {
    const Bytes part = whole.subspan(range.begin, range.size);
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  return bytes;
}

}  // namespace

void NodeBlocks::read(uint16_t group, int32_t block, int64_t num_tokens,
                      std::span<std::byte> out) const {
  own_.read(group, block, num_tokens, out);
  leader_.ask_blocks(RankFrameType::kReadBlock, asked(group, block, num_tokens),
                     RankFrameType::kBlock, [&](Bytes payload) { take_ranges(payload, out); });
}

void NodeBlocks::write(uint16_t group, int32_t block, Bytes in) {
  own_.write(group, block, in);
  RankBytes bytes = asked(group, block, 0);
  bytes.insert(bytes.end(), in.begin(), in.end());
  leader_.ask_blocks(RankFrameType::kWriteBlock, bytes, RankFrameType::kDone, [](Bytes) {});
}

void serve_blocks(RankLink& link, KvBlockBytes& blocks, int32_t num_blocks,
                  const std::function<bool()>& has_cache) {
  const KvWireShape& shape = blocks.shape();
  std::vector<std::byte> whole;
  while (true) {
    const RankFrame frame = link.receive(Clock::now() + kForever);
    if (frame.head.type == RankFrameType::kEnd) return;
    WireReader reader(frame.payload);
    const auto group = reader.integer<uint16_t>(
        0, static_cast<int64_t>(shape.block_bytes.size()) - 1, "a cache group that there is not");
    const auto block = static_cast<int32_t>(
        reader.integer<uint32_t>(0, num_blocks - 1, "a block that there is not"));
    const int64_t num_tokens =
        reader.integer<uint32_t>(0, shape.block_size, "tokens that a block has not");
    const size_t num_bytes = shape.block_bytes[group];
    const bool is_write = frame.head.type == RankFrameType::kWriteBlock;
    if (!is_write && frame.head.type != RankFrameType::kReadBlock)
      throw DeviceError("what is asked about blocks is nothing that there is");
    if (frame.payload.size() != kAskedBytes + (is_write ? num_bytes : 0))
      WireReader::fail("a block of another size");
    if (!has_cache()) {
      link.send(RankFrameType::kFailed, text_payload("its KV cache is given back"), kPatience);
    } else if (is_write) {
      blocks.write(group, block, frame.payload.subspan(kAskedBytes));
      link.send(RankFrameType::kDone, {}, kPatience);
    } else {
      whole.resize(num_bytes);
      blocks.read(group, block, num_tokens, whole);
      link.send(RankFrameType::kBlock, own_ranges(blocks, group, whole), kPatience);
    }
  }
}

}  // namespace llmserve
