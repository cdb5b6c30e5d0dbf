// What a draw is told and what comes of it, as host and device lay it out.
#pragma once

#include <cstdint>

#include "core/draw_settings.h"

namespace llmserve {

// How a row that needs nothing of the host is drawn; as in SampleRow.
struct SeededDraw {
  DrawSettings draw;
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
