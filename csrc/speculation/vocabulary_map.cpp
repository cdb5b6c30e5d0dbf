#include "speculation/vocabulary_map.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "core/error.h"

namespace llmserve {
namespace {

// Where fewer of the draft's tokens are the target's, too, hardly a guess could be right.
constexpr double kLeastShared = 0.05;

using ByBytes = std::unordered_map<std::string_view, int32_t>;

// The ids of a vocabulary's tokens by their bytes, special ones apart. Of several the last counts:
// vocabularies that have tokens of single bytes have these first, and use the others.
ByBytes by_bytes(const Vocabulary& vocabulary, int64_t size, bool is_special) {
  ByBytes ids;
  const auto end = static_cast<int32_t>(std::min<int64_t>(size, vocabulary.size()));
  for (int32_t id = 0; id < end; ++id) {
    const std::string_view bytes = vocabulary.bytes(id);
    if (!bytes.empty() && vocabulary.is_special(id) == is_special) ids[bytes] = id;
  }
  return ids;
}

// Appends the longest tokens that the bytes are made of, from the first on.
void split(std::string_view bytes, const ByBytes& tokens, size_t longest,
           std::vector<int32_t>& ids) {
  while (!bytes.empty()) {
    size_t size = std::min(longest, bytes.size());
    auto found = tokens.find(bytes.substr(0, size));
    while (found == tokens.end() && size > 1) found = tokens.find(bytes.substr(0, --size));
    if (found != tokens.end()) ids.push_back(found->second);
    bytes.remove_prefix(size);
  }
}

}  // namespace

VocabularyMap::VocabularyMap(const Vocabulary& target, int64_t target_size, const Vocabulary& draft,
                             int64_t draft_size)
    : targets_(static_cast<size_t>(draft_size), -1) {
  size_t longest = 1;
  const ByBytes plain = by_bytes(draft, draft_size, false);
  const ByBytes special = by_bytes(draft, draft_size, true);
  for (const auto& [bytes, id] : plain) longest = std::max(longest, bytes.size());
  begins_.reserve(static_cast<size_t>(target_size) + 1);
  begins_.push_back(0);
  for (int32_t id = 0; id < target_size; ++id) {
    const std::string_view bytes = target.bytes(id);
    const ByBytes& same_kind = target.is_special(id) ? special : plain;
    const auto twin = bytes.empty() ? same_kind.end() : same_kind.find(bytes);
    if (twin != same_kind.end()) {
      draft_ids_.push_back(twin->second);
      targets_[static_cast<size_t>(twin->second)] = id;  // of several the last
    } else if (!target.is_special(id)) {
      split(bytes, plain, longest, draft_ids_);
    }
    begins_.push_back(draft_ids_.size());
  }
  for (int32_t id = 0; id < draft_size; ++id)
    if (targets_[static_cast<size_t>(id)] >= 0) shared_.push_back(id);
  if (static_cast<double>(shared_.size()) < kLeastShared * static_cast<double>(draft_size))
    throw InvalidArgument(concat("speculative_config: use_heterogeneous_vocab: only ",
                                 shared_.size(), " of the draft model's ", draft_size,
                                 " tokens are tokens of the target, too; use a draft whose "
                                 "vocabulary is closer"));
}

std::span<const int32_t> VocabularyMap::to_draft(int32_t target_id) const {
  if (target_id < 0 || static_cast<size_t>(target_id) + 1 >= begins_.size()) return {};
  const auto id = static_cast<size_t>(target_id);
  return std::span(draft_ids_).subspan(begins_[id], begins_[id + 1] - begins_[id]);
}

std::shared_ptr<const VocabularyMap> map_vocabularies(const SpeculationConfig& config,
                                                      const std::optional<Vocabulary>& target,
                                                      int64_t target_size,
                                                      const std::optional<Vocabulary>& draft,
                                                      const DraftModel* model) {
  if (!config.has_heterogeneous_vocab || model == nullptr) return nullptr;
  if (!target || !draft)
    throw InvalidArgument(
        concat("speculative_config: use_heterogeneous_vocab maps tokens by their text, and the ",
               target ? "draft model" : "target", " has no tokenizer here"));
  return std::make_shared<const VocabularyMap>(*target, target_size, *draft, model->vocab_size());
}

}  // namespace llmserve
