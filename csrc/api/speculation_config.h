// Which tokens of a step are guessed, and how. Names as users of the field know them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "api/config_fields.h"

namespace llmserve {

// Guesses of one sequence in one step: a verifying step has a row of logits for each.
inline constexpr int32_t kMaxDraftTokens = 32;
// Guesses of one place.
inline constexpr int32_t kMaxTreeWidth = 8;
// Guesses of a tree.
inline constexpr int32_t kMaxTreeSize = 64;

// How a drafter draws. Both give the same tokens in the end, and differ in how many are accepted.
enum class DraftSampling : uint8_t {
  kTarget,  // with the request's own noise and filters
  kGreedy   // the most likely token
};

struct SpeculationConfig {
  std::string method;  // a name of the drafters' registry; empty: nothing is guessed
  std::string model;   // of drafters that have one: a checkpoint directory
  int32_t num_speculative_tokens = 0;  // of a sequence and step at most
  // Of n-grams: how many of the newest tokens have to be found again, at least and at most.
  int32_t prompt_lookup_min = 5;
  int32_t prompt_lookup_max = 5;
  // Of suffixes: the longest that is looked for, finished outputs that are kept, guesses for each
  // token of the suffix that was found, and how likely a guess has to be.
  int32_t suffix_max_tree_depth = 24;
  int32_t suffix_max_cached_requests = 10000;
  double suffix_max_spec_factor = 1.0;
  double suffix_min_token_prob = 0.1;
  // (at least so many sequences run, at most so many, guesses of each at most)
  std::vector<std::array<int32_t, 3>> num_tokens_per_batch_size;
  int32_t disable_by_batch_size = 0;  // nothing is guessed where more sequences run; 0: no bound
  bool is_adaptive = true;  // false: as many guesses as are allowed, whether they pay or not
  std::string draft_sampling = "target";  // "target" or "greedy"
  // "exact": guesses count where the target draws them, and every bit is that of no speculation.
  // "rejection": the rejection rule, with noise of its own; equal in distribution alone.
  std::string acceptance = "exact";
  // Trees: guesses of one place at most (1: chains), and of a tree at most; or which choices there
  // are, each as the ranks of those before it and its own. Empty: the likeliest.
  int32_t tree_width = 1;
  int32_t tree_size = 16;
  std::vector<std::vector<int32_t>> token_tree;
  bool has_heterogeneous_vocab = false;  // the draft model's tokens are mapped by their bytes
  // Of the draft model, as EngineConfig has them; empty: as its checkpoint has it, none.
  std::string draft_dtype;
  std::string draft_quantization;

  static constexpr auto fields() {
    using Config = SpeculationConfig;
    return std::tuple{
        ConfigField{"method", &Config::method},
        ConfigField{"model", &Config::model},
        ConfigField{"num_speculative_tokens", &Config::num_speculative_tokens, 0},
        ConfigField{"prompt_lookup_min", &Config::prompt_lookup_min, 1},
        ConfigField{"prompt_lookup_max", &Config::prompt_lookup_max, 1},
        ConfigField{"suffix_decoding_max_tree_depth", &Config::suffix_max_tree_depth, 1},
        ConfigField{"suffix_decoding_max_cached_requests", &Config::suffix_max_cached_requests, 0},
        ConfigField{"suffix_decoding_max_spec_factor", &Config::suffix_max_spec_factor},
        ConfigField{"suffix_decoding_min_token_prob", &Config::suffix_min_token_prob},
        ConfigField{"num_speculative_tokens_per_batch_size", &Config::num_tokens_per_batch_size},
        ConfigField{"disable_by_batch_size", &Config::disable_by_batch_size, 0},
        ConfigField{"adaptive", &Config::is_adaptive},
        ConfigField{"draft_sample_method", &Config::draft_sampling},
        ConfigField{"rejection_sample_method", &Config::acceptance},
        ConfigField{"speculative_eagle_topk", &Config::tree_width, 1},
        ConfigField{"speculative_num_draft_tokens", &Config::tree_size, 1},
        ConfigField{"speculative_token_tree", &Config::token_tree},
        ConfigField{"use_heterogeneous_vocab", &Config::has_heterogeneous_vocab},
        ConfigField{"dtype", &Config::draft_dtype},
        ConfigField{"quantization", &Config::draft_quantization},
    };
  }
  bool is_on() const { return !method.empty(); }
  bool has_trees() const { return tree_width > 1 || !token_tree.empty(); }
  // Paths of a tree that are gone on from at once.
  int32_t max_tree_paths() const;
  bool is_exact() const { return acceptance == "exact"; }
  DraftSampling sampling() const {
    return draft_sampling == "greedy" ? DraftSampling::kGreedy : DraftSampling::kTarget;
  }
  // Guesses of a sequence at most where so many run.
  int32_t max_tokens_of(int64_t num_sequences) const;
  // Throws InvalidArgument that names the field, and NotSupported. The method's name is the
  // registry's to check.
  void validate() const;

 private:
  void validate_trees() const;
};

}  // namespace llmserve
