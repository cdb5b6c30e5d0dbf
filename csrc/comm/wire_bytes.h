// Integers, texts and arrays as bytes, little-endian, and back with every size looked at.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/message_code.h"
#include "core/error.h"

namespace llmserve {

class WireWriter {
 public:
  // Its vector is used anew, so that a step's frame takes no memory of its own.
  explicit WireWriter(std::vector<std::byte>& bytes) : bytes_(bytes) { bytes_.clear(); }

  template <class T>
  WireWriter& integer(T value) {
    return number(static_cast<uint64_t>(value), sizeof(T));
  }
  WireWriter& hash(const TokenHash& hash) { return raw(bytes_of(hash)); }
  // At most max_bytes of it.
  WireWriter& text(std::string_view text, size_t max_bytes) {
    text = text.substr(0, max_bytes);
    integer(static_cast<uint32_t>(text.size()));
    return raw(std::as_bytes(std::span(text)));
  }
  // Without its length. Elements have 4 bytes.
  template <class T>
  WireWriter& array(std::span<const T> values) {
    static_assert(sizeof(T) == 4);
    if constexpr (std::endian::native == std::endian::little) return raw(std::as_bytes(values));
    for (const T value : values) integer(std::bit_cast<uint32_t>(value));
    return *this;
  }

 private:
  WireWriter& number(uint64_t value, size_t num_bytes);
  WireWriter& raw(Bytes bytes);

  std::vector<std::byte>& bytes_;
};

// Failure::fail(what) throws where the bytes end too early, or late, or are not what is read.
template <class Failure>
class BasicWireReader {
 public:
  explicit BasicWireReader(Bytes bytes) : bytes_(bytes) {}

  template <class T>
  T integer() {
    const Bytes bytes = take(sizeof(T));
    uint64_t value = 0;
    for (size_t i = sizeof(T); i-- > 0;) value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
    return static_cast<T>(value);
  }
  // In [low, high].
  template <class T>
  T integer(int64_t low, int64_t high, const char* what) {
    const auto value = static_cast<int64_t>(integer<T>());
    if (value < low || value > high) fail(what);
    return static_cast<T>(value);
  }
  TokenHash hash() {
    TokenHash hash;
    std::memcpy(hash.bytes.data(), take(hash.bytes.size()).data(), hash.bytes.size());
    return hash;
  }
  std::string text(size_t max_bytes) {
    const size_t count = integer<uint32_t>();
    if (count > max_bytes) fail("a text is too long");
    const Bytes bytes = take(count);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  // So many elements of 4 bytes each, of which there are at least as many bytes as memory.
  template <class T>
  void array(size_t count, std::vector<T>& out) {
    static_assert(sizeof(T) == 4);
    if (count > bytes_.size() / sizeof(T)) fail("it is cut short");
    out.resize(count);
    const Bytes bytes = take(count * sizeof(T));
    if constexpr (std::endian::native == std::endian::little) {
      if (count > 0) std::memcpy(out.data(), bytes.data(), bytes.size());
    } else {
      BasicWireReader words(bytes);
      for (T& value : out) value = std::bit_cast<T>(words.integer<uint32_t>());
    }
  }
  void end() const {
    if (!bytes_.empty()) fail("it is longer than what it says");
  }
  [[noreturn]] static void fail(const char* what) { Failure::fail(what); }

  size_t num_left() const { return bytes_.size(); }
  Bytes take(size_t count) {
    if (count > bytes_.size()) fail("it is cut short");
    const Bytes taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }

 private:
  Bytes bytes_;
};

struct RankFrameFailure {
  [[noreturn]] static void fail(const char* what) {
    throw DeviceError(concat("a frame of another rank: ", what));
  }
};
using WireReader = BasicWireReader<RankFrameFailure>;

}  // namespace llmserve
