#include "speculation/registry.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/error.h"
#include "speculation/model_drafter.h"
#include "speculation/ngram_drafter.h"
#include "speculation/suffix_drafter.h"

namespace llmserve {
namespace {

constexpr std::array kKinds{
    DrafterKind{"ngram", "what followed the newest tokens where they stood before", false,
                [](const DrafterContext& context) -> std::unique_ptr<Drafter> {
                  return std::make_unique<NgramDrafter>(context.config.prompt_lookup_min,
                                                        context.config.prompt_lookup_max);
                }},
    DrafterKind{"suffix", "what followed the newest tokens in this text or in finished ones", false,
                [](const DrafterContext& context) -> std::unique_ptr<Drafter> {
                  return std::make_unique<SuffixDrafter>(context.config);
                }},
    DrafterKind{"draft_model", "a smaller model of the same vocabulary", true,
                [](const DrafterContext& context) -> std::unique_ptr<Drafter> {
                  check_internal(context.model != nullptr, "a draft model was loaded");
                  return std::make_unique<ModelDrafter>(*context.model, context.config.sampling(),
                                                        context.vocabulary_map);
                }},
};

}  // namespace

std::span<const DrafterKind> drafter_kinds() { return kKinds; }

const DrafterKind& find_drafter(std::string_view name) {
  const auto found = std::ranges::find(kKinds, name, &DrafterKind::name);
  if (found != kKinds.end()) return *found;
  std::string known;
  for (const DrafterKind& kind : kKinds) known += concat(known.empty() ? "" : ", ", kind.name);
  throw NotSupported(concat("speculative_config: method \"", name.substr(0, 80),
                            "\" is not supported (", known, ")"));
}

}  // namespace llmserve
