// What torch.save wrote of a dictionary of tensors, read without running anything: a machine for
// the few opcodes that describe one, which knows tensors and dictionaries and calls nothing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace llmserve {

struct PickledTensor {
  std::string name;     // its key
  std::string storage;  // the record that holds its values
  DType dtype = DType::kF32;
  int64_t storage_elements = 0;
  int64_t offset = 0;  // of the first, in elements
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
};

// Every tensor of the dictionary. `where` names the file, for messages. Throws CorruptFile for what
// is no pickle or breaks off, NotSupported for one of anything else than tensors by name: it says
// what. Format: Python's pickletools, protocols 2 to 4; torch/serialization.py.
std::vector<PickledTensor> read_pickled_tensors(std::span<const std::byte> pickle,
                                                const std::string& where);

}  // namespace llmserve
