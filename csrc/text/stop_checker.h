// From tokens to text that may be given out: whole characters, nothing that could still turn out to
// be a stop string, nothing ever taken back.
//
// The concatenation of all that comes out depends on the bytes of the tokens alone and not on where
// they are cut:
//   text   = bytes.decode("utf-8", errors="replace")   (special tokens left out if asked)
//   result = text before the stop string that ends first (the longest of those that end there)
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/utf8_decoder.h"
#include "text/vocabulary.h"

namespace llmserve {

// The stop strings of a request, prepared for search (Knuth, Morris, Pratt 1977). Shared by its
// sequences.
class StopStrings {
 public:
  StopStrings() = default;
  explicit StopStrings(const std::vector<std::string>& strings);

  size_t size() const { return patterns_.size(); }
  const std::string& string(size_t idx) const { return patterns_[idx].text; }
  // Whether any of them begins with this byte.
  bool can_begin(char byte) const { return first_bytes_[static_cast<uint8_t>(byte)]; }

  // Bytes of string idx matched after one more byte, given those matched before it, not all.
  uint32_t advance(size_t idx, uint32_t matched, char byte) const {
    const Pattern& pattern = patterns_[idx];
    while (matched > 0 && byte != pattern.text[matched]) matched = pattern.borders[matched];
    return byte == pattern.text[matched] ? matched + 1 : 0;
  }
  // The longest proper prefix of string idx that its first `matched` bytes end with.
  uint32_t border(size_t idx, uint32_t matched) const { return patterns_[idx].borders[matched]; }

 private:
  struct Pattern {
    std::string text;
    std::vector<uint32_t> borders;  // [length + 1]: longest proper border of each prefix
  };
  std::vector<Pattern> patterns_;
  std::array<bool, 256> first_bytes_{};
};

class StopChecker {
 public:
  struct Options {
    bool skip_special_tokens = true;
    bool spaces_between_special_tokens = true;  // false: one that follows another loses its space
    bool include_stop_str_in_output = false;
  };

  // Both live as long as the checker.
  StopChecker(const Vocabulary& vocabulary, const StopStrings& stops, Options options);

  // Adds a token and appends to `text` what may now be given out. Returns the index of the stop
  // string that it completed, after which only the destructor may be called. can_stop = false
  // lets a completed stop string pass (min_tokens).
  std::optional<size_t> append(int32_t token_id, bool can_stop, std::string& text);

  // The sequence has ended for another reason: gives out what was held back. The replacement of a
  // truncated character can still complete a stop string.
  std::optional<size_t> flush(std::string& text);

 private:
  std::string_view text_of(int32_t token_id);
  std::optional<size_t> scan(bool can_stop, std::string& text);
  std::optional<size_t> advance(char byte);
  void give_out(std::string& text);

  const Vocabulary* vocabulary_;
  const StopStrings* stops_;
  Options options_;
  bool was_special_ = false;  // the last token
  Utf8Decoder decoder_;
  std::string held_;               // whole characters that are not given out yet
  size_t num_scanned_ = 0;         // bytes of held_ that the stop strings have seen
  std::vector<uint32_t> matched_;  // [stops] bytes of each string that the text's end matches
  uint32_t max_matched_ = 0;       // of those
};

}  // namespace llmserve
