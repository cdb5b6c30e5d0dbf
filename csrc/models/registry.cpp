// The architectures that this build runs.
#include <array>
#include <sstream>

#include "core/error.h"
#include "models/architectures.h"
#include "models/decoder.h"
#include "models/model.h"

namespace llmserve {
namespace {

constexpr std::array<ArchitectureRow, 4> kArchitectures{{
    {"LlamaForCausalLM", "llama", "Llama 1, 2, 3.x and models of the same layout", &configure_llama,
     &build_decoder},
    {"MistralForCausalLM", "mistral", "Mistral 7B and kin, with sliding window", &configure_mistral,
     &build_decoder},
    {"Qwen2ForCausalLM", "qwen2", "Qwen2 and Qwen2.5, dense", &configure_qwen2, &build_decoder},
    {"Qwen3ForCausalLM", "qwen3", "Qwen3, dense", &configure_qwen3, &build_decoder},
}};

}  // namespace

std::span<const ArchitectureRow> architecture_registry() { return kArchitectures; }

const ArchitectureRow& find_architecture(std::string_view name, std::string_view where) {
  std::ostringstream known;
  for (const ArchitectureRow& row : kArchitectures) {
    if (row.name == name) return row;
    known << (known.tellp() > 0 ? ", " : "") << row.name;
  }
  throw NotSupported(concat(where, ": architecture \"", name.substr(0, 80),
                            "\" is not supported; supported are ", known.str()));
}

}  // namespace llmserve
