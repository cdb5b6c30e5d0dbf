// Files of torch.save: a zip file of plain records, of which one describes the tensors
// (io/torch_pickle.h) and the others hold their values, which are read in place.
#pragma once

#include <memory>
#include <vector>

#include "io/checkpoint.h"
#include "io/mapped_file.h"

namespace llmserve {

// The tensors of the dictionary that it holds, as those of a Checkpoint's first file. Nothing that
// it says is run. Throws CorruptFile, and NotSupported for what else torch.save can write.
std::vector<TensorEntry> read_torch_file(const MappedFile& file);

}  // namespace llmserve
