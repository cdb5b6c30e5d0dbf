// Reads untrusted JSON (RFC 8259) one token at a time, so that a file of any size costs no tree.
// Strict: UTF-8 only, no duplicate handling of its own, no NaN, no comments, bounded depth.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace llmserve {

class JsonReader {
 public:
  static constexpr int kMaxDepth = 64;

  enum class Kind : uint8_t { kNull, kBool, kInt, kFloat, kString, kArray, kObject };

  // `text` outlives the reader. Errors read "<file>, byte <base_offset + position>: <reason>".
  JsonReader(std::string_view file, std::string_view text, int64_t base_offset = 0)
      : file_(file), text_(text), base_offset_(base_offset) {}

  // What comes next, without taking it.
  Kind peek();

  void read_null();
  bool read_bool();
  // Refuses fractions, exponents and what does not fit 64 bits.
  int64_t read_int();
  // Any number; refuses what is too large or too small for a double.
  double read_number();
  std::string read_string();

  // for (begin_object(); next_key(key);) { … read exactly one value … }
  void begin_object();
  bool next_key(std::string& key);
  // for (begin_array(); next_element();) { … read exactly one value … }
  void begin_array();
  bool next_element();

  // Takes one value, whatever it is, checking its syntax.
  void skip();
  // Refuses anything but white space after the value.
  void end();

  // Where the next token starts, counted from the start of the file.
  int64_t offset();
  // Throws CorruptFile at the current position.
  [[noreturn]] void fail(std::string_view reason) const;

 private:
  void skip_space();
  char next_char();
  void expect(char wanted, std::string_view context);
  void expect_word(std::string_view word);
  std::string_view scan_number(bool& is_integer);
  void append_escape(std::string& out);
  void append_utf8(std::string& out);
  uint32_t read_hex4();
  void enter();
  bool next_item(char close);

  std::string file_;
  std::string_view text_;
  int64_t base_offset_;
  size_t pos_ = 0;
  int depth_ = 0;
  bool is_first_ = false;  // no item of the innermost container has been read
};

}  // namespace llmserve
