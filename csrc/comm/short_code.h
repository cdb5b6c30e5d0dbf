// A quick code of who has written a message, for the many that ranks exchange in a step:
// SipHash-2-4 with 128 bits, about a cycle and a half a byte where HMAC-SHA-256 takes ten. Its key
// is of one connection and direction. Source: Aumasson and Bernstein, SipHash: a fast short-input
// PRF, 2012.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "comm/message_code.h"

namespace llmserve {

using ShortKey = std::array<std::byte, 16>;
using ShortCode = std::array<std::byte, 16>;

// The code of the parts one after the other. All parts but the last have a multiple of 8 bytes.
ShortCode short_code(const ShortKey& key, std::initializer_list<Bytes> parts);

}  // namespace llmserve
