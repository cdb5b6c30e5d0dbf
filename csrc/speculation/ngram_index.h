// Where tokens stood before in a text that grows. Each token is entered once: a chain links the
// places whose last min_size tokens have the same hash, newest first, as in LZ77's matchers (zlib,
// deflate.c). A search walks a bounded part of its chain and compares the tokens themselves.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace llmserve {

class NgramIndex {
 public:
  struct Match {
    int64_t end = 0;   // the position behind it
    int32_t size = 0;  // tokens that agree, min_size..max_size
  };

  // 1 <= min_size <= max_size.
  NgramIndex(int32_t min_size, int32_t max_size) : min_size_(min_size), max_size_(max_size) {}

  // Enters the tokens of `text` that came since the last call; those before are as they were.
  void extend(std::span<const int32_t> text);

  // Appends the newest places where `text`, of the last extend(), has the end of `suffix`, newest
  // first. The text may be the suffix: that it ends there itself is no match.
  void find(std::span<const int32_t> text, std::span<const int32_t> suffix,
            std::vector<Match>& matches) const;

 private:
  size_t bucket(std::span<const int32_t> token_ids) const;
  void grow(std::span<const int32_t> text);
  void enter(std::span<const int32_t> text, int64_t end);

  const int32_t min_size_;
  const int32_t max_size_;
  int64_t num_entered_ = 0;        // tokens
  std::vector<int32_t> heads_;     // [power of two] the newest end of a chain; 0: none
  std::vector<int32_t> previous_;  // [num_entered_ + 1] by end: the one before in its chain
};

}  // namespace llmserve
