#include "io/json_reader.h"

#include <charconv>
#include <cmath>

#include "core/error.h"

namespace llmserve {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void encode_utf8(uint32_t code, std::string& out) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

}  // namespace

void JsonReader::fail(std::string_view reason) const {
  throw CorruptFile(
      concat(file_, ", byte ", base_offset_ + static_cast<int64_t>(pos_), ": ", reason));
}

void JsonReader::skip_space() {
  while (pos_ < text_.size() &&
         (text_[pos_] == ' ' || text_[pos_] == '\n' || text_[pos_] == '\r' || text_[pos_] == '\t'))
    ++pos_;
}

int64_t JsonReader::offset() {
  skip_space();
  return base_offset_ + static_cast<int64_t>(pos_);
}

char JsonReader::next_char() {
  skip_space();
  if (pos_ >= text_.size()) fail("the JSON text ends early");
  return text_[pos_];
}

void JsonReader::expect(char wanted, std::string_view context) {
  if (next_char() != wanted) fail(concat("expected '", wanted, "' ", context));
  ++pos_;
}

void JsonReader::expect_word(std::string_view word) {
  if (text_.substr(pos_, word.size()) != word) fail("expected a JSON value");
  pos_ += word.size();
}

JsonReader::Kind JsonReader::peek() {
  const char c = next_char();
  switch (c) {
    case 'n':
      return Kind::kNull;
    case 't':
    case 'f':
      return Kind::kBool;
    case '"':
      return Kind::kString;
    case '[':
      return Kind::kArray;
    case '{':
      return Kind::kObject;
    default:
      break;
  }
  if (c != '-' && !is_digit(c))
    fail("expected a JSON value (JSON has no NaN, Infinity or comments)");
  const size_t start = pos_;
  bool is_integer = false;
  scan_number(is_integer);
  pos_ = start;
  return is_integer ? Kind::kInt : Kind::kFloat;
}

void JsonReader::read_null() {
  next_char();
  expect_word("null");
}

bool JsonReader::read_bool() {
  const bool value = next_char() == 't';
  expect_word(value ? "true" : "false");
  return value;
}

// Takes -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)? and says whether it was an integer.
std::string_view JsonReader::scan_number(bool& is_integer) {
  next_char();
  const size_t start = pos_;
  const auto digits = [&] {
    const size_t first = pos_;
    while (pos_ < text_.size() && is_digit(text_[pos_])) ++pos_;
    if (pos_ == first) fail("expected a digit");
    return pos_ - first;
  };
  const auto take = [&](std::string_view any) {
    if (pos_ >= text_.size() || any.find(text_[pos_]) == any.npos) return false;
    ++pos_;
    return true;
  };
  take("-");
  const size_t first = pos_;
  if (digits() > 1 && text_[first] == '0') fail("a number has leading zeros");
  is_integer = true;
  if (take(".")) {
    is_integer = false;
    digits();
  }
  if (take("eE")) {
    is_integer = false;
    take("+-");
    digits();
  }
  return text_.substr(start, pos_ - start);
}

int64_t JsonReader::read_int() {
  const size_t start = pos_;
  bool is_integer = false;
  const std::string_view number = scan_number(is_integer);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (!is_integer || error != std::errc() || end != number.data() + number.size()) {
    pos_ = start;
    fail(is_integer ? "the integer does not fit 64 bits" : "expected an integer");
  }
  return value;
}

double JsonReader::read_number() {
  const size_t start = pos_;
  bool is_integer = false;
  const std::string_view number = scan_number(is_integer);
  double value = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (error != std::errc() || !std::isfinite(value)) {
    pos_ = start;
    fail("the number is out of range");
  }
  return value;
}

std::string JsonReader::read_string() {
  expect('"', "to begin a string");
  std::string out;
  for (;;) {
    if (pos_ >= text_.size()) fail("a string has no end");
    const unsigned char c = static_cast<unsigned char>(text_[pos_]);
    if (c == '"') {
      ++pos_;
      return out;
    }
    if (c < 0x20) fail("a string has an unescaped control character");
    if (c == '\\') {
      append_escape(out);
    } else if (c < 0x80) {
      out += static_cast<char>(c);
      ++pos_;
    } else {
      append_utf8(out);
    }
  }
}

uint32_t JsonReader::read_hex4() {
  uint32_t code = 0;
  const std::string_view digits = text_.substr(pos_, 4);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
  if (digits.size() != 4 || error != std::errc() || end != digits.data() + 4)
    fail("expected four hexadecimal digits");
  pos_ += 4;
  return code;
}

void JsonReader::append_escape(std::string& out) {
  static constexpr std::string_view kNames = "\"\\/bfnrt";
  static constexpr std::string_view kValues = "\"\\/\b\f\n\r\t";
  ++pos_;
  if (pos_ >= text_.size()) fail("a string has no end");
  const char kind = text_[pos_];
  if (const size_t i = kNames.find(kind); i != kNames.npos) {
    ++pos_;
    out += kValues[i];
    return;
  }
  if (kind != 'u') fail("unknown escape in a string");
  ++pos_;
  uint32_t code = read_hex4();
  if (code >= 0xD800 && code < 0xDC00) {
    if (text_.substr(pos_, 2) != "\\u") fail("a surrogate stands alone");
    pos_ += 2;
    const uint32_t low = read_hex4();
    if (low < 0xDC00 || low > 0xDFFF) fail("a surrogate stands alone");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  } else if (code >= 0xDC00 && code < 0xE000) {
    fail("a surrogate stands alone");
  }
  encode_utf8(code, out);
}

// Unicode 15, table 3-7: shortest forms only, no surrogates, nothing past U+10FFFF.
void JsonReader::append_utf8(std::string& out) {
  const auto byte = [&](size_t i) {
    return pos_ + i < text_.size() ? static_cast<unsigned char>(text_[pos_ + i]) : 0;
  };
  const unsigned char first = byte(0);
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  bool ok = first >= 0xC2 && first <= 0xF4 && byte(1) >= low && byte(1) <= high;
  for (size_t i = 2; i < length; ++i) ok = ok && byte(i) >= 0x80 && byte(i) <= 0xBF;
  if (!ok) fail("a string is not valid UTF-8");
  out.append(text_.substr(pos_, length));
  pos_ += length;
}

void JsonReader::enter() {
  if (++depth_ > kMaxDepth) fail(concat("nested more than ", kMaxDepth, " deep"));
  is_first_ = true;
}

// Leaves the container at its closing bracket; otherwise takes the comma before the next item.
bool JsonReader::next_item(char close) {
  if (next_char() == close) {
    ++pos_;
    --depth_;
    is_first_ = false;
    return false;
  }
  if (!is_first_) {
    if (next_char() != ',') fail(concat("expected ',' or '", close, "'"));  // worded when it is
    ++pos_;
    if (next_char() == close) fail("a comma has nothing after it");
  }
  is_first_ = false;
  return true;
}

void JsonReader::begin_object() {
  expect('{', "to begin an object");
  enter();
}

bool JsonReader::next_key(std::string& key) {
  if (!next_item('}')) return false;
  key = read_string();
  expect(':', "after a key");
  return true;
}

void JsonReader::begin_array() {
  expect('[', "to begin an array");
  enter();
}

bool JsonReader::next_element() { return next_item(']'); }

void JsonReader::skip() {
  switch (peek()) {
    case Kind::kNull:
      return read_null();
    case Kind::kBool:
      read_bool();
      return;
    case Kind::kInt:
    case Kind::kFloat:
      read_number();
      return;
    case Kind::kString:
      read_string();
      return;
    case Kind::kArray:
      for (begin_array(); next_element();) skip();
      return;
    case Kind::kObject: {
      std::string key;
      for (begin_object(); next_key(key);) skip();
      return;
    }
  }
}

void JsonReader::end() {
  skip_space();
  if (pos_ != text_.size()) fail("unexpected text after the JSON value");
}

}  // namespace llmserve
