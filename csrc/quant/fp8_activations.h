// Formats of weights whose checkpoint has activations in E4M3, too.
#pragma once

#include <string_view>

#include "quant/linear_format.h"

namespace llmserve {

// What tells such a format from the one without, which is packed alike: the summary, so that it is
// seen by backends in libraries of their own, which have their own tables.
inline constexpr std::string_view kFp8Activations = "E4M3, and so are activations";

// The same weights, beside which activations may be rounded to E4M3 where such are multiplied. One
// address for each format of E4M3, and its name and description. From any thread.
const LinearFormat& with_fp8_activations(const LinearFormat& format);

inline bool rounds_to_fp8(const LinearFormat& format) {
  return format.is_fp8 && format.summary == kFp8Activations;
}

}  // namespace llmserve
