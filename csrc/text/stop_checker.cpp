#include "text/stop_checker.h"

#include <algorithm>

namespace llmserve {

StopStrings::StopStrings(const std::vector<std::string>& strings) {
  for (const std::string& text : strings) {
    Pattern pattern{text, std::vector<uint32_t>(text.size() + 1, 0)};
    uint32_t border = 0;
    for (size_t i = 1; i < text.size(); ++i) {
      while (border > 0 && text[i] != text[border]) border = pattern.borders[border];
      if (text[i] == text[border]) ++border;
      pattern.borders[i + 1] = border;
    }
    first_bytes_[static_cast<uint8_t>(text.front())] = true;
    patterns_.push_back(std::move(pattern));
  }
}

StopChecker::StopChecker(const Vocabulary& vocabulary, const StopStrings& stops, Options options)
    : vocabulary_(&vocabulary), stops_(&stops), options_(options), matched_(stops.size(), 0) {}

std::optional<size_t> StopChecker::append(int32_t token_id, bool can_stop, std::string& text) {
  if (options_.skip_special_tokens && vocabulary_->is_special(token_id)) return std::nullopt;
  const std::string_view bytes = text_of(token_id);
  if (stops_->size() == 0) {
    decoder_.append(bytes, text);
    return std::nullopt;
  }
  decoder_.append(bytes, held_);
  return scan(can_stop, text);
}

std::string_view StopChecker::text_of(int32_t token_id) {
  std::string_view bytes = vocabulary_->bytes(token_id);
  const bool is_special = vocabulary_->is_special(token_id);
  if (!options_.spaces_between_special_tokens && is_special && was_special_ &&
      bytes.starts_with(' ')) {
    bytes.remove_prefix(1);
  }
  was_special_ = is_special;
  return bytes;
}

std::optional<size_t> StopChecker::flush(std::string& text) {
  if (stops_->size() == 0) {
    decoder_.flush(text);
    return std::nullopt;
  }
  decoder_.flush(held_);
  const std::optional<size_t> stop = scan(true, text);
  if (!stop) {
    text += held_;
    held_.clear();
  }
  return stop;
}

std::optional<size_t> StopChecker::scan(bool can_stop, std::string& text) {
  for (; num_scanned_ < held_.size(); ++num_scanned_) {
    const char byte = held_[num_scanned_];
    if (max_matched_ == 0 && !stops_->can_begin(byte)) continue;
    const std::optional<size_t> stop = advance(byte);
    if (!stop || !can_stop) continue;
    const size_t kept = options_.include_stop_str_in_output ? 0 : stops_->string(*stop).size();
    text.append(held_, 0, num_scanned_ + 1 - kept);
    held_.clear();
    return stop;
  }
  give_out(text);
  return std::nullopt;
}

// The longest stop string that this byte completes. Should it be let pass, its end may still begin
// another one.
std::optional<size_t> StopChecker::advance(char byte) {
  std::optional<size_t> completed;
  max_matched_ = 0;
  for (size_t s = 0; s < matched_.size(); ++s) {
    const size_t length = stops_->string(s).size();
    matched_[s] = stops_->advance(s, matched_[s], byte);
    if (matched_[s] == length) {
      if (!completed || length > stops_->string(*completed).size()) completed = s;
      matched_[s] = stops_->border(s, matched_[s]);
    }
    max_matched_ = std::max(max_matched_, matched_[s]);
  }
  return completed;
}

void StopChecker::give_out(std::string& text) {
  size_t num_out = held_.size() - max_matched_;
  // Stop strings are bytes and may begin inside a character; characters leave whole.
  while (num_out > 0 && num_out < held_.size() && (held_[num_out] & 0xc0) == 0x80) --num_out;
  text.append(held_, 0, num_out);
  held_.erase(0, num_out);
  num_scanned_ = held_.size();
}

}  // namespace llmserve
