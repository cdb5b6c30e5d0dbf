// The tokens that a sequence has, each once, with how often it was generated: what penalties are
// of. One addition a token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kernels/ops.h"

namespace llmserve {

class TokenCounts {
 public:
  void add(int32_t token_id, bool is_generated) {
    const auto [place, is_new] = places_.try_emplace(token_id, counts_.size());
    if (is_new) counts_.push_back({.token_id = token_id});
    TokenCount& count = counts_[place->second];
    if (is_generated) {
      ++count.num_generated;
    } else {
      count.is_in_prompt = true;
    }
  }
  // In the order of their first appearance; valid until the next add().
  std::span<const TokenCount> all() const { return counts_; }
  // The same with more generated tokens, as if they had been added: written to `out`.
  void all_with(std::span<const int32_t> token_ids, std::vector<TokenCount>& out) const {
    out = counts_;
    for (const int32_t token_id : token_ids) {
      const auto place = places_.find(token_id);
      const auto count =
          place != places_.end()
              ? out.begin() + static_cast<int64_t>(place->second)
              : std::find_if(out.begin() + std::ssize(counts_), out.end(),
                             [&](const TokenCount& c) { return c.token_id == token_id; });
      if (count == out.end())
        out.push_back({.token_id = token_id, .num_generated = 1});
      else
        ++count->num_generated;
    }
  }

 private:
  std::vector<TokenCount> counts_;
  std::unordered_map<int32_t, size_t> places_;  // token id -> index of counts_
};

}  // namespace llmserve
