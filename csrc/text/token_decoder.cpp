#include "text/token_decoder.h"

#include <array>
#include <charconv>
#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

// In UTF-8 GPT-2's characters are one or two bytes: U+0021 to U+0143.
constexpr uint32_t kEndOfByteCharacters = 0x144;
constexpr int16_t kNoByte = -1;

constexpr bool is_printable(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xFF && byte != 0xAD);
}

// Printable bytes are their own characters, the others follow U+0100 in order.
constexpr std::array<int16_t, kEndOfByteCharacters> byte_of_character() {
  std::array<int16_t, kEndOfByteCharacters> table{};
  table.fill(kNoByte);
  size_t next = 0x100;
  for (int byte = 0; byte < 0x100; ++byte)
    table[is_printable(byte) ? static_cast<size_t>(byte) : next++] = static_cast<int16_t>(byte);
  return table;
}

constexpr std::array<int16_t, kEndOfByteCharacters> kByteOfCharacter = byte_of_character();

// The bytes of a text of GPT-2's characters alone.
std::optional<std::string> level_bytes(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    uint32_t character = static_cast<unsigned char>(text[i]);
    if (character >= 0x80) {
      if (character >= 0xE0 || i + 1 == text.size()) return std::nullopt;
      character = (character & 0x1F) << 6 | (static_cast<unsigned char>(text[++i]) & 0x3F);
    }
    if (character >= kEndOfByteCharacters || kByteOfCharacter[character] == kNoByte)
      return std::nullopt;
    bytes += static_cast<char>(kByteOfCharacter[character]);
  }
  return bytes;
}

std::optional<char> fallback_byte(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return std::nullopt;
  unsigned value = 0;
  const auto [end, error] = std::from_chars(text.data() + 3, text.data() + 5, value, 16);
  if (error != std::errc() || end != text.data() + 5) return std::nullopt;
  return static_cast<char>(value);
}

void check_size(size_t num_bytes) {
  if (num_bytes > TokenDecoder::kMaxTokenBytes)
    throw CorruptFile(concat("a token has more than ", TokenDecoder::kMaxTokenBytes,
                             " bytes, in the vocabulary or after a step of the decoder"));
}

std::string replace_all(std::string_view text, std::string_view old_text,
                        std::string_view new_text) {
  std::string out;
  size_t done = 0;
  for (size_t at = text.find(old_text); at != text.npos; at = text.find(old_text, done)) {
    out.append(text, done, at - done).append(new_text);
    done = at + old_text.size();
    check_size(out.size());
  }
  return out.append(text, done);
}

// Each applies its step and says whether the text is bytes now.
bool apply(const ReplaceStep& step, std::string& text) {
  if (text.find(step.old_text) != text.npos) text = replace_all(text, step.old_text, step.new_text);
  return false;
}

bool apply(const StripStep& step, std::string& text) {
  std::string_view rest = text;
  for (int64_t i = 0; i < step.start && rest.starts_with(step.character); ++i)
    rest.remove_prefix(step.character.size());
  for (int64_t i = 0; i < step.stop && rest.ends_with(step.character); ++i)
    rest.remove_suffix(step.character.size());
  text = std::string(rest);
  return false;
}

bool apply(const WordStep& step, std::string& text) {
  if (step.prefix && text.starts_with(*step.prefix))
    text.erase(0, step.prefix->size());
  else
    text.insert(0, 1, ' ');
  return false;
}

bool apply(const ByteFallbackStep&, std::string& text) {
  const std::optional<char> byte = fallback_byte(text);
  if (byte) text.assign(1, *byte);
  return byte.has_value();
}

bool apply(const ByteLevelStep&, std::string& text) {
  if (std::optional<std::string> bytes = level_bytes(text)) text = std::move(*bytes);
  return true;
}

}  // namespace

TokenDecoder::TokenDecoder(std::span<const TokenStep> steps) : steps_(steps) {
  if (steps.size() > kMaxSteps)
    throw CorruptFile(
        concat("the decoder has ", steps.size(), " steps; at most ", kMaxSteps, " are run"));
}

std::string TokenDecoder::decode(std::string_view token) {
  count(token.size());
  std::string text(token);
  for (const TokenStep& step : steps_) {
    const bool is_bytes = std::visit([&](const auto& kind) { return apply(kind, text); }, step);
    count(text.size());
    if (is_bytes) break;
  }
  return text;
}

void TokenDecoder::count(size_t num_bytes) {
  check_size(num_bytes);
  num_bytes_ += num_bytes;
  if (num_bytes_ > kMaxBytes)
    throw CorruptFile(concat("the tokens have more than ", kMaxBytes,
                             " bytes in all after the steps of the decoder"));
}

}  // namespace llmserve
