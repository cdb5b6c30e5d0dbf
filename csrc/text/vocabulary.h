// The decoder table of a tokenizer: id -> bytes. Byte-level, Metaspace and WordPiece vocabularies
// all become it before they come here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmserve {

class Vocabulary {
 public:
  // bytes_by_id[i] is the text of token i as bytes, not necessarily whole characters. Throws
  // InvalidArgument for a special id outside it.
  Vocabulary(const std::vector<std::string>& bytes_by_id,
             std::span<const int32_t> special_token_ids);

  // Empty for ids past the table: models pad their vocabulary.
  std::string_view bytes(int32_t id) const {
    if (id < 0 || id >= size()) return {};
    return {bytes_.data() + begins_[id], begins_[id + 1] - begins_[id]};
  }
  bool is_special(int32_t id) const { return id >= 0 && id < size() && is_special_[id]; }
  std::vector<int32_t> special_token_ids() const;  // increasing
  int32_t size() const { return static_cast<int32_t>(is_special_.size()); }

 private:
  std::string bytes_;           // all tokens, one after another
  std::vector<size_t> begins_;  // [size + 1] into bytes_
  std::vector<bool> is_special_;
};

}  // namespace llmserve
