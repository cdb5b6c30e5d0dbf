// Folders of heads that draft. Beside what models come in they come as torch.save wrote them, and
// with names of their own.
#pragma once

#include <string>

#include "io/checkpoint.h"

namespace llmserve {

// A folder that has no safetensors but medusa_lm_head.pt or pytorch_model.bin is read from that,
// without running what it says. Tensors of a `speculators` folder of EAGLE have the names that
// EAGLE's authors give them. Throws what open_checkpoint and read_torch_file throw.
Checkpoint open_head_checkpoint(const std::string& path);

}  // namespace llmserve
