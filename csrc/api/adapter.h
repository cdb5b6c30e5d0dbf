// Weights that are added to a model's for the requests that name them (LoRA, Hu et al. 2021).
#pragma once

#include <cstdint>
#include <string>

#include "core/token_hash.h"

namespace llmserve {

// Which adapter a request runs with. Whoever keeps the loaded adapters resolves the name.
struct AdapterRef {
  std::string name;
  int32_t index = -1;  // among the loaded ones
  // Of its weights and scales: what the prefix cache tells adapters apart by. A name that is given
  // to other weights later finds nothing that was computed with the first ones.
  TokenHash digest;
};

}  // namespace llmserve
