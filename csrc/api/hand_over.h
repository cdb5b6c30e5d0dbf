// The KV cache of one sequence on its way from the instance that computed it to another one that
// goes on with it (disaggregated prefill).
#pragma once

#include <cstdint>

namespace llmserve {

// Both sides know it: whoever routes the request gives the sender and the receiver the same id.
struct HandOver {
  int32_t peer = -1;  // the other instance, as whoever moves blocks knows it
  int64_t id = 0;

  friend bool operator==(const HandOver&, const HandOver&) = default;
};

}  // namespace llmserve
