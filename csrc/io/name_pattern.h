// Patterns of module names in configuration files of untrusted origin.
//
// The part of Python's `re` that such files use: characters, ., classes, \d \w \s, groups, |, *, +,
// ?, {m,n}, lazy or not, ^, $ and \b. A match takes time in proportion to pattern times name,
// whatever the pattern: all alternatives are followed at once (Thompson 1968).
#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llmserve {

class NamePattern {
 public:
  // `where` names the field in messages. Throws CorruptFile for what is no pattern or too large,
  // NotSupported for look-around, back references and other parts of `re` that are not named above.
  NamePattern(std::string_view pattern, std::string_view where);
  // Of shells: * is any text, ? a character, all else itself.
  static NamePattern glob(std::string_view pattern, std::string_view where);

  // As re.match: from the beginning of the name on, and not necessarily to its end.
  bool matches_beginning(std::string_view name) const { return run(name, /*anywhere=*/false); }
  // As re.search.
  bool matches_anywhere(std::string_view name) const { return run(name, /*anywhere=*/true); }

 private:
  friend class NamePatternParser;
  enum class Op : uint8_t { kSet, kSplit, kJump, kBegin, kEnd, kWordEdge, kMatch };
  struct Step {
    Op op = Op::kMatch;
    int32_t to = 0;     // of kJump and kSplit
    int32_t other = 0;  // of kSplit; of kSet the set
  };

  NamePattern() = default;
  bool run(std::string_view name, bool anywhere) const;
  // Adds the steps that are reached from `step` without a character.
  void follow(int32_t step, std::string_view name, size_t at, std::vector<int32_t>& list,
              std::vector<bool>& is_listed) const;

  std::vector<Step> steps_;
  std::vector<std::bitset<256>> sets_;
};

}  // namespace llmserve
