// A head's forward pass beside its target, which the engine carries out: the drafter plans its
// steps, has the books of its KV cache, and says which hidden states of the target are kept.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "api/engine_config.h"
#include "api/sampled_tokens.h"
#include "core/tensor.h"
#include "kv_cache/block_table.h"
#include "sampling/sampling_slot.h"
#include "speculation/draft_tree.h"

namespace llmserve {

// One sequence's rows of a step, which go behind first_row rows of its table.
struct HeadSequence {
  int32_t num_rows = 0;
  int64_t first_row = 0;
  std::span<const std::vector<int32_t>> block_tables;  // [1][blocks], or none: it keeps nothing
};

// A row stands for a token that the target has run, and reads the token behind it.
struct HeadStep {
  int32_t place = 0;               // of the guesses that are drawn: 0 is the first behind a text
  std::vector<int32_t> token_ids;  // [T] behind those that the rows stand for
  std::vector<int32_t> positions;  // [T] of those that they stand for
  // [T] at place 0 kept states; then logit rows of the run before, or any rows of it where each
  // place has its layer.
  std::vector<int32_t> sources;
  std::vector<HeadSequence> sequences;
  std::vector<int32_t> logit_rows;   // [S] of the rows
  std::vector<SampleTask> samples;   // [S]
  std::vector<int32_t> num_choices;  // [S] different tokens that are wanted, in turn
  std::vector<BlockCopy> copies;

  void clear();
};

class HeadModel {
 public:
  virtual ~HeadModel() = default;

  // Of its own pool; no cache groups: it keeps nothing.
  virtual const CacheConfig& cache() const = 0;
  virtual int64_t max_model_len() const = 0;
  virtual int64_t max_step_rows() const = 0;
  virtual int32_t max_guesses() const = 0;  // in a row; 0: no bound
  // That guess a place each, and have run a row one after another; 1: one guesses all places.
  virtual int32_t num_layers() const = 0;
  // Of the target, as StepPlan has them.
  virtual std::vector<int32_t> wanted_layers() const = 0;

  // Room for the states of so many tokens.
  virtual int64_t num_kept() const = 0;
  // Keeps those of each token of states [L, T, E], of wanted_layers(), in place kept[t], which no
  // two share; -1: they are not kept.
  virtual void keep(const Tensor& states, std::span<const int32_t> kept) = 0;

  // Runs the rows and draws a token for each logit row, one of a sequence with a grammar at most,
  // under its masks; a row whose mask is late awaits it. Valid until the next call. Throws what a
  // step throws.
  virtual const SampledTokens& run(HeadStep& step) = 0;
  // Of a logit row of the last run() of which several were wanted, what was drawn, in order; fewer
  // where no more are left.
  virtual std::span<const DraftChoice> choices(size_t row) const = 0;
  // The sample has ended.
  virtual void forget(RequestId request_id, int32_t sample_index) = 0;
};

}  // namespace llmserve
