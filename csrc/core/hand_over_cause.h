// Why the blocks of a sequence did not come from a peer, so that they are computed here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace llmserve {

enum class HandOverCause : uint8_t {
  kUnreachable,  // nobody listens at the address, or the connection broke
  kRefused,      // another key, another numerics class, another layout of the cache
  kGone,         // the sender does not have, or no longer has, what was asked for
  kTimeout,
  kCorrupt,  // a frame that is none, or that somebody else has written
  kCancelled,
};
inline constexpr size_t kNumHandOverCauses = 6;

inline constexpr std::string_view name(HandOverCause cause) {
  constexpr std::string_view kNames[kNumHandOverCauses] = {"unreachable", "refused", "gone",
                                                           "timeout",     "corrupt", "cancelled"};
  return kNames[static_cast<size_t>(cause)];
}

}  // namespace llmserve
