#include "comm/short_code.h"

#include <bit>
#include <cstring>

#include "core/error.h"

namespace llmserve {
namespace {

uint64_t load(const std::byte* bytes, size_t count) {
  uint64_t value = 0;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&value, bytes, count);
  } else {
    for (size_t i = count; i-- > 0;) value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
  }
  return value;
}

struct State {
  uint64_t v0, v1, v2, v3;

  void round() {
    v0 += v1;
    v2 += v3;
    v1 = std::rotl(v1, 13) ^ v0;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 = std::rotl(v0, 32);
    v2 += v1;
    v0 += v3;
    v1 = std::rotl(v1, 17) ^ v2;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 = std::rotl(v2, 32);
  }
  void take(uint64_t word) {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  }
  uint64_t finish() {
    for (int i = 0; i < 4; ++i) round();
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

}  // namespace

ShortCode short_code(const ShortKey& key, std::initializer_list<Bytes> parts) {
  const uint64_t k0 = load(key.data(), 8);
  const uint64_t k1 = load(key.data() + 8, 8);
  State state{.v0 = k0 ^ 0x736f6d6570736575u,
              .v1 = k1 ^ 0x646f72616e646f6du ^ 0xee,
              .v2 = k0 ^ 0x6c7967656e657261u,
              .v3 = k1 ^ 0x7465646279746573u};
  uint64_t num_bytes = 0;
  uint64_t last = 0;
  for (const Bytes part : parts) {
    check_internal(num_bytes % 8 == 0, "only the last part of a message has an odd length");
    const size_t whole = part.size() / 8 * 8;
    for (size_t i = 0; i < whole; i += 8) state.take(load(part.data() + i, 8));
    if (whole < part.size()) last = load(part.data() + whole, part.size() - whole);
    num_bytes += part.size();
  }
  state.take(num_bytes << 56 | last);
  state.v2 ^= 0xee;
  const uint64_t low = state.finish();
  state.v1 ^= 0xdd;
  const uint64_t high = state.finish();
  ShortCode code;
  for (size_t i = 0; i < 8; ++i) {
    code[i] = static_cast<std::byte>(low >> (8 * i));
    code[8 + i] = static_cast<std::byte>(high >> (8 * i));
  }
  return code;
}

}  // namespace llmserve
