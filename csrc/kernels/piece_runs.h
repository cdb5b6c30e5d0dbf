// Pieces of a device's memory that are as large and as far apart as each other, as one copy of
// rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/device_copies.h"

namespace llmserve {

struct PieceRun {
  std::byte* data = nullptr;  // of the first
  int64_t num_bytes = 0;      // of each
  int64_t stride = 0;         // from the begin of one to that of the next, in bytes
  int64_t count = 0;
};

// In their order. Strides are at most max_stride, and a run of one piece has its size for a stride.
// The parts of a block lie so: its keys and values in every layer's pool, each as large.
inline std::vector<PieceRun> piece_runs(std::span<const DevicePiece> pieces, int64_t max_stride) {
  std::vector<PieceRun> runs;
  for (const DevicePiece& piece : pieces) {
    PieceRun* const run = runs.empty() ? nullptr : &runs.back();
    bool goes_on = false;
    if (run != nullptr && run->num_bytes == piece.num_bytes) {
      const int64_t stride = piece.data - (run->data + (run->count - 1) * run->stride);
      goes_on = run->count == 1 ? piece.num_bytes <= stride && stride <= max_stride
                                : stride == run->stride;
      if (goes_on) run->stride = stride;
    }
    if (goes_on)
      ++run->count;
    else
      runs.push_back({piece.data, piece.num_bytes, piece.num_bytes, 1});
  }
  return runs;
}

}  // namespace llmserve
