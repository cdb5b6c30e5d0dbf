#include "text/vocabulary.h"

#include "core/error.h"

namespace llmserve {

Vocabulary::Vocabulary(const std::vector<std::string>& bytes_by_id,
                       std::span<const int32_t> special_token_ids)
    : is_special_(bytes_by_id.size(), false) {
  begins_.reserve(bytes_by_id.size() + 1);
  begins_.push_back(0);
  for (const std::string& bytes : bytes_by_id) {
    bytes_ += bytes;
    begins_.push_back(bytes_.size());
  }
  for (const int32_t id : special_token_ids) {
    if (id < 0 || id >= size()) {
      throw InvalidArgument(
          concat("special token id ", id, " is outside the vocabulary of ", size(), " tokens"));
    }
    is_special_[id] = true;
  }
}

std::vector<int32_t> Vocabulary::special_token_ids() const {
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < size(); ++id)
    if (is_special_[id]) ids.push_back(id);
  return ids;
}

}  // namespace llmserve
