// What a name that is not in a table may have meant.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmserve {

// Those of `names` that begin as `name` does, letters of either case alike, by three characters or
// more: at most four, the nearest first, joined by commas. Empty if there are none.
inline std::string near_names(std::string_view name, const std::vector<std::string_view>& names) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  std::vector<std::pair<size_t, std::string_view>> near;
  for (const std::string_view known : names) {
    const size_t length = std::min(name.size(), known.size());
    size_t common = 0;
    while (common < length && lower(name[common]) == lower(known[common])) ++common;
    if (common >= 3) near.emplace_back(common, known);
  }
  std::stable_sort(near.begin(), near.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string joined;
  for (size_t i = 0; i < std::min<size_t>(near.size(), 4); ++i)
    joined += (i > 0 ? ", " : "") + std::string(near[i].second);
  return joined;
}

}  // namespace llmserve
