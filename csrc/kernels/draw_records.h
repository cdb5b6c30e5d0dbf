// What a draw is told and what comes of it, as host and device lay it out.
#pragma once

#include <cstdint>

namespace llmserve {

// How a row that needs nothing of the host is drawn; as in SampleRow.
struct DrawSettings {
  float temperature = 0.0f;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t top_k = 0;
  uint64_t seed = 0;
  int64_t position = 0;
};

// What came of it; as in SampledRow.
struct DrawnRow {
  int32_t token_id = 0;  // 0 unless it is valid
  int32_t is_raw_valid = 0;
  int32_t is_valid = 0;
};

}  // namespace llmserve
