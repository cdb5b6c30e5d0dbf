// Plain data about checkpoints and models, as Python dicts: for inspection and tests.
#pragma once

#include <pybind11/pybind11.h>

#include "io/checkpoint.h"
#include "models/model.h"

namespace llmserve {

pybind11::dict to_dict(const ModelConfig& config);
pybind11::dict to_dict(const WeightReport& weights);
pybind11::list tensor_list(const Checkpoint& checkpoint);

}  // namespace llmserve
