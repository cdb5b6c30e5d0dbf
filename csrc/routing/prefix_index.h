// Which replicas hold which blocks of tokens: what a router knows of their prefix caches.
//
// Blocks go by their chained hash, which names all tokens up to the block's end. Who holds a block
// holds all before it, so that the blocks a replica has of a prompt are its first ones.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/token_hash.h"

namespace llmserve {

constexpr int32_t kMaxReplicas = 256;

class PrefixIndex {
 public:
  // Returns whether nobody had it before.
  bool store(int32_t replica, const TokenHash& hash);
  // Returns whether nobody has it any more, and somebody had it before.
  bool remove(int32_t replica, const TokenHash& hash);
  // Returns what nobody has any more.
  std::vector<TokenHash> clear(int32_t replica);
  // All that any replica has.
  std::vector<TokenHash> hashes() const;

  // Of the blocks of a prompt, how many each replica has from the first on: num_blocks
  // [replicas].
  void match(std::span<const TokenHash> hashes, std::span<int32_t> num_blocks) const;
  int64_t num_blocks(int32_t replica) const { return num_blocks_[static_cast<size_t>(replica)]; }
  // Blocks that any replica has.
  int64_t size() const { return static_cast<int64_t>(holders_.size()); }

 private:
  using Replicas = std::bitset<kMaxReplicas>;
  std::unordered_map<TokenHash, Replicas, TokenHashBucket> holders_;
  std::array<int64_t, kMaxReplicas> num_blocks_{};
};

// What a replica holds if it keeps what it was sent last, up to its capacity: for replicas that do
// not say. The least recently used block goes first; of a prompt's the last one.
class AssumedCache {
 public:
  explicit AssumedCache(int64_t num_blocks) : capacity_(num_blocks) {}

  // A prompt of these blocks was sent. Appends what has come in and what has gone.
  void use(std::span<const TokenHash> hashes, std::vector<TokenHash>& stored,
           std::vector<TokenHash>& removed);
  int64_t size() const { return static_cast<int64_t>(places_.size()); }

 private:
  int64_t capacity_;
  std::list<TokenHash> order_;  // the most recently used first
  std::unordered_map<TokenHash, std::list<TokenHash>::iterator, TokenHashBucket> places_;
};

}  // namespace llmserve
