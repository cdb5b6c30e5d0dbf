// Hidden states and logits on their way out: what a step computed of the prompts whose requests
// want no tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "api/pooling.h"
#include "core/memory.h"
#include "engine/batch_builder.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// A place for the answer to a prompt of T tokens, of a request that has been admitted.
std::shared_ptr<PooledOutput> make_pooled_output(const PoolingParams& params, int64_t num_tokens,
                                                 int64_t hidden_size, int64_t vocab_size);

class Pooler {
 public:
  // The tensors lie in `memory`.
  explicit Pooler(Memory& memory) : memory_(memory) {}

  // Takes what it wants of hidden [T, E]. A prompt's tokens come in order, over one or more steps;
  // a start at position 0 begins anew.
  void take(const ConstTensor& hidden, const ModelInput& input, const StepPlan& plan);
  // logits [rows.count, V] of the step's batch, after take().
  void take_logits(const ConstTensor& logits, const PooledRows& rows);

 private:
  // Part of one prompt: tokens [begin, begin + count) of the step at positions from `position`.
  struct Chunk {
    int64_t begin = 0;
    int64_t count = 0;
    int64_t position = 0;
  };

  void copy_rows(const ConstTensor& rows, int64_t begin, int64_t count, float* to);
  void take_states(const ConstTensor& hidden, const Chunk& chunk, PooledOutput& out);
  void take_vector(const ConstTensor& hidden, const Chunk& chunk, PooledOutput& out);
  void add_to_sum(const ConstTensor& hidden, const Chunk& chunk, PooledOutput& out);

  Memory& memory_;
  std::vector<float> row_;  // [E] one hidden state
};

}  // namespace llmserve
