// Who has written a message: HMAC-SHA-256. Source: RFC 2104, FIPS 180-4.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "core/token_hash.h"

namespace llmserve {

using Bytes = std::span<const std::byte>;

// The code of the parts one after the other, under a key of any length.
TokenHash message_code(Bytes key, std::initializer_list<Bytes> parts);

// In a time that does not depend on where they differ.
bool are_equal(const TokenHash& a, const TokenHash& b);

// Of the system, not to be foreseen. Throws DeviceError.
void fill_random(std::span<std::byte> bytes);

inline Bytes bytes_of(const TokenHash& hash) { return std::as_bytes(std::span(hash.bytes)); }

}  // namespace llmserve
