// Draws by the rejection rule, where speculation is to be exact in distribution and not in bits:
// Leviathan, Kalman, Matias 2023 (arXiv 2211.17192), section 2.3. A guess x that was drawn from q
// stands with probability min(1, p(x) / q(x)); else the token comes from max(0, p - q), scaled to
// 1. The noise of each kind of draw is independent of all other, and a function of seed and
// position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops.h"

namespace llmserve {

// The last word of Philox's counter; the draws of the sample op have 0 there.
enum class DrawStream : uint32_t { kGuess = 1, kAccept = 2, kResidual = 3 };

// What the row's token is drawn from: of logits [V] in host memory, after the row's edits, filters
// and temperature, which is not 0. probabilities [V] sum to 1. False, and nothing of use in them,
// where a logit is NaN or +inf or none is left.
bool fill_probabilities(std::span<const float> logits, const SampleRow& row,
                        std::vector<float>& probabilities);

// A token of them, with the position's noise of that kind.
int32_t draw_from(std::span<const float> probabilities, uint64_t seed, int64_t position,
                  DrawStream stream);

// The token after a guess: the guess itself, if it stands. target [V]; guess_probabilities [V] that
// the guess was drawn from, or empty: it was certain, as what is found in a text is.
int32_t draw_after_guess(std::span<const float> target, int32_t guess,
                         std::span<const float> guess_probabilities, uint64_t seed,
                         int64_t position);

}  // namespace llmserve
