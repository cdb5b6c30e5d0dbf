// A frame of KV blocks as bytes, read as whatever it says it is, and written again.
#pragma once

#include <algorithm>

#include "comm/kv_frame.h"

namespace llmserve {

// A head and its payload. Throws HandOverError for what is no frame. Codes are not looked at.
inline FrameBytes kv_frame_round_trip(Bytes bytes) {
  if (bytes.size() < kFrameHeadBytes)
    throw HandOverError(HandOverCause::kCorrupt, "a frame of KV blocks: it is cut short");
  const FrameHead head = read_frame_head(bytes.first<kFrameHeadBytes>());
  const Bytes payload = bytes.subspan(kFrameHeadBytes);
  if (payload.size() != head.num_bytes)
    throw HandOverError(HandOverCause::kCorrupt, "a frame of KV blocks: its length is another");
  FrameBytes written(kFrameHeadBytes);
  write_frame_head(head.type, head.num_bytes, head.number,
                   std::span(written).first<kFrameHeadBytes>());
  std::ranges::copy(bytes_of(head.code), written.begin() + kSignedHeadBytes);
  const auto append = [&](Bytes more) { written.insert(written.end(), more.begin(), more.end()); };
  switch (head.type) {
    case FrameType::kHello:
      if (const HelloFrame hello = read_hello(payload); hello.version == kKvProtocolVersion)
        append(to_bytes(hello));
      else
        append(payload);
      break;
    case FrameType::kWelcome:
      append(to_bytes(read_welcome(payload)));
      break;
    case FrameType::kRefusal:
      append(to_bytes(read_refusal(payload)));
      break;
    case FrameType::kPull:
      append(to_bytes(read_pull(payload)));
      break;
    case FrameType::kBlock: {
      Bytes rest;
      append(to_bytes(read_block(payload, rest)));
      append(rest);
      break;
    }
    case FrameType::kSlot:
      append(to_bytes(read_slot(payload)));
      break;
    case FrameType::kFree:
      append(to_bytes(read_free(payload)));
      break;
    case FrameType::kEnd:
    case FrameType::kWait:
      break;
  }
  return written;
}

// One of each type.
inline std::vector<FrameBytes> kv_frame_samples() {
  TokenHash hash;
  for (size_t i = 0; i < hash.bytes.size(); ++i) hash.bytes[i] = static_cast<uint8_t>(7 * i);
  const std::byte block[] = {std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};
  FrameBytes block_payload = to_bytes(BlockPlace{.group = 1, .place = 2});
  block_payload.insert(block_payload.end(), std::begin(block), std::end(block));
  const std::vector<std::pair<FrameType, FrameBytes>> payloads = {
      {FrameType::kHello,
       to_bytes(HelloFrame{.nonce = hash,
                           .numerics_class = "class",
                           .shape = {.block_size = 16, .block_bytes = {4096, 1024}}})},
      {FrameType::kWelcome, to_bytes(WelcomeFrame{.epoch = 5, .nonce = hash})},
      {FrameType::kRefusal, to_bytes(RefusalFrame{.cause = HandOverCause::kGone, .text = "no"})},
      {FrameType::kPull, to_bytes(PullFrame{.id = 1,
                                            .epoch = 5,
                                            .num_tokens = 40,
                                            .prefix = hash,
                                            .num_slots = 8,
                                            .blocks = {{0, 0}, {0, 1}, {1, 1}}})},
      {FrameType::kBlock, block_payload},
      {FrameType::kSlot, to_bytes(SlotFrame{.slot = 3, .block = {.group = 0, .place = 1}})},
      {FrameType::kFree, to_bytes(uint32_t{3})},
      {FrameType::kEnd, {}},
      {FrameType::kWait, {}},
  };
  std::vector<FrameBytes> frames;
  for (const auto& [type, payload] : payloads) {
    FrameBytes& frame = frames.emplace_back(kFrameHeadBytes);
    write_frame_head(type, static_cast<uint32_t>(payload.size()), frames.size() - 1,
                     std::span(frame).first<kFrameHeadBytes>());
    std::ranges::copy(bytes_of(hash), frame.begin() + kSignedHeadBytes);
    frame.insert(frame.end(), payload.begin(), payload.end());
  }
  return frames;
}

}  // namespace llmserve
