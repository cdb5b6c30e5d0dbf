// Ranks that keep one KV cache together: threads of one process, each with some of the query heads
// that read its one KV head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"

namespace llmserve {

// Who has which of the rows that a token's query heads are, over all of these ranks.
struct RankRows {
  struct Run {
    int64_t begin = 0;
    int64_t count = 0;
    bool operator==(const Run&) const = default;
  };
  int64_t rank = 0;
  std::vector<Run> runs;  // by rank, in order; two ranks may have the same one
  int64_t count = 0;      // of all together
  // The largest count of all groups of ranks that wait for each other: by it they decide what is
  // shared, so that all make the same calls.
  int64_t most = 0;
};

// All of them call paged_attention at once, over the same cache and the same sequences. The result
// is that of the op without them, bit for bit.
class AttentionRanks {
 public:
  // room: f32 [n] in host memory, as many on each rank, for what the ranks show each other.
  AttentionRanks(const RankRows& rows, const Tensor& room) : rows_(rows), room_(room) {}
  virtual ~AttentionRanks() = default;

  const RankRows& rows() const { return rows_; }
  const Tensor& room() const { return room_; }

  // Waits until every rank is here, with all that it has written. Returns what each has come with,
  // by rank, until the next call. Throws DeviceError where one has gone.
  virtual std::span<const void* const> meet(const void* mine) = 0;

 private:
  const RankRows& rows_;
  const Tensor room_;
};

}  // namespace llmserve
