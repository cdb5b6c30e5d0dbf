// The project's exp, log, noise, activations and norms, one number at a time.
#pragma once

#include <cstdint>

#include "kernels/op_numbers.h"

namespace llmserve::ref {

#include "core/math/scalar_lanes.inc"
// The functions are written in terms of the lanes.
#include "core/math/exp.inc"
#include "core/math/log.inc"
#include "core/math/noise.inc"
// What follows is made of them.
#include "kernels/activation_functions.inc"
#include "kernels/norm.inc"
#include "kernels/router.inc"

}  // namespace llmserve::ref
