// What carries out a plan: a model on a device, the tests' token oracle, or a cost model in
// simulated time.
#pragma once

#include <cstdint>
#include <string>

#include "api/sampled_tokens.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// Bytes that an executor holds for as long as it lives.
struct MemoryUse {
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t kv_cache_bytes = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;

  // Runs one step: one record a logit row of the plan, in its order. The result is valid until the
  // next call. Throws DeviceError (or any Error) when the step as a whole failed; a row that failed
  // alone has is_valid = false.
  virtual const SampledTokens& execute(const StepPlan& plan) = 0;

  virtual int64_t vocab_size() const = 0;
  // What does the work, for the log: "LlamaForCausalLM float32 on cpu/avx2, 2 threads".
  virtual std::string description() const = 0;
  virtual MemoryUse memory_use() const = 0;
};

}  // namespace llmserve
