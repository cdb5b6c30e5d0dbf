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

int32_t SpeculationConfig::max_tree_paths() const {
  if (token_tree.empty()) return tree_width > 1 ? 1 + tree_width : 1;
  std::array<int32_t, kMaxDraftTokens + 1> by_length{};
  for (const std::vector<int32_t>& path : token_tree) ++by_length[path.size()];
  return *std::ranges::max_element(by_length);
}

void SpeculationConfig::validate_trees() const {
  if (tree_width > kMaxTreeWidth)
    throw InvalidArgument(concat(kField, "speculative_eagle_topk must be at most ", kMaxTreeWidth,
                                 ", got ", tree_width));
  if (tree_size > kMaxTreeSize)
    throw InvalidArgument(concat(kField, "speculative_num_draft_tokens must be at most ",
                                 kMaxTreeSize, ", got ", tree_size));
  if (token_tree.empty() && tree_width == 1) return;
  const char* const field =
      token_tree.empty() ? "speculative_eagle_topk" : "speculative_token_tree";
  if (method == "ngram" || method == "suffix")
    throw NotSupported(concat(kField, field,
                              " is supported with draft models and heads, and method ", "\"",
                              method, "\" guesses chains"));
  if (!is_exact())
    throw NotSupported(concat(kField, field, " is not supported with rejection_sample_method ",
                              "'rejection'; leave it at 'exact'"));
  if (has_heterogeneous_vocab)
    throw NotSupported(concat(kField, field, " is not supported with use_heterogeneous_vocab"));
  if (!token_tree.empty() && tree_width > 1)
    throw InvalidArgument(concat(kField, "give speculative_token_tree or speculative_eagle_topk"));
  if (std::ssize(token_tree) > kMaxTreeSize)
    throw InvalidArgument(concat(kField, "speculative_token_tree has ", token_tree.size(),
                                 " guesses, and may have ", kMaxTreeSize));
  for (const std::vector<int32_t>& path : token_tree) {
    const auto has = [&](std::vector<int32_t> other) {
      return other.empty() || std::ranges::find(token_tree, other) != token_tree.end();
    };
    if (path.empty() || std::ssize(path) > kMaxDraftTokens || path.back() < 0 ||
        path.back() >= kMaxTreeWidth)
      throw InvalidArgument(concat(kField, "speculative_token_tree has paths of 1 to ",
                                   kMaxDraftTokens, " choices, each from 0 to ",
                                   kMaxTreeWidth - 1));
    std::vector<int32_t> other = path;
    if (other.back() > 0) {
      --other.back();
    } else {
      other.pop_back();
    }
    if (!has(std::vector<int32_t>(path.begin(), path.end() - 1)) || !has(other))
      throw InvalidArgument(concat(kField, "speculative_token_tree lacks a guess that one of ",
                                   path.size(), " places stands on: each needs those before it, ",
                                   "and the choices ahead of it"));
    if (std::ranges::count(token_tree, path) > 1)
      throw InvalidArgument(concat(kField, "speculative_token_tree has a guess twice"));
  }
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
  validate_trees();
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
