// What carries out a plan: a model on a device, the tests' token oracle, or a cost model in
// simulated time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "api/sampled_tokens.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// Bytes that an executor holds.
struct MemoryUse {
  int64_t weight_bytes = 0;
  int64_t mapped_bytes = 0;  // of them, read in place from the file
  int64_t workspace_bytes = 0;
  int64_t kv_cache_bytes = 0;
};

// What an executor can give back while nobody needs it. The workspace goes with the weights.
enum class MemoryPart : uint8_t { kWeights, kKvCache };
inline constexpr int kNumMemoryParts = 2;
// "weights", "kv_cache". Throws InvalidArgument.
MemoryPart parse_memory_part(std::string_view name);

class Executor {
 public:
  virtual ~Executor() = default;

  // Runs one step: one record a logit row of the plan, in its order; what is pooled goes to its
  // output. The result is valid until the next call. Throws DeviceError (or any Error) when the
  // step as a whole failed; a row that failed alone has is_valid = false.
  virtual const SampledTokens& execute(const StepPlan& plan) = 0;

  // The sample has ended: whatever is kept of it from step to step may go.
  virtual void forget(RequestId /*request_id*/, int32_t /*sample_index*/) {}
  // While no request is unfinished: throws InternalError if something is still kept of one.
  virtual void check_idle() const {}

  virtual int64_t vocab_size() const = 0;
  virtual int64_t hidden_size() const = 0;  // of the vectors that tokens are
  // What does the work, for the log: "LlamaForCausalLM float32 on cpu/avx2, 2 threads".
  virtual std::string description() const = 0;
  virtual MemoryUse memory_use() const = 0;

  // Gives a part's memory back to the system, or takes it again: the KV cache comes back empty, the
  // weights as they are on disk now. execute() needs both parts. Nothing happens if the part is
  // gone, or there, already. restore() throws what loading throws, and InvalidArgument if the
  // checkpoint's shapes have changed; the part is still gone then.
  virtual void release(MemoryPart part) = 0;
  virtual void restore(MemoryPart part) = 0;
};

}  // namespace llmserve
