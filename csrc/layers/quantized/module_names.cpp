#include "layers/quantized/module_names.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {

std::vector<std::string> names_of_module(std::string_view module) {
  std::vector<std::string> names{std::string(module)};
  constexpr std::string_view kModel = "model.";
  if (module.starts_with(kModel)) {
    const std::string rest(module.substr(kModel.size()));
    names.push_back(concat("language_model.model.", rest));
    names.push_back(concat("model.language_model.", rest));
    names.push_back(concat("model.text_model.", rest));
    names.push_back(rest);
  } else {
    names.push_back(concat("language_model.", module));
  }
  return names;
}

ModuleNames::ModuleNames(const JsonNode& list, NameStyle style) : style_(style) {
  if (list.is_null()) return;
  for (const JsonNode& node : list.as_array()) {
    if (entries_.size() >= kMaxNames) list.fail(concat("expected at most ", kMaxNames, " names"));
    entries_.push_back({node.as_string(), node.where()});
    texts_.insert(node.as_string());
  }
}

bool ModuleNames::matches(const Entry& entry, const std::string& name) const {
  constexpr std::string_view kRe = "re:";
  if (style_ == NameStyle::kSubstring) return name.find(entry.text) != name.npos;
  const bool is_pattern = style_ == NameStyle::kGlob || entry.text.starts_with(kRe);
  if (!is_pattern) {
    // compressed-tensors names classes: every weight that is asked for here is a "Linear".
    return entry.text == name || entry.text == "Linear";
  }
  const auto idx = static_cast<size_t>(&entry - entries_.data());
  auto known = std::ranges::find(patterns_, idx, &std::pair<size_t, NamePattern>::first);
  if (known == patterns_.end()) {
    patterns_.emplace_back(idx, style_ == NameStyle::kGlob
                                    ? NamePattern::glob(entry.text, entry.where)
                                    : NamePattern(entry.text.substr(kRe.size()), entry.where));
    known = patterns_.end() - 1;
  }
  return known->second.matches_beginning(name);
}

bool ModuleNames::names(std::string_view module) const {
  if (entries_.empty()) return false;
  return std::ranges::any_of(names_of_module(module),
                             [&](const std::string& name) { return texts_.contains(name); });
}

bool ModuleNames::contain(std::string_view module) const {
  if (entries_.empty()) return false;
  const std::vector<std::string> names = names_of_module(module);
  return std::ranges::any_of(entries_, [&](const Entry& entry) {
    return std::ranges::any_of(names,
                               [&](const std::string& name) { return matches(entry, name); });
  });
}

}  // namespace llmserve
