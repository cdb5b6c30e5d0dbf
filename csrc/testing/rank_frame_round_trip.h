// A frame of ranks in several processes as bytes, read as whatever it says it is, and written
// again.
#pragma once

#include <algorithm>
#include <vector>

#include "comm/rank_frame.h"
#include "core/error.h"
#include "engine/head_wire.h"
#include "engine/step_wire.h"

namespace llmserve {

inline StepLimits sample_step_limits() {
  return {.max_tokens = 32,
          .max_sequences = 8,
          .max_model_len = 64,
          .vocab_size = 100,
          .hidden_size = 4,
          .num_layers = 3,
          .num_blocks = 16,
          .block_size = 8,
          .num_state_slots = 2,
          .num_groups = 2,
          .max_wanted_layers = 2,
          .has_halves = true};
}

inline HeadLimits sample_head_limits() {
  return {.max_rows = 16,
          .max_model_len = 64,
          .vocab_size = 100,
          .num_kept = 20,
          .num_outputs = 8,
          .max_place = 3,
          .num_blocks = 16,
          .block_size = 8};
}
inline constexpr int64_t kSampleKeptTokens = 3;

// A head and its payload, without a code. Throws DeviceError for what is no frame.
inline RankBytes rank_frame_round_trip(Bytes bytes) {
  if (bytes.size() < kRankHeadBytes) throw DeviceError("a frame of another rank: it is cut short");
  RankHeadBytes head_bytes;
  std::ranges::copy(bytes.first<kRankHeadBytes>(), head_bytes.begin());
  const RankHead head = read_rank_head(head_bytes);
  const Bytes payload = bytes.subspan(kRankHeadBytes);
  if (payload.size() != head.num_bytes)
    throw DeviceError("a frame of another rank: its length is another");
  const RankHeadBytes head_again = to_bytes(head);
  RankBytes written(head_again.begin(), head_again.end());
  const auto append = [&](const RankBytes& more) {
    written.insert(written.end(), more.begin(), more.end());
  };
  switch (head.type) {
    case RankFrameType::kHello:
      append(to_bytes(read_rank_hello(payload)));
      break;
    case RankFrameType::kWelcome:
      append(to_bytes(read_rank_welcome(payload)));
      break;
    case RankFrameType::kRefusal:
    case RankFrameType::kFailed:
      append(text_payload(read_text_payload(payload)));
      break;
    case RankFrameType::kMeet:
      append(to_bytes(read_rank_meeting(payload)));
      break;
    case RankFrameType::kMet:
      append(epoch_payload(read_epoch_payload(payload)));
      break;
    case RankFrameType::kStep: {
      const StepLimits limits = sample_step_limits();
      StepReader reader(limits);
      RankBytes step;
      write_step(reader.read(payload), limits.block_size, limits.hidden_size, step);
      append(step);
      break;
    }
    case RankFrameType::kHeadStep: {
      HeadStepReader reader(sample_head_limits());
      RankBytes step;
      write_head_step(reader.read(payload), sample_head_limits().block_size, step);
      append(step);
      break;
    }
    case RankFrameType::kKeepStates: {
      HeadStepReader reader(sample_head_limits());
      RankBytes places;
      write_kept_places(reader.read_kept_places(payload, kSampleKeptTokens), places);
      append(places);
      break;
    }
    default:
      append(RankBytes(payload.begin(), payload.end()));
  }
  return written;
}

// One of each type.
inline std::vector<RankBytes> rank_frame_samples() {
  std::vector<RankBytes> samples;
  const auto add = [&](RankHead head, const RankBytes& payload) {
    head.num_bytes = payload.size();
    const RankHeadBytes bytes = to_bytes(head);
    RankBytes& frame = samples.emplace_back(bytes.begin(), bytes.end());
    frame.insert(frame.end(), payload.begin(), payload.end());
  };
  TokenHash nonce;
  for (size_t i = 0; i < nonce.bytes.size(); ++i) nonce.bytes[i] = static_cast<uint8_t>(7 * i);
  add({.type = RankFrameType::kHello},
      to_bytes(RankHello{
          .nonce = nonce,
          .place =
              {.purpose = RankPurpose::kExchange, .node = 2, .epoch = 3, .group = 1, .from = 2},
          .port = 4711,
          .settings = "dtype=float32\n"}));
  add({.type = RankFrameType::kWelcome},
      to_bytes(RankWelcome{.nonce = nonce, .settings = "num_blocks=7\n"}));
  add({.type = RankFrameType::kRefusal}, text_payload("another model"));
  add({.type = RankFrameType::kBeat}, {});
  add({.type = RankFrameType::kMeet},
      to_bytes(RankMeeting{.epoch = 9, .doors = {"tcp:10.0.0.1:1", "tcp:[::1]:2"}}));
  add({.type = RankFrameType::kMet}, epoch_payload(9));
  add({.type = RankFrameType::kFailed}, text_payload("no memory"));
  add({.type = RankFrameType::kRelease}, {std::byte{1}});
  add({.type = RankFrameType::kRestore}, {std::byte{0}});
  add({.type = RankFrameType::kDone}, {});
  add({.type = RankFrameType::kEnd}, {});
  add({.type = RankFrameType::kExchange, .op = RankOp::kGatherColumns, .dtype = DType::kF32},
      {std::byte{1}, std::byte{2}});
  const std::vector<int32_t> tokens{5, 6, 7, 8}, starts{0, 3, 4}, lengths{11, 9}, none{-1, -1};
  const std::vector<int32_t> states{0, -1}, rows{2, 3}, layers{1}, wanted{0, 1, 2, 3};
  const std::vector<int32_t> tables{3, 4, 5, 6};
  const std::vector<KvGroupInput> groups{{.slots = {}, .block_tables = tables},
                                         {.slots = {}, .block_tables = tables}};
  const std::vector<float> given_rows(8, 0.5f);
  const std::vector<GivenRows> given{{.begin = 1, .count = 2, .rows = given_rows.data()}};
  StepBatch batch;
  batch.input = {.token_ids = tokens,
                 .given_embeddings = given,
                 .query_starts = starts,
                 .kv_lens = lengths,
                 .max_blocks = 2,
                 .kv_groups = groups,
                 .adapters = none,
                 .state_slots = states,
                 .logit_rows = rows,
                 .wanted_layers = layers,
                 .wanted_tokens = wanted};
  batch.pooled_rows.push_back({.begin = 0, .count = 3, .position = 8});
  batch.copies.emplace_back(1, 2);
  const StepLimits limits = sample_step_limits();
  RankBytes step;
  write_step(batch, limits.block_size, limits.hidden_size, step);
  add({.type = RankFrameType::kStep}, step);
  batch.input.given_embeddings = {};
  batch.input.wanted_layers = batch.input.wanted_tokens = {};
  batch.second_half = 2;
  step.clear();
  write_step(batch, limits.block_size, limits.hidden_size, step);
  add({.type = RankFrameType::kStep}, step);
  HeadStep head;
  head.place = 1;
  head.token_ids = {5, 6, 7};
  head.positions = {8, 9, 2};
  head.sources = {0, 1, 7};
  head.logit_rows = {1, 2};
  const std::vector<std::vector<int32_t>> blocks{{3, 4}, {5}};
  head.sequences.push_back(
      {.num_rows = 2, .first_row = 8, .block_tables = std::span(blocks).first(1)});
  head.sequences.push_back(
      {.num_rows = 1, .first_row = 2, .block_tables = std::span(blocks).last(1)});
  head.copies.push_back({.source = 1, .destination = 2});
  RankBytes head_step;
  write_head_step(head, sample_head_limits().block_size, head_step);
  add({.type = RankFrameType::kHeadStep}, head_step);
  RankBytes places;
  write_kept_places(std::vector<int32_t>{0, -1, 19}, places);
  add({.type = RankFrameType::kKeepStates}, places);
  for (const RankFrameType type :
       {RankFrameType::kReadBlock, RankFrameType::kWriteBlock, RankFrameType::kBlock})
    add({.type = type}, RankBytes(10, std::byte{1}));
  return samples;
}

}  // namespace llmserve
