// A step of a head as it goes to ranks in other processes, and which states of the target's last
// step they keep.
//
// Little-endian: the place, T, B, S and the number of copies as u32; token ids, positions and
// sources [T], logit rows [S]; of each sequence rows, first row and number of blocks as u32, and
// its blocks; copies (from, to). Kept places: T as u32, and places [T]. Draws are rank 0's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/wire_bytes.h"
#include "speculation/head_model.h"

namespace llmserve {

void write_head_step(const HeadStep& step, int64_t block_size, std::vector<std::byte>& bytes);
void write_kept_places(std::span<const int32_t> kept, std::vector<std::byte>& bytes);

// What a step of a head may hold.
struct HeadLimits {
  int64_t max_rows = 0;
  int64_t max_model_len = 0;
  int64_t vocab_size = 0;   // of the target
  int64_t num_kept = 0;     // sources of place 0
  int64_t num_outputs = 0;  // of later places
  int64_t max_place = 0;
  int64_t num_blocks = 0;  // 0: it has no cache
  int64_t block_size = 1;
};

class HeadStepReader {
 public:
  explicit HeadStepReader(const HeadLimits& limits) : limits_(limits) {}

  // Valid until the next one. Throws DeviceError for what is no step within the limits.
  const HeadStep& read(Bytes bytes);
  // [num_tokens], of that many tokens of the last step. Valid likewise.
  std::span<const int32_t> read_kept_places(Bytes bytes, int64_t num_tokens);

 private:
  const HeadLimits limits_;
  HeadStep step_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<int32_t> kept_;
};

}  // namespace llmserve
