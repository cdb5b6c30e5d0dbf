#include "text/utf8_decoder.h"

namespace llmserve {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

}  // namespace

void Utf8Decoder::append(std::string_view bytes, std::string& text) {
  for (const char c : bytes) {
    const uint8_t byte = static_cast<uint8_t>(c);
    if (num_missing_ > 0 && !accepts(byte)) flush(text);
    if (num_missing_ == 0) {
      begin(byte, text);
      continue;
    }
    partial_ += c;
    lower_ = 0x80;
    upper_ = 0xbf;
    if (--num_missing_ == 0) {
      text += partial_;
      partial_.clear();
    }
  }
}

void Utf8Decoder::flush(std::string& text) {
  if (num_missing_ == 0) return;
  text += kReplacement;
  partial_.clear();
  num_missing_ = 0;
}

// The ranges of the second byte exclude overlong forms, surrogates and what is past U+10FFFF.
void Utf8Decoder::begin(uint8_t byte, std::string& text) {
  if (byte < 0x80) {
    text += static_cast<char>(byte);
    return;
  }
  if (byte < 0xc2 || byte > 0xf4) {
    text += kReplacement;
    return;
  }
  num_missing_ = byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
  lower_ = byte == 0xe0 ? 0xa0 : byte == 0xf0 ? 0x90 : 0x80;
  upper_ = byte == 0xed ? 0x9f : byte == 0xf4 ? 0x8f : 0xbf;
  partial_ = static_cast<char>(byte);
}

}  // namespace llmserve
