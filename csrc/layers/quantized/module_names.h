// Which modules a configuration means by the names and patterns that it lists.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "io/json.h"
#include "io/name_pattern.h"

namespace llmserve {

// A module by all its names: llmserve's, and those of the wrappers that a text model stands in.
std::vector<std::string> names_of_module(std::string_view module);

// How an entry of a list is to be read.
enum class NameStyle : uint8_t {
  kSubstring,  // AWQ, FP8, bitsandbytes: a part of the name, between dots or not
  kExactOrRe,  // compressed-tensors: a name, the class of a layer, or "re:" and a pattern
  kGlob,       // ModelOpt: * for any text
};

// A list of names. Patterns are read when a module is first compared: what they lack matters to
// who needs them alone.
class ModuleNames {
 public:
  static constexpr size_t kMaxNames = 65536;

  // Throws CorruptFile unless the node is absent, null or a list of texts.
  ModuleNames(const JsonNode& list, NameStyle style);

  // Whether an entry is the module's name, without looking at patterns.
  bool names(std::string_view module) const;
  // Throws what NamePattern does.
  bool contain(std::string_view module) const;
  bool is_empty() const { return entries_.empty(); }

 private:
  struct Entry {
    std::string text;
    std::string where;
  };
  bool matches(const Entry& entry, const std::string& name) const;

  NameStyle style_;
  std::vector<Entry> entries_;
  std::unordered_set<std::string> texts_;                         // of the entries
  mutable std::vector<std::pair<size_t, NamePattern>> patterns_;  // of entries, as they are needed
};

}  // namespace llmserve
