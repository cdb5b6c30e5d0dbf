#include "speculation/output_corpus.h"

#include "api/request.h"

namespace llmserve {
namespace {

// Of a generation: 16 bytes a token with its index.
constexpr size_t kMaxTokens = size_t{1} << 20;

}  // namespace

void OutputCorpus::add(std::span<const int32_t> output) {
  if (max_outputs_ == 0 || std::ssize(output) < min_size_ || output.size() >= kMaxTokens) return;
  const bool is_full = newer_ && (num_newer_ >= (max_outputs_ + 1) / 2 ||
                                  newer_->token_ids.size() + output.size() >= kMaxTokens);
  if (is_full) {
    older_.reset();
    older_.emplace(std::move(*newer_));
    newer_.reset();
    num_newer_ = 0;
  }
  if (!newer_) newer_.emplace(min_size_, max_size_);
  std::vector<int32_t>& token_ids = newer_->token_ids;
  token_ids.insert(token_ids.end(), output.begin(), output.end());
  token_ids.push_back(kNoTokenId);
  newer_->index.extend(token_ids);
  ++num_newer_;
}

int64_t OutputCorpus::num_tokens() const {
  int64_t count = 0;
  for_each([&](const IndexedText& text) { count += std::ssize(text.token_ids); });
  return count;
}

}  // namespace llmserve
