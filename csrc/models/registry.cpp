// The table of architectures.inc, to look up in.
#include "models/registry.h"

#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/near_names.h"
#include "io/refused_families.h"
#include "io/text_part.h"
#include "models/architectures.h"

namespace llmserve {
namespace {

constexpr ArchitectureRow kArchitectures[] = {
#define LLMSERVE_ARCHITECTURE(name, model_type, summary, configure) \
  {name, model_type, summary, &(configure)},
#include "models/architectures.inc"
};

}  // namespace

std::span<const ArchitectureRow> architecture_registry() { return kArchitectures; }

const ArchitectureRow& find_architecture(std::string_view name, std::string_view where) {
  std::vector<std::string_view> known;
  for (const ArchitectureRow& row : kArchitectures) {
    if (row.name == name) return row;
    known.push_back(row.name);
  }
  if (const std::string_view reason = refused_family(name); !reason.empty())
    throw NotSupported(concat(where, ": architecture \"", name, "\" is not supported: ", reason));
  for (const WrapperRow& row : wrapper_registry()) known.push_back(row.name);
  const std::string near = near_names(name, known);
  throw NotSupported(concat(where, ": architecture \"", name.substr(0, 80), "\" is not supported; ",
                            near.empty() ? "" : "near it are " + near + "; ",
                            "docs/support-matrix.md has all ", known.size(), " that are"));
}

}  // namespace llmserve
