// The tokens that a sequence has, each once, with how often it was generated: what penalties are
// of. One addition a token.
#pragma once

#include <algorithm>
#include <atomic>
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
    added_.push_back(static_cast<uint32_t>(place->second));
    TokenCount& count = counts_[place->second];
    if (is_generated) {
      ++count.num_generated;
    } else {
      count.is_in_prompt = true;
    }
  }
  // In the order of their first appearance; valid until the next add().
  std::span<const TokenCount> all() const { return counts_; }
  // For each token that was added, its index in all(); valid likewise.
  std::span<const uint32_t> added() const { return added_; }
  // Of no other in this process, and not 0.
  uint64_t id() const { return id_; }
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
  static uint64_t next_id() {
    static std::atomic<uint64_t> num_ids{0};
    return ++num_ids;
  }

  const uint64_t id_ = next_id();
  std::vector<TokenCount> counts_;
  std::vector<uint32_t> added_;
  std::unordered_map<int32_t, size_t> places_;  // token id -> index of counts_
};

}  // namespace llmserve
