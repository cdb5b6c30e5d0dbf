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

// The bytes that a token stands for; where a step turns it into bytes the chain ends. `token` is
// UTF-8.
std::string decode_token(std::string_view token, std::span<const TokenStep> steps);

}  // namespace llmserve
