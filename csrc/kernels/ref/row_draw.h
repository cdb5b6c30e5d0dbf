// What the sample op draws from, one row at a time.
#pragma once

#include <span>
#include <vector>

#include "kernels/ops.h"

namespace llmserve::ref {

// z [V]: the row's logits after its edits, less the largest, by the temperature, which is not 0;
// -inf where an edit or a filter takes the token out. False where a logit, raw or edited, is NaN or
// +inf, or none is finite.
bool kept_logits(std::span<const float> logits, const SampleRow& row, std::vector<float>& z);

}  // namespace llmserve::ref
