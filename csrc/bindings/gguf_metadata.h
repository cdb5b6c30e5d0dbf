#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace llmserve {

// The metadata of a GGUF file whose keys begin with `prefix`: int, float, bool, str, a list of
// them, or bytes for an array of 8-bit integers. Nested arrays are left out. Throws CorruptFile
// (text that is not UTF-8), and what reading the file throws.
pybind11::dict read_gguf_metadata(const std::string& path, const std::string& prefix);

}  // namespace llmserve
