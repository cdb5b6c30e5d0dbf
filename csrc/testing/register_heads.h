// Called by register_testing_speculation().
#pragma once

#include <pybind11/pybind11.h>

namespace llmserve {

void register_testing_heads(pybind11::module_& testing);

}  // namespace llmserve
