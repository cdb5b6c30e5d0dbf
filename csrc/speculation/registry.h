// The drafters, in one table.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "api/speculation_config.h"
#include "speculation/draft_model.h"
#include "speculation/drafter.h"
#include "speculation/vocabulary_map.h"

namespace llmserve {

struct DrafterContext {
  const SpeculationConfig& config;
  int64_t vocab_size = 0;       // the target's
  int64_t max_exact_rows = 0;   // as Executor has it
  DraftModel* model = nullptr;  // of drafters that need one; outlives the drafter
  std::shared_ptr<const VocabularyMap> vocabulary_map = nullptr;  // of a model with another one
};

struct DrafterKind {
  std::string_view name;
  std::string_view help;  // a line
  bool needs_model = false;
  std::unique_ptr<Drafter> (*make)(const DrafterContext& context) = nullptr;
};

std::span<const DrafterKind> drafter_kinds();
// Throws NotSupported that lists the names.
const DrafterKind& find_drafter(std::string_view name);

}  // namespace llmserve
