// What a layer needs to run, passed explicitly: no globals.
#pragma once

#include <span>

#include "core/arena.h"
#include "kernels/backend.h"
#include "layers/model_input.h"

namespace llmserve {

// References to what the engine owns; made anew every step.
struct ForwardContext {
  Backend& backend;
  Arena& arena;
  const ModelInput& input;
  std::span<const PagedKvCache> kv_caches;  // [layers]
};

}  // namespace llmserve
