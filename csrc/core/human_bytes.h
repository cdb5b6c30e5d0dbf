// Sizes in messages, as people say them. What is to be passed as an argument stays in bytes.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>

namespace llmserve {

// "1.5 MiB", "900 B"; the same text as llmserve.common.units.human_bytes gives.
inline std::string human_bytes(int64_t num_bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  auto size = static_cast<double>(num_bytes);
  size_t unit = 0;
  while (size >= 1024 && unit + 1 < kUnits.size()) {
    size /= 1024;
    ++unit;
  }
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", size, kUnits[unit]);
  return text.data();
}

}  // namespace llmserve
