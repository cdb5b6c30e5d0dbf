// Mistral's own layout: params.json and consolidated.safetensors, with the names and the order of
// rotary rows of Meta's first Llama.
#pragma once

#include "io/checkpoint.h"

namespace llmserve {

bool is_mistral_format(const CheckpointDirectory& directory);
// Throws CorruptFile, NotSupported (what a dense decoder does not have).
Checkpoint open_mistral_format(const CheckpointDirectory& directory);

}  // namespace llmserve
