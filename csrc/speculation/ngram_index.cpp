#include "speculation/ngram_index.h"

#include <algorithm>

#include "core/mix.h"

namespace llmserve {
namespace {

// Of a chain, what a search compares: a text that repeats itself for ever has its longest match
// among the newest places.
constexpr int kMaxCompared = 32;

}  // namespace

// Of the last min_size_ of the tokens.
size_t NgramIndex::bucket(std::span<const int32_t> token_ids) const {
  uint64_t hash = 0;
  for (const int32_t token_id : token_ids.last(static_cast<size_t>(min_size_)))
    hash = mix64(hash, static_cast<uint64_t>(token_id));
  return static_cast<size_t>(hash) & (heads_.size() - 1);
}

void NgramIndex::extend(std::span<const int32_t> text) {
  const int64_t num_tokens = std::ssize(text);
  if (num_tokens > std::ssize(heads_)) grow(text);
  previous_.resize(static_cast<size_t>(num_tokens) + 1, 0);
  for (int64_t end = std::max<int64_t>(num_entered_ + 1, min_size_); end <= num_tokens; ++end)
    enter(text, end);
  num_entered_ = num_tokens;
}

// At least two buckets a token, so that chains stay short.
void NgramIndex::grow(std::span<const int32_t> text) {
  size_t size = 256;
  while (size < 2 * text.size()) size *= 2;
  heads_.assign(size, 0);
  for (int64_t end = min_size_; end <= num_entered_; ++end) enter(text, end);
}

void NgramIndex::enter(std::span<const int32_t> text, int64_t end) {
  int32_t& head = heads_[bucket(text.first(static_cast<size_t>(end)))];
  previous_[static_cast<size_t>(end)] = head;
  head = static_cast<int32_t>(end);
}

void NgramIndex::find(std::span<const int32_t> text, std::span<const int32_t> suffix,
                      std::vector<Match>& matches) const {
  if (std::ssize(suffix) < min_size_ || num_entered_ < min_size_) return;
  const bool is_itself = text.data() == suffix.data() && text.size() == suffix.size();
  int32_t end = heads_[bucket(suffix)];
  if (is_itself) end = previous_[text.size()];
  for (int i = 0; end > 0 && i < kMaxCompared; ++i, end = previous_[static_cast<size_t>(end)]) {
    const auto most =
        std::min<size_t>({static_cast<size_t>(max_size_), static_cast<size_t>(end), suffix.size()});
    size_t size = 0;
    while (size < most &&
           text[static_cast<size_t>(end) - 1 - size] == suffix[suffix.size() - 1 - size])
      ++size;
    if (static_cast<int32_t>(size) >= min_size_)
      matches.push_back({.end = end, .size = static_cast<int32_t>(size)});
  }
}

}  // namespace llmserve
