#include "api/speculation_config.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr const char* kField = "speculative_config: ";
// Of what n-grams are compared by: more tokens find no other places.
constexpr int32_t kMaxLookup = 64;

}  // namespace

int32_t SpeculationConfig::max_tokens_of(int64_t num_sequences) const {
  if (disable_by_batch_size > 0 && num_sequences > disable_by_batch_size) return 0;
  for (const auto& [low, high, count] : num_tokens_per_batch_size)
    if (low <= num_sequences && num_sequences <= high)
      return std::min(count, num_speculative_tokens);
  return num_speculative_tokens;
}

void SpeculationConfig::validate() const {
  if (!is_on()) return;
  try {
    check_minimums(*this);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat(kField, error.what()));
  }
  if (num_speculative_tokens < 1 || num_speculative_tokens > kMaxDraftTokens)
    throw InvalidArgument(concat(kField, "num_speculative_tokens must be from 1 to ",
                                 kMaxDraftTokens, ", got ", num_speculative_tokens));
  if (prompt_lookup_min > prompt_lookup_max)
    throw InvalidArgument(concat(kField, "prompt_lookup_min (", prompt_lookup_min,
                                 ") must be at most prompt_lookup_max (", prompt_lookup_max, ")"));
  if (prompt_lookup_max > kMaxLookup)
    throw InvalidArgument(concat(kField, "prompt_lookup_max must be at most ", kMaxLookup, ", got ",
                                 prompt_lookup_max));
  if (!(suffix_max_spec_factor > 0))
    throw InvalidArgument(concat(kField, "suffix_decoding_max_spec_factor must be above 0, got ",
                                 suffix_max_spec_factor));
  if (!(suffix_min_token_prob >= 0 && suffix_min_token_prob <= 1))
    throw InvalidArgument(concat(kField, "suffix_decoding_min_token_prob must be in [0, 1], got ",
                                 suffix_min_token_prob));
  if (draft_sampling != "target" && draft_sampling != "greedy")
    throw InvalidArgument(concat(kField, "draft_sample_method must be target or greedy, got \"",
                                 draft_sampling.substr(0, 80), "\""));
  if (acceptance != "exact" && acceptance != "rejection")
    throw InvalidArgument(concat(kField,
                                 "rejection_sample_method must be exact or rejection, got \"",
                                 acceptance.substr(0, 80), "\""));
  for (const auto& [low, high, count] : num_tokens_per_batch_size) {
    if (low < 1 || high < low || count < 0 || count > kMaxDraftTokens)
      throw InvalidArgument(
          concat(kField,
                 "num_speculative_tokens_per_batch_size is a list of [least, most, tokens] with 1 "
                 "<= least <= most and 0 <= tokens <= ",
                 kMaxDraftTokens, ", got [", low, ", ", high, ", ", count, "]"));
  }
}

}  // namespace llmserve
