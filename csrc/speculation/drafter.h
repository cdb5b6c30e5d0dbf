// A drafter guesses the next tokens of sequences. What it guesses changes how many tokens a step
// gives, and no token: each guess counts only if the target draws it in its place. All calls come
// from the engine's thread, between two steps.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "api/request.h"
#include "core/tensor.h"
#include "scheduler/step_plan.h"
#include "speculation/draft_tree.h"

namespace llmserve {

// A sequence whose next tokens are wanted. All of it is valid during the call.
struct DraftTask {
  RequestId request_id = 0;
  int32_t sample_index = 0;
  // [n] prompt, then generated: none is a guess. The target has run all but the last. What an
  // earlier task of the sequence had is a prefix of them, also after a preemption. kNoTokenId
  // stands for vectors of the prompt.
  std::span<const int32_t> token_ids;
  int64_t num_prompt_tokens = 0;
  // How the target will draw: the token at position p with noise (seed, p) and these parameters.
  uint64_t seed = 0;
  const SamplingParams* params = nullptr;        // lives as long as the request
  std::span<const int32_t> stop_token_ids = {};  // not drawn before min_tokens
  int32_t max_tokens = 0;                        // guesses that are wanted at most, >= 1
  const TreeRequest* tree = nullptr;             // null: a chain is wanted
  std::string_view cache_salt = {};  // what is found in others' text is theirs of the same salt
};

class Drafter {
 public:
  virtual ~Drafter() = default;

  // Sets drafts[i] to the guesses for tasks[i]: those that follow its tokens, in order, at most
  // max_tokens, in [0, V), or none where it has no idea. `drafts` come empty. What it throws
  // switches it off: the requests go on without.
  virtual void draft(std::span<const DraftTask> tasks, std::span<std::vector<int32_t>> drafts) = 0;

  // Of a task of the last draft() that wanted a tree: its guesses, and others beside them; null: it
  // has none.
  virtual const DraftTree* tree(size_t /*task_idx*/) const { return nullptr; }

  // Layers of the target whose hidden states it reads, as StepPlan::wanted_layers.
  virtual std::vector<int32_t> wanted_layers() const { return {}; }
  // After each step of the target, where it wants layers: states [L, T, E] f32 in the memory of
  // the target's backend, of plan.wanted_layers and the plan's tokens, guesses included.
  virtual void take_states(const StepPlan& /*plan*/, const Tensor& /*states*/) {}

  // A request has come; and new tokens of one of its samples, which has num_generated with them.
  // For drafters that learn from outputs.
  virtual void begin(const Request& /*request*/) {}
  virtual void take_output(RequestId /*request_id*/, int32_t /*sample_index*/,
                           std::span<const int32_t> /*token_ids*/, int64_t /*num_generated*/) {}
  // The sample has ended: what is kept of it goes. With the last of a request, the request has.
  virtual void forget(RequestId /*request_id*/, int32_t /*sample_index*/, bool /*is_last*/) {}
  // Sequences of which something is kept.
  virtual int64_t num_sequences() const { return 0; }
  // The KV cache is forgotten: LLM.reset_prefix_cache() and sleep().
  virtual void reset() {}
};

}  // namespace llmserve
