// A step as it goes to ranks in other processes: what they run, without what is drawn from it.
//
// Little-endian: T, B, S, M and the numbers of groups, layers, pooled prompts, copies and given
// prompts and where the second half begins as u32, then token ids [T], query starts [B + 1], KV
// lengths [B], adapters [B], state slots [B], logit rows [S], a block table [B, M] a group, layers,
// pooled prompts (begin, count, position), copies (from, to), given prompts (begin, count) and
// their rows [count, E] f32. Positions and slots follow from these.
#pragma once

#include <cstdint>
#include <vector>

#include "api/engine_config.h"
#include "comm/wire_bytes.h"
#include "engine/batch_builder.h"

namespace llmserve {

// hidden_size: E of the rows that are given in the place of embeddings.
void write_step(const StepBatch& batch, int64_t block_size, int64_t hidden_size,
                std::vector<std::byte>& bytes);

// What a step of an engine may hold.
struct StepLimits {
  int64_t max_tokens = 0;
  int64_t max_sequences = 0;
  int64_t max_model_len = 0;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  int64_t num_blocks = 0;
  int64_t block_size = 1;
  int64_t num_state_slots = 0;
  size_t num_groups = 0;
  int64_t max_wanted_layers = 0;
  bool has_halves = false;  // whether steps may run in halves
};

class StepReader {
 public:
  explicit StepReader(const StepLimits& limits) : limits_(limits) {}

  // Valid until the next one. Throws DeviceError for what is no step within the limits: every
  // number is looked at that says where something is.
  const StepBatch& read(Bytes bytes);

 private:
  void read_sequences(WireReader& reader, size_t num_rows);
  void read_blocks(WireReader& reader, size_t num_groups, size_t max_blocks);
  void read_given(WireReader& reader, size_t count);

  const StepLimits limits_;
  StepBatch batch_;
  std::vector<int32_t> token_ids_, positions_, query_starts_, kv_lens_, adapters_, state_slots_;
  std::vector<int32_t> logit_rows_, wanted_layers_, wanted_tokens_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::vector<int64_t>> slots_;
  std::vector<KvGroupInput> groups_;
  std::vector<GivenRows> given_;
  std::vector<std::vector<float>> given_rows_;
};

}  // namespace llmserve
