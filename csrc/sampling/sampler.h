// Turns logits into tokens: gathers each row's settings for the backend's sample op and makes
// records of what comes back.
#pragma once

#include <map>
#include <span>
#include <utility>
#include <vector>

#include "api/sampled_tokens.h"
#include "kernels/backend.h"
#include "kernels/device_steps.h"
#include "sampling/sampling_slot.h"

namespace llmserve {

// What the host knows of a sample before its token has been drawn.
struct PendingSample {
  int64_t position = 0;
  bool is_end = false;
  bool awaits_mask = false;
  std::string error;  // why its token counts for nothing; empty: it does
};

class Sampler {
 public:
  explicit Sampler(Backend& backend) : backend_(backend) {}

  // Draws one token for each row of logits [S, V] and appends S records to `out`, in order. A row
  // whose logits processor fails, or whose parameters leave no token to draw, fails alone.
  void sample(const ConstTensor& logits, std::span<const SampleTask> tasks, SampledTokens& out);

  // The same in two parts, with the sample op between them; append() is the second. ask() waits for
  // the logits where a row has logits processors or a guess under the rejection rule, and else for
  // nothing; the rows [S] are valid until it is called again.
  std::span<const SampleRow> ask(const ConstTensor& logits, std::span<const SampleTask> tasks,
                                 std::span<PendingSample> pending);
  // Of the rows that ask() made last, as valid as they are.
  std::span<const KeptCounts> kept_counts() const { return kept_; }
  static void append(const SampledRow& row, const PendingSample& pending, SampledTokens& out);

  // The sequence has ended: what was kept of it goes.
  void forget(RequestId request_id, int32_t sample_index);
  // Sequences of which something is kept.
  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }

 private:
  SampleRow make_row(const SampleTask& task, const ConstTensor& logits, std::string& error);
  void draw_by_rule(const SampleTask& task, const ConstTensor& logits, SampleRow& row);

  Backend& backend_;
  std::map<std::pair<RequestId, int32_t>, SamplingSlot> slots_;  // by request and sample
  // Of the call under way; they grow to the largest S, then stay.
  std::vector<SampleRow> rows_;
  std::vector<KeptCounts> kept_;
  std::vector<SampledRow> drawn_;
  std::vector<PendingSample> pending_;
  std::vector<float> host_logits_, probabilities_;  // [V] of a row under the rejection rule
};

}  // namespace llmserve
