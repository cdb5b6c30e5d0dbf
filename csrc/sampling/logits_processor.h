// A request's own change to the distribution that its tokens are drawn from.
#pragma once

#include <cstdint>
#include <span>

namespace llmserve {

class LogitsProcessor {
 public:
  virtual ~LogitsProcessor() = default;

  // Changes the draw's copy of a row, before biases, masks and penalties; the logprobs stay those
  // of the raw row. token_ids: prompt, then output. logits [V]: none may be NaN or +inf after, and
  // not all -inf. To keep results independent of company it may depend on its arguments alone.
  // Called on the engine's thread, for all samples of its request. What it throws ends the sample
  // with FinishReason::kError and that message.
  virtual void process(std::span<const int32_t> token_ids, std::span<float> logits) = 0;

  // From any thread: the request was aborted. A process() that waits gives up soon, by throwing.
  virtual void cancel() {}
};

}  // namespace llmserve
