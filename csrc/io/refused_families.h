// Families that stand near those that run, and what they have that no layer here does.
#pragma once

#include <string_view>

namespace llmserve {

// By a name of config.json's "architectures", by the model_type of a config within another, or by
// general.architecture of a GGUF file. Empty: nothing is known of it.
std::string_view refused_family(std::string_view name);

}  // namespace llmserve
