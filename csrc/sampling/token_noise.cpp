#include "sampling/token_noise.h"

#include "kernels/ref/scalar_math.h"

namespace llmserve {

float token_noise(uint64_t seed, int64_t position, int32_t token_id) {
  uint32_t bits[4];
  ref::u_token_bits(static_cast<uint32_t>(token_id) / 4, position, seed, bits);
  return ref::v_gumbel(bits[token_id % 4]);
}

}  // namespace llmserve
