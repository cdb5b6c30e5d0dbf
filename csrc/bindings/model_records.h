// Plain data about checkpoints and models, as Python dicts: for inspection and tests.
#pragma once

#include <pybind11/pybind11.h>

#include "io/checkpoint.h"
#include "models/model.h"

namespace llmserve {

pybind11::dict to_dict(const ModelConfig& config);
// What a layer is made of: the full names of its weights' tensors without ".weight", None for parts
// that it lacks, and what its norms do.
pybind11::dict layer_names(const ModelConfig& config, int64_t layer_idx);
pybind11::dict to_dict(const WeightReport& weights);
pybind11::list tensor_list(const Checkpoint& checkpoint);

}  // namespace llmserve
