// The safetensors format, version 0.x of huggingface/safetensors: 8 bytes of header length, a JSON
// header, the tensors' bytes. One file (model.safetensors) or shards listed by
// model.safetensors.index.json.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/checkpoint.h"

namespace llmserve {

bool is_safetensors(const CheckpointDirectory& directory);
Checkpoint open_safetensors(const CheckpointDirectory& directory);

// The tensors of the files together. Checks everything that a reader relies on: lengths, that
// tensors tile the data without overlap, hole or overrun, that dtype and shape give each one's
// bytes. Throws CorruptFile or, for element types that no layer reads, NotSupported.
std::vector<TensorEntry> read_safetensors_headers(
    std::span<const std::shared_ptr<const MappedFile>> files);

// "__metadata__", in the file's order. Throws CorruptFile.
std::vector<std::pair<std::string, std::string>> read_safetensors_metadata(const MappedFile& file);

}  // namespace llmserve
