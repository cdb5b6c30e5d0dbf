#include "models/config_fields.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "core/error.h"

namespace llmserve {
namespace {

// What spaces separate.
std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> result;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    result.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return result;
}

}  // namespace

JsonNode first_of(const JsonNode& json, std::initializer_list<std::string_view> spellings) {
  for (const std::string_view spelling : spellings) {
    const JsonNode node = json[spelling];
    if (!node.is_absent()) return node;
  }
  return json[*spellings.begin()];
}

Activation read_activation(const JsonNode& node, Activation fallback) {
  if (node.is_null()) return fallback;
  const std::string& wanted = node.as_string();
  std::string known;
  for (size_t i = 0; i < std::size(kActivations); ++i) {
    const std::vector<std::string_view> spellings = words(kActivations[i].spellings);
    if (std::ranges::find(spellings, wanted) != spellings.end()) return static_cast<Activation>(i);
    if (!spellings.empty()) known += concat(known.empty() ? "" : ", ", spellings.front());
  }
  throw NotSupported(
      concat(node.where(), ": activation ", node.describe(), " is not supported (", known, ")"));
}

NormSpec read_layer_norm(const JsonNode& eps) {
  return {.kind = NormKind::kLayer,
          .numbers = {.eps = static_cast<float>(eps.as_number_or(1e-5, 1e-12, 1.0))},
          .has_bias = true};
}

void require(const JsonNode& node, bool supported) {
  if (node.as_bool_or(supported) == supported) return;
  throw NotSupported(concat(node.where(), ": ", node.describe(), " is not supported, only ",
                            supported ? "true" : "false"));
}

}  // namespace llmserve
