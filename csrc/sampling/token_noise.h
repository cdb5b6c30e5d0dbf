// The noise that the sample op adds to one token's logit by the temperature: core/math/noise.inc.
#pragma once

#include <cstdint>

namespace llmserve {

float token_noise(uint64_t seed, int64_t position, int32_t token_id);

}  // namespace llmserve
