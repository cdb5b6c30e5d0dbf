// A run of a model's layers: what one stage of a pipeline has.
#pragma once

#include <cstdint>
#include <limits>

namespace llmserve {

struct LayerRange {
  static constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  int64_t begin = 0;
  int64_t end = kLast;  // behind it
  // It embeds tokens, too, though it is not the first: a head that drafts reads them there.
  bool has_embedding = false;

  bool is_whole() const { return begin == 0 && end == kLast; }
  bool is_first() const { return begin == 0; }   // whose layers read embedded tokens
  bool is_last() const { return end == kLast; }  // which has the final norm and the head
  int64_t end_of(int64_t num_layers) const { return end < num_layers ? end : num_layers; }
};

}  // namespace llmserve
