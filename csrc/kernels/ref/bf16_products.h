// Dot products of bf16 exactly as x86's instructions sum them, for the backends that use these:
// f32 multiply-adds that round to nearest, take subnormals as zero and return none (Intel SDM
// volume 2, VDPBF16PS and TDPBF16PS; a result that only just rounds up to normal aside).
#pragma once

#include <cstdint>
#include <string_view>

namespace llmserve {

enum class Bf16Products : uint8_t {
  kNone,   // of floats and bf16: activations are not rounded
  kPairs,  // one chain over K in pairs, the second of a pair first
  kTiles   // of each 32 K a chain of the even and one of the odd, their sum added to the total
};

// The cpu backend's under an instruction set of its registry.
Bf16Products bf16_products(std::string_view isa);

// VCVTNEPS2BF16: ties to even, subnormals to zero, NaN stays.
uint16_t round_to_bf16(float x);

float dot_bf16(Bf16Products how, const uint16_t* a, const uint16_t* b, int64_t k);  // not kNone

}  // namespace llmserve
