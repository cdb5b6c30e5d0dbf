// A tokenizer's decoder, applied to the tokens of its vocabulary one by one. What a decoder does to
// one token alone is a chain of steps; one whose output depends on neighbours has none.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

namespace llmserve {

// Every occurrence of a text, from left to right, by another.
struct ReplaceStep {
  std::string old_text;  // not empty
  std::string new_text;
};
// A character off both ends, so many times at most.
struct StripStep {
  std::string character;
  int64_t start = 0;
  int64_t stop = 0;
};
// A token that begins so goes on with the word before it and loses that, any other begins a word
// and gets a space; without a prefix all do.
struct WordStep {
  std::optional<std::string> prefix;
};
// `<0x0A>` is the byte 10; anything else is itself.
struct ByteFallbackStep {};
// GPT-2's characters for bytes (Radford et al. 2019, encoder.py, bytes_to_unicode). A text with any
// other character is itself: an added token.
struct ByteLevelStep {};

using TokenStep = std::variant<ReplaceStep, StripStep, WordStep, ByteFallbackStep, ByteLevelStep>;

// The decoder is a file's, and steps can double a text each: what they make is bounded.
class TokenDecoder {
 public:
  static constexpr size_t kMaxSteps = 64;  // published: up to 12 (WordPiece's clean-up)
  // Of one token, after each step; published: 1,000 spaces.
  static constexpr size_t kMaxTokenBytes = 1 << 16;
  // Of all tokens after all steps; published: 262,144 tokens, four steps, 8 MB.
  static constexpr size_t kMaxBytes = 1 << 28;

  // `steps` outlive the decoder. Throws CorruptFile for more than kMaxSteps.
  explicit TokenDecoder(std::span<const TokenStep> steps);

  // The bytes that a token stands for; where a step turns it into bytes the chain ends. `token` is
  // UTF-8. Throws CorruptFile for more bytes than the bounds above.
  std::string decode(std::string_view token);

 private:
  void count(size_t num_bytes);

  std::span<const TokenStep> steps_;
  size_t num_bytes_ = 0;
};

}  // namespace llmserve
