// The drafters, in one table.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "api/speculation_config.h"
#include "speculation/draft_model.h"
#include "speculation/drafter.h"
#include "speculation/head_model.h"
#include "speculation/vocabulary_map.h"

namespace llmserve {

struct DrafterContext {
  const SpeculationConfig& config;
  int64_t vocab_size = 0;       // the target's
  int64_t max_exact_rows = 0;   // as Executor has it
  DraftModel* model = nullptr;  // of drafters that need one; outlives the drafter
  HeadModel* head = nullptr;    // likewise
  std::shared_ptr<const VocabularyMap> vocabulary_map = nullptr;  // of a model with another one
};

// What guesses.
enum class DraftSource : uint8_t {
  kText,   // nothing but tokens
  kModel,  // a smaller model
  kHead,   // a head on the target's hidden states, in a folder of its own
  kOwn     // likewise, in the target's own file
};

struct DrafterKind {
  std::string_view name;
  std::string_view help;  // a line
  DraftSource source = DraftSource::kText;
  std::unique_ptr<Drafter> (*make)(const DrafterContext& context) = nullptr;

  // SpeculationConfig::model names what guesses.
  bool needs_model() const { return source == DraftSource::kModel || source == DraftSource::kHead; }
  bool has_head() const { return source == DraftSource::kHead || source == DraftSource::kOwn; }
  bool has_weights() const { return source != DraftSource::kText; }
};

std::span<const DrafterKind> drafter_kinds();
// Throws NotSupported that lists the names.
const DrafterKind& find_drafter(std::string_view name);

}  // namespace llmserve
