// What the lanes of a warp do as one.
#pragma once

namespace llmserve::cuda::emulator {

// Once a warp, when the last of its lanes has come: lanes[l] is what lane l gave as `mine`.
void act_together(void* mine, void (*act)(void* const* lanes));

}  // namespace llmserve::cuda::emulator
