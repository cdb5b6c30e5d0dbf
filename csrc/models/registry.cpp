// The table of architectures.inc, to look up in.
#include "models/registry.h"

#include <sstream>

#include "core/error.h"
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
  std::ostringstream known;
  for (const ArchitectureRow& row : kArchitectures) {
    if (row.name == name) return row;
    known << (known.tellp() > 0 ? ", " : "") << row.name;
  }
  known << ", and the text parts of ";
  for (const WrapperRow& row : wrapper_registry())
    known << (&row == &wrapper_registry().front() ? "" : ", ") << row.name;
  throw NotSupported(concat(where, ": architecture \"", name.substr(0, 80),
                            "\" is not supported; supported are ", known.str()));
}

}  // namespace llmserve
