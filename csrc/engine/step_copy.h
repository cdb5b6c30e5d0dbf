// The integers of a step one behind another, so that a device brings them over in one copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/batch_builder.h"

namespace llmserve {

class StepCopy {
 public:
  static int64_t num_bytes(const StepBatch& batch);
  // `batch` with its integers in `block`, which has num_bytes() and begins at a multiple of 64.
  // Valid until the next one, and as long as the block and what else `batch` refers to.
  const StepBatch& lay_out(const StepBatch& batch, std::span<std::byte> block);

 private:
  StepBatch batch_;
  std::vector<KvGroupInput> groups_;
};

}  // namespace llmserve
