// How long a thread that computes may stand still.
#pragma once

#include <chrono>

namespace llmserve {

struct RankPatience {
  // It begins no op, no processor works for it, and it wants none: then its work has failed, where
  // others wait for it. 0: nobody looks.
  std::chrono::milliseconds still{0};
  // Likewise, while a processor does, or it wants one or a disk: no op takes so much longer than
  // those of others, who wait.
  std::chrono::milliseconds busy{60'000};
  // Likewise, where nobody waits: no op takes so long.
  std::chrono::milliseconds alone{600'000};
  // For it to come back then; later it is left behind.
  std::chrono::milliseconds left{10'000};

  // Between two looks.
  static constexpr std::chrono::milliseconds kBetweenLooks{250};
};
// Of threads of a host.
inline constexpr RankPatience kHostPatience{.still = std::chrono::milliseconds(4000)};

}  // namespace llmserve
