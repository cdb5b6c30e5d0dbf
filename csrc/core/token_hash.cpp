#include "core/token_hash.h"

#include <algorithm>
#include <bit>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace llmserve {
namespace {

constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t load_big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 |
         uint32_t{bytes[3]};
}

void store_big_endian(uint32_t value, uint8_t* bytes) {
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<uint8_t>(value >> (24 - 8 * i));
}

#if defined(__x86_64__)
bool has_sha_instructions() {
  constexpr unsigned kSsse3 = 1u << 9, kSse41 = 1u << 19, kSha = 1u << 29;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kSsse3) == 0 || (c & kSse41) == 0) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & kSha) != 0;
}

// The instructions keep the state as (a, b, e, f) and (c, d, g, h), from the highest lane down, and
// run two rounds each; the one that has run them first becomes the other. Intel SDM, volume 2,
// SHA256RNDS2.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_quickly(std::array<uint32_t, 8>& state,
                                                                  const uint8_t* block) {
  const auto lane = [&](int i) __attribute__((target("sha,sse4.1,ssse3"))) {
    return static_cast<int>(state[static_cast<size_t>(i)]);
  };
  __m128i abef = _mm_set_epi32(lane(0), lane(1), lane(4), lane(5));
  __m128i cdgh = _mm_set_epi32(lane(2), lane(3), lane(6), lane(7));
  const __m128i abef_before = abef, cdgh_before = cdgh;
  const __m128i big_endian = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
  __m128i w[4];  // the next 16 words of the schedule
  for (int i = 0; i < 4; ++i)
    w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * i)),
                            big_endian);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const __m128i sum = _mm_add_epi32(
        w[i % 4],
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(kRoundConstants.data() + 4 * i)));
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    if (i >= 12) continue;
    const __m128i newest = w[(i + 3) % 4];
    const __m128i seven_before = _mm_alignr_epi8(newest, w[(i + 2) % 4], 4);
    w[i % 4] = _mm_sha256msg2_epu32(
        _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), seven_before), newest);
  }
  alignas(16) std::array<uint32_t, 4> high, low;
  _mm_store_si128(reinterpret_cast<__m128i*>(high.data()), _mm_add_epi32(abef, abef_before));
  _mm_store_si128(reinterpret_cast<__m128i*>(low.data()), _mm_add_epi32(cdgh, cdgh_before));
  state = {high[3], high[2], low[3], low[2], high[1], high[0], low[1], low[0]};
}
#endif

}  // namespace

void Sha256::compress(const uint8_t* block) {
#if defined(__x86_64__)
  static const bool is_quick = has_sha_instructions();
  if (is_quick) return compress_quickly(state_, block);
#endif
  std::array<uint32_t, 64> w;
  for (int t = 0; t < 16; ++t) w[t] = load_big_endian(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int t = 0; t < 64; ++t) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRoundConstants[t] + w[t];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<uint32_t, 8> rounds = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state_[i] += rounds[i];
}

void Sha256::update(std::span<const uint8_t> data) {
  size_t used = num_bytes_ % 64;
  num_bytes_ += data.size();
  while (!data.empty()) {
    if (used == 0 && data.size() >= 64) {
      compress(data.data());
      data = data.subspan(64);
      continue;
    }
    const size_t count = std::min(data.size(), 64 - used);
    std::copy_n(data.begin(), count, buffer_.begin() + used);
    data = data.subspan(count);
    used += count;
    if (used < 64) return;
    compress(buffer_.data());
    used = 0;
  }
}

TokenHash Sha256::finish() {
  const uint64_t num_bits = num_bytes_ * 8;
  const std::array<uint8_t, 64> padding = {0x80};
  const size_t used = num_bytes_ % 64;
  update({padding.data(), (used < 56 ? 56 : 120) - used});
  std::array<uint8_t, 8> length;
  store_big_endian(static_cast<uint32_t>(num_bits >> 32), length.data());
  store_big_endian(static_cast<uint32_t>(num_bits), length.data() + 4);
  update(length);
  TokenHash digest;
  for (int i = 0; i < 8; ++i) store_big_endian(state_[i], digest.bytes.data() + 4 * i);
  return digest;
}

TokenHash root_hash(std::string_view salt, std::span<const TokenHash> digests) {
  // The prefix keeps roots apart from chained hashes, whose input starts with a digest.
  const auto hash_of = [](std::string_view domain, std::span<const uint8_t> data) {
    Sha256 sha;
    sha.update({reinterpret_cast<const uint8_t*>(domain.data()), domain.size()});
    sha.update(data);
    return sha.finish();
  };
  TokenHash root = hash_of("llmserve prefix cache salt:",
                           {reinterpret_cast<const uint8_t*>(salt.data()), salt.size()});
  for (const TokenHash& digest : digests) {
    std::array<uint8_t, 2 * sizeof(TokenHash)> pair;
    std::ranges::copy(root.bytes, pair.begin());
    std::ranges::copy(digest.bytes, pair.begin() + sizeof(TokenHash));
    root = hash_of("llmserve prefix cache digest:", pair);
  }
  return root;
}

TokenHash chain_hash(const TokenHash& parent, std::span<const int32_t> token_ids) {
  Sha256 sha;
  sha.update(parent.bytes);
  if constexpr (std::endian::native == std::endian::little) {
    sha.update({reinterpret_cast<const uint8_t*>(token_ids.data()), token_ids.size_bytes()});
  } else {
    for (const int32_t id : token_ids) {
      const uint32_t bits = static_cast<uint32_t>(id);
      const std::array<uint8_t, 4> bytes = {
          static_cast<uint8_t>(bits), static_cast<uint8_t>(bits >> 8),
          static_cast<uint8_t>(bits >> 16), static_cast<uint8_t>(bits >> 24)};
      sha.update(bytes);
    }
  }
  return sha.finish();
}

std::string to_hex(const TokenHash& hash) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  for (const uint8_t byte : hash.bytes) {
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

}  // namespace llmserve
