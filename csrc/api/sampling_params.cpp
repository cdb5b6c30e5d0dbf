#include "api/sampling_params.h"

#include <cmath>

#include "core/error.h"

namespace llmserve {
namespace {

template <class Value>
void require(bool holds, const char* rule, const Value& value) {
  if (!holds) throw InvalidArgument(concat(rule, ", got ", value));
}

}  // namespace

void SamplingParams::validate() const {
  require(n >= 1 && n <= kMaxNumSamples, "n must be between 1 and 128", n);
  require(std::isfinite(temperature) && temperature >= 0,
          "temperature must be finite and at least 0", temperature);
  require(top_p > 0 && top_p <= 1, "top_p must be in (0, 1]", top_p);
  require(top_k >= -1, "top_k must be 0 or -1 (all) or positive", top_k);
  require(min_p >= 0 && min_p <= 1, "min_p must be in [0, 1]", min_p);
  require(max_tokens >= 1, "max_tokens must be at least 1", max_tokens);
  require(min_tokens >= 0, "min_tokens must be at least 0", min_tokens);
  if (min_tokens > max_tokens) {
    throw InvalidArgument(
        concat("min_tokens must not exceed max_tokens=", max_tokens, ", got ", min_tokens));
  }
  if (logprobs) require(*logprobs >= 0, "logprobs must be at least 0", *logprobs);
  for (const std::string& text : stop) {
    if (text.empty()) throw InvalidArgument("stop must not contain an empty string");
  }
  if (!stop.empty() && !detokenize) {
    throw InvalidArgument("stop strings need detokenize=True, since they are found in the text");
  }
}

}  // namespace llmserve
