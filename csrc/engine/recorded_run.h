// A step that a device may record, on one rank or on several that exchange.
#pragma once

#include <functional>
#include <span>

#include "kernels/device_steps.h"

namespace llmserve {

// The ranks of one process. A step among several is recorded on all of them or on none, and is
// launched as it was recorded on all or on none: so a library wants it that exchanges.
struct RecordedRun {
  RecordKey key;
  std::span<DeviceSteps* const> ranks;  // each between bring_over() and end()
  // Calls its argument once for each rank, on the rank's thread, and returns when all have ended.
  std::function<void(const std::function<void(int rank)>&)> on_ranks;
  std::function<void(int rank)> work;  // asks for a rank's part of the step
  std::function<void(int rank)> end;   // follows it, where the step is launched or asked for
};

// Asks for the step as it is, records it and launches that, or launches what was recorded before.
// The caller has the ranks at rest before and after. True: it was launched. Throws what on_ranks
// throws.
bool run_recorded(const RecordedRun& run);

}  // namespace llmserve
