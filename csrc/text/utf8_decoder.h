// Incremental UTF-8: bytes in, whole characters out, as Python's bytes.decode(errors="replace")
// does on the concatenation of all bytes. Source: Unicode 15, section 3.9, "U+FFFD substitution of
// maximal subparts", and table 3-7.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace llmserve {

class Utf8Decoder {
 public:
  // Appends to `text` the characters that are complete; the bytes of an unfinished one are held.
  void append(std::string_view bytes, std::string& text);
  // No more bytes come: an unfinished character becomes U+FFFD.
  void flush(std::string& text);

 private:
  bool accepts(uint8_t byte) const { return byte >= lower_ && byte <= upper_; }
  void begin(uint8_t byte, std::string& text);

  std::string partial_;   // the unfinished character, at most 3 bytes
  int num_missing_ = 0;   // continuation bytes that it lacks
  uint8_t lower_ = 0x80;  // range of the next one
  uint8_t upper_ = 0xbf;
};

}  // namespace llmserve
