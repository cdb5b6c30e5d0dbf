// Chained 256-bit hashes of token blocks: equal hashes mean equal tokens from position 0 on, so
// that one hash names a block of KV together with everything before it. Source: FIPS 180-4
// (SHA-256). Never truncated: a 64-bit prefix hash has given one user another's context elsewhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace llmserve {

struct TokenHash {
  std::array<uint8_t, 32> bytes{};
  bool operator==(const TokenHash&) const = default;
};

// For hash tables only: the table compares all 256 bits.
struct TokenHashBucket {
  size_t operator()(const TokenHash& hash) const {
    size_t bucket = 0;
    std::memcpy(&bucket, hash.bytes.data(), sizeof(bucket));
    return bucket;
  }
};

class Sha256 {
 public:
  void update(std::span<const uint8_t> data);
  // The digest of all that was given; the object is spent.
  TokenHash finish();

 private:
  void compress(const uint8_t* block);

  std::array<uint32_t, 8> state_{0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                 0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
  std::array<uint8_t, 64> buffer_{};
  uint64_t num_bytes_ = 0;
};

// H_0's parent: a hash of the salt, so that chains of different salts never meet; and of whatever
// else, beside tokens, decides what a block holds, each by a digest of its own, in a fixed order
// (an adapter, a lossy tier). Without digests it is the salt's alone.
TokenHash root_hash(std::string_view salt, std::span<const TokenHash> digests = {});

// H_i = SHA256(H_{i-1} || the block's token ids, little-endian int32).
TokenHash chain_hash(const TokenHash& parent, std::span<const int32_t> token_ids);

// Lower-case hexadecimal, 64 characters.
std::string to_hex(const TokenHash& hash);

}  // namespace llmserve
