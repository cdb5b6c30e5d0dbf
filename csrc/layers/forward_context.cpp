#include "layers/forward_context.h"

#include <array>
#include <utility>

#include "core/error.h"

namespace llmserve {

void check_whole(const ParallelGroups& groups) {
  const std::array named{std::pair("tp", &groups.tp), std::pair("pp", &groups.pp),
                         std::pair("ep", &groups.ep), std::pair("cp", &groups.cp)};
  for (const auto& [name, group] : named) {
    if (group->world_size() == 1) continue;
    throw NotSupported(concat("group ", name, " has ", group->world_size(),
                              " ranks, and this model is not cut among ranks; use one"));
  }
}

}  // namespace llmserve
