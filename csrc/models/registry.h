// The architectures that can be read: a row each.
#pragma once

#include <span>
#include <string_view>

#include "io/json.h"
#include "models/model_config.h"

namespace llmserve {

// A row of architectures.inc, which lists them.
struct ArchitectureRow {
  std::string_view name;        // as in config.json's "architectures"
  std::string_view model_type;  // as in config.json's "model_type"; used where there is no name
  std::string_view summary;
  // Fills in what this family spells or defaults in its own way.
  void (*configure)(const JsonNode& json, ModelConfig& config);
};
std::span<const ArchitectureRow> architecture_registry();
// Throws NotSupported that begins with `where` (file and field) and lists the names.
const ArchitectureRow& find_architecture(std::string_view name, std::string_view where);

}  // namespace llmserve
