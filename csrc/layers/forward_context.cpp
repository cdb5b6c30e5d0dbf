#include "layers/forward_context.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"

namespace llmserve {

void check_groups(const ParallelGroups& groups) {
  const std::array named{std::pair("pp", &groups.pp), std::pair("ep", &groups.ep),
                         std::pair("cp", &groups.cp)};
  for (const auto& [name, group] : named) {
    if (group->world_size() == 1) continue;
    throw NotSupported(concat("group ", name, " has ", group->world_size(),
                              " ranks, and no layer of this model uses them; use one"));
  }
}

void check_plain(const ModelInput& input) {
  const auto is_given = [](int32_t index) { return index >= 0; };
  if (std::ranges::any_of(input.adapters, is_given))
    throw NotSupported("a sequence names an adapter, and this model has none");
  if (std::ranges::any_of(input.state_slots, is_given))
    throw NotSupported("a sequence has a slot for its state, and this model keeps none");
}

}  // namespace llmserve
