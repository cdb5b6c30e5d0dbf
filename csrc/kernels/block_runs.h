// Copies of blocks that lie side by side, as one copy.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace llmserve {

struct BlockRun {
  int64_t source = 0;
  int64_t destination = 0;
  int64_t count = 0;
};

// Pairs (source, destination) in their order; those that go on where the one before ended, on both
// sides, are of its run.
inline std::vector<BlockRun> block_runs(std::span<const std::pair<int32_t, int32_t>> pairs) {
  std::vector<BlockRun> runs;
  for (const auto& [source, destination] : pairs) {
    const bool goes_on = !runs.empty() && runs.back().source + runs.back().count == source &&
                         runs.back().destination + runs.back().count == destination;
    if (!goes_on) runs.push_back({source, destination, 0});
    ++runs.back().count;
  }
  return runs;
}

}  // namespace llmserve
