#include "speculation/registry.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/error.h"
#include "speculation/head_drafter.h"
#include "speculation/model_drafter.h"
#include "speculation/ngram_drafter.h"
#include "speculation/suffix_drafter.h"

namespace llmserve {
namespace {

std::unique_ptr<Drafter> make_head_drafter(const DrafterContext& context) {
  check_internal(context.head != nullptr, "a head was loaded");
  return std::make_unique<HeadDrafter>(*context.head, context.config.sampling());
}

constexpr std::array kKinds{
    DrafterKind{"ngram", "what followed the newest tokens where they stood before",
                DraftSource::kText,
                [](const DrafterContext& context) -> std::unique_ptr<Drafter> {
                  return std::make_unique<NgramDrafter>(context.config.prompt_lookup_min,
                                                        context.config.prompt_lookup_max);
                }},
    DrafterKind{"suffix", "what followed the newest tokens in this text or in finished ones",
                DraftSource::kText,
                [](const DrafterContext& context) -> std::unique_ptr<Drafter> {
                  return std::make_unique<SuffixDrafter>(context.config);
                }},
    DrafterKind{"draft_model", "a smaller model of the same vocabulary", DraftSource::kModel,
                [](const DrafterContext& context) -> std::unique_ptr<Drafter> {
                  check_internal(context.model != nullptr, "a draft model was loaded");
                  return std::make_unique<ModelDrafter>(*context.model, context.config.sampling(),
                                                        context.vocabulary_map);
                }},
    DrafterKind{"eagle3", "a head on hidden states of three layers", DraftSource::kHead,
                &make_head_drafter},
    DrafterKind{"eagle", "a head on the final hidden state, which goes on in its own guess of it",
                DraftSource::kHead, &make_head_drafter},
    DrafterKind{"medusa", "heads on the final hidden state, one for each of the next tokens",
                DraftSource::kHead, &make_head_drafter},
    DrafterKind{"mtp", "a layer behind the model's own, in its file", DraftSource::kOwn,
                &make_head_drafter},
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
