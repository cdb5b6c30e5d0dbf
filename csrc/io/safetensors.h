// The safetensors format, version 0.x of huggingface/safetensors: 8 bytes of header length, a JSON
// header, the tensors' bytes. One file (model.safetensors) or shards listed by
// model.safetensors.index.json.
#pragma once

#include <memory>
#include <vector>

#include "io/checkpoint.h"

namespace llmserve {

bool is_safetensors(const CheckpointDirectory& directory);
Checkpoint open_safetensors(const CheckpointDirectory& directory);

}  // namespace llmserve
