// Fields of config.json that several architectures read alike.
#pragma once

#include <initializer_list>
#include <string_view>

#include "io/json.h"
#include "kernels/ops.h"
#include "layers/norm.h"

namespace llmserve {

// The first of the spellings that the object has, or the first.
JsonNode first_of(const JsonNode& json, std::initializer_list<std::string_view> spellings);
// Throws NotSupported, naming the field, what it says and what is supported.
Activation read_activation(const JsonNode& node, Activation fallback);
// A LayerNorm with a bias, by what the config says of its epsilon (1e-5 where it says nothing).
NormSpec read_layer_norm(const JsonNode& eps);
// Throws NotSupported, naming the field, unless it is absent, null or what it says is `supported`.
void require(const JsonNode& node, bool supported);

}  // namespace llmserve
