#include "io/tensor_renaming.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string rename_stem(const RenamingRow& row, std::string_view stem) {
  const size_t hole = row.from.find("{}");
  if (hole == row.from.npos) return stem == row.from ? std::string(row.to) : std::string();
  const std::string_view before = row.from.substr(0, hole);
  const std::string_view after = row.from.substr(hole + 2);
  if (!stem.starts_with(before) || !stem.ends_with(after) ||
      stem.size() <= before.size() + after.size())
    return "";
  const std::string_view layer =
      stem.substr(before.size(), stem.size() - before.size() - after.size());
  if (!std::all_of(layer.begin(), layer.end(), is_digit)) return "";
  const size_t at = row.to.find("{}");
  return concat(row.to.substr(0, at), layer, row.to.substr(at + 2));
}

}  // namespace

std::string rename_tensor(std::span<const RenamingRow> rows, std::string_view name) {
  const size_t dot = name.rfind('.');
  if (dot == name.npos) return "";
  for (const RenamingRow& row : rows) {
    const std::string renamed = rename_stem(row, name.substr(0, dot));
    if (!renamed.empty()) return concat(renamed, name.substr(dot));
  }
  return "";
}

}  // namespace llmserve
