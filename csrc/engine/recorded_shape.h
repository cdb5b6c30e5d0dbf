// Which steps look alike to a device, so that what was asked of it for one is launched again for
// the next: batches of one token a sequence, filled up to one of a few shapes, and such with
// guesses behind some of the tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "engine/batch_builder.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// What bounds the shapes, all of it fixed when the model is loaded.
struct RecordingLimits {
  int64_t max_num_seqs = 0;
  int64_t max_model_len = 0;
  int64_t block_size = 0;
};

// Rows of the batch that n of them run in. Up to eight are as they are, since the kernels of so few
// are made for their number; then steps of 8 and of 32 waste little and are few.
constexpr int64_t num_recorded_rows(int64_t n, int64_t max_rows) {
  const int64_t multiple = n <= 8 ? 1 : n <= 256 ? 8 : 32;
  return std::min((n + multiple - 1) / multiple * multiple, max_rows);
}

// The longest context that a batch is launched for whose longest is num_tokens: 256, twice that and
// so on, since a device begins work for each part of it and block tables are as wide.
constexpr int64_t recorded_context(int64_t num_tokens, int64_t max_model_len) {
  int64_t context = 256;
  while (context < num_tokens) context *= 2;
  return std::min(context, max_model_len);
}

struct RecordedShape {
  BatchShape batch;      // what the plan's batch is filled up to
  uint64_t lengths = 0;  // of its sequences; 0: a token each
  // Each token is drawn from the logits and numbers alone, as recorded work can; otherwise all are
  // drawn behind it.
  bool draws = true;
};

// None where a sequence has more than one known token, or does not draw from each, and of more than
// eight rows where one has more guesses than another: too many shapes would come.
std::optional<RecordedShape> recorded_shape(const StepPlan& plan, const RecordingLimits& limits);

}  // namespace llmserve
