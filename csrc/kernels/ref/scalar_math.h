// The project's exp, log and noise, one number at a time.
#pragma once

#include <cstdint>

namespace llmserve::ref {

#include "core/math/scalar_lanes.inc"
// The functions are written in terms of the lanes.
#include "core/math/exp.inc"
#include "core/math/log.inc"
#include "core/math/noise.inc"

}  // namespace llmserve::ref
