// Hidden states and logits on their way out: what a step computed of the prompts whose requests
// want no tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "api/pooling.h"
#include "engine/batch_builder.h"
#include "models/model.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// More than this for one request is refused: 1 GiB.
inline constexpr int64_t kMaxPooledBytes = int64_t{1} << 30;

// A place for the answer to a prompt of T tokens. Throws InvalidArgument for dimensions beyond E,
// ResourceExhausted with the arithmetic past kMaxPooledBytes or without memory.
std::shared_ptr<PooledOutput> make_pooled_output(const PoolingParams& params, int64_t num_tokens,
                                                 int64_t hidden_size, int64_t vocab_size);

class Pooler {
 public:
  // Logits are computed for at most max_logit_rows tokens at a time.
  // The tensors lie in `memory`.
  Pooler(Memory& memory, int64_t max_logit_rows)
      : memory_(memory), max_logit_rows_(max_logit_rows) {}

  // Takes what it wants of hidden [T, E]. A prompt's tokens come in order, over one or more steps;
  // a start at position 0 begins anew.
  void take(const ForwardContext& context, const Model& model, const ConstTensor& hidden,
            const StepPlan& plan);

 private:
  // Part of one prompt: tokens [begin, begin + count) of the step at positions from `position`.
  struct Chunk {
    int64_t begin = 0;
    int64_t count = 0;
    int64_t position = 0;
  };

  void copy_rows(const ConstTensor& rows, int64_t begin, int64_t count, float* to);
  void take_states(const ConstTensor& hidden, const Chunk& chunk, PooledOutput& out);
  void take_logits(const ForwardContext& context, const Model& model, const ConstTensor& hidden,
                   const Chunk& chunk, PooledOutput& out);
  void take_vector(const ConstTensor& hidden, const Chunk& chunk, PooledOutput& out);
  void add_to_sum(const ConstTensor& hidden, const Chunk& chunk, PooledOutput& out);

  Memory& memory_;
  const int64_t max_logit_rows_;
  std::vector<float> row_;       // [E] one hidden state
  std::vector<int32_t> tokens_;  // whose logits are computed
};

}  // namespace llmserve
