#include "io/name_pattern.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr size_t kMaxPatternBytes = 4096;
constexpr size_t kMaxSteps = 20000;  // repetitions are written out
constexpr int kMaxDepth = 32;
constexpr int kMaxCount = 1000;

using Set = std::bitset<256>;

bool is_digit(unsigned char c) { return c >= '0' && c <= '9'; }
bool is_word(unsigned char c) {
  return is_digit(c) || c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool is_space(unsigned char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

template <class Predicate>
Set set_of(Predicate has) {
  Set set;
  for (int c = 0; c < 256; ++c) set[static_cast<size_t>(c)] = has(static_cast<unsigned char>(c));
  return set;
}

// What \d, \W … stand for.
std::optional<Set> class_of(char letter) {
  switch (letter) {
    case 'd':
      return set_of(is_digit);
    case 'D':
      return ~set_of(is_digit);
    case 'w':
      return set_of(is_word);
    case 'W':
      return ~set_of(is_word);
    case 's':
      return set_of(is_space);
    case 'S':
      return ~set_of(is_space);
    default:
      return std::nullopt;
  }
}

}  // namespace

// Recursive descent; each function appends the steps of what it reads.
class NamePatternParser {
 public:
  NamePatternParser(std::string_view text, std::string_view where, NamePattern& out)
      : text_(text), where_(where), out_(out) {}

  void parse() {
    if (text_.size() > kMaxPatternBytes)
      throw CorruptFile(concat(where_, ": a pattern of ", text_.size(), " bytes; at most ",
                               kMaxPatternBytes, " are read"));
    alternatives(0);
    if (at_ < text_.size()) corrupt("a bracket closes that none opened");
    add({NamePattern::Op::kMatch});
  }

 private:
  using Op = NamePattern::Op;
  using Step = NamePattern::Step;
  using Steps = std::vector<Step>;

  int32_t end() const { return static_cast<int32_t>(out_.steps_.size()); }
  bool is_at(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool take(char c) {
    if (!is_at(c)) return false;
    ++at_;
    return true;
  }
  void add(Step step) {
    if (out_.steps_.size() >= kMaxSteps) corrupt("the pattern is too large");
    out_.steps_.push_back(step);
  }
  void add_set(const Set& set) {
    out_.sets_.push_back(set);
    add({Op::kSet, 0, static_cast<int32_t>(out_.sets_.size()) - 1});
  }

  [[noreturn]] void corrupt(std::string_view reason) const {
    throw CorruptFile(concat(where_, ": pattern \"", text_, "\", character ", at_, ": ", reason));
  }
  [[noreturn]] void refuse(std::string_view what) const {
    throw NotSupported(concat(where_, ": pattern \"", text_, "\": ", what,
                              " is not supported in patterns of module names"));
  }

  void alternatives(int depth) {
    if (depth > kMaxDepth) corrupt("groups are nested too deep");
    const int32_t begin = end();
    sequence(depth);
    while (take('|')) {
      insert(begin, {Op::kSplit, begin + 1, end() + 2});
      const int32_t jump = end();
      add({Op::kJump});
      sequence(depth);
      out_.steps_[static_cast<size_t>(jump)].to = end();
    }
  }

  void sequence(int depth) {
    while (at_ < text_.size() && !is_at('|') && !is_at(')')) {
      const int32_t begin = end();
      atom(depth);
      repetitions(begin);
    }
  }

  void atom(int depth) {
    const char c = text_[at_++];
    switch (c) {
      case '.':
        return add_set(~Set().set('\n'));
      case '^':
        return add({Op::kBegin});
      case '$':
        return add({Op::kEnd});
      case '[':
        return add_set(bracketed());
      case '\\':
        return escape();
      case '(':
        return group(depth);
      case '*':
      case '+':
      case '?':
        corrupt("nothing to repeat");
      default:
        return add_set(Set().set(static_cast<unsigned char>(c)));
    }
  }

  void group(int depth) {
    if (take('?')) {
      if (is_at('P')) refuse("a named group");
      if (!take(':')) refuse("look-around, or a flag,");
    }
    alternatives(depth + 1);
    if (!take(')')) corrupt("a group does not end");
  }

  void escape() {
    if (at_ == text_.size()) corrupt("ends in a backslash");
    const char c = text_[at_++];
    if (const std::optional<Set> set = class_of(c)) return add_set(*set);
    if (c == 'b') return add({Op::kWordEdge});
    if (c == 'A') return add({Op::kBegin});
    if (c == 'Z') return add({Op::kEnd});
    if (is_word(static_cast<unsigned char>(c))) refuse(concat("\\", c));
    add_set(Set().set(static_cast<unsigned char>(c)));
  }

  Set bracketed() {
    const bool is_complement = take('^');
    Set set;
    bool is_first = true;
    while (is_first || !is_at(']')) {
      if (at_ >= text_.size()) corrupt("a class does not end");
      is_first = false;
      char low = text_[at_++];
      if (low == '\\') {
        if (at_ >= text_.size()) corrupt("ends in a backslash");
        low = text_[at_++];
        if (const std::optional<Set> known = class_of(low)) {
          set |= *known;
          continue;
        }
      }
      char high = low;
      if (is_at('-') && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        high = text_[at_++];
      }
      if (static_cast<unsigned char>(high) < static_cast<unsigned char>(low))
        corrupt("a range goes backwards");
      for (int x = static_cast<unsigned char>(low); x <= static_cast<unsigned char>(high); ++x)
        set.set(static_cast<size_t>(x));
    }
    ++at_;
    return is_complement ? ~set : set;
  }

  // A number up to kMaxCount, or none.
  std::optional<int> count() {
    std::optional<int> value;
    while (at_ < text_.size() && is_digit(static_cast<unsigned char>(text_[at_]))) {
      value = value.value_or(0) * 10 + (text_[at_++] - '0');
      if (*value > kMaxCount) corrupt("repeats too often");
    }
    return value;
  }

  void repetitions(int32_t begin) {
    while (at_ < text_.size()) {
      if (take('*')) {
        repeat(begin, 0, std::nullopt);
      } else if (take('+')) {
        repeat(begin, 1, std::nullopt);
      } else if (take('?')) {
        repeat(begin, 0, 1);
      } else if (is_at('{')) {
        ++at_;
        const std::optional<int> least = count();
        std::optional<int> most = least;
        if (take(',')) most = count();
        if (!take('}') || (!least && !most)) corrupt("expected {m}, {m,} or {m,n}");
        if (most && *most < least.value_or(0)) corrupt("a range goes backwards");
        repeat(begin, least.value_or(0), most);
      } else {
        return;
      }
      take('?');  // whether a match exists does not depend on laziness
    }
  }

  // Replaces the steps from `begin` on by `least` to `most` of them.
  void repeat(int32_t begin, int least, std::optional<int> most) {
    const Steps body(out_.steps_.begin() + begin, out_.steps_.end());
    out_.steps_.resize(static_cast<size_t>(begin));
    const auto append = [&] {
      const int32_t moved = end() - begin;
      for (Step step : body) {
        if (step.op == Op::kJump || step.op == Op::kSplit) step.to += moved;
        if (step.op == Op::kSplit) step.other += moved;
        add(step);
      }
    };
    for (int i = 0; i < least; ++i) append();
    const auto length = static_cast<int32_t>(body.size());
    if (!most) {
      const int32_t loop = end();
      add({Op::kSplit, loop + 1, loop + length + 2});
      append();
      add({Op::kJump, loop});
      return;
    }
    const int32_t optional = *most - least;
    const int32_t after = end() + optional * (length + 1);
    for (int32_t i = 0; i < optional; ++i) {
      add({Op::kSplit, end() + 1, after});
      append();
    }
  }

  void insert(int32_t place, Step step) {
    add({});
    auto& steps = out_.steps_;
    for (Step& other : steps) {
      if (other.op != Op::kJump && other.op != Op::kSplit) continue;
      if (other.to >= place && &other >= &steps[static_cast<size_t>(place)]) ++other.to;
      if (other.op == Op::kSplit && other.other >= place &&
          &other >= &steps[static_cast<size_t>(place)])
        ++other.other;
    }
    std::rotate(steps.begin() + place, steps.end() - 1, steps.end());
    steps[static_cast<size_t>(place)] = step;
  }

  const std::string_view text_;
  const std::string_view where_;
  NamePattern& out_;
  size_t at_ = 0;
};

NamePattern::NamePattern(std::string_view pattern, std::string_view where) {
  NamePatternParser(pattern, where, *this).parse();
}

NamePattern NamePattern::glob(std::string_view pattern, std::string_view where) {
  std::string escaped = "^";
  for (const char c : pattern) {
    if (c == '*')
      escaped += ".*";
    else if (c == '?')
      escaped += '.';
    else if (is_word(static_cast<unsigned char>(c)))
      escaped += c;
    else
      escaped += {'\\', c};
  }
  return NamePattern(escaped + "$", where);
}

void NamePattern::follow(int32_t step, std::string_view name, size_t at, std::vector<int32_t>& list,
                         std::vector<bool>& is_listed) const {
  std::vector<int32_t> pending{step};
  const auto is_word_at = [&](size_t i) {
    return i < name.size() && is_word(static_cast<unsigned char>(name[i]));
  };
  while (!pending.empty()) {
    const int32_t next = pending.back();
    pending.pop_back();
    if (is_listed[static_cast<size_t>(next)]) continue;
    is_listed[static_cast<size_t>(next)] = true;
    const Step& of = steps_[static_cast<size_t>(next)];
    const bool holds = of.op == Op::kBegin      ? at == 0
                       : of.op == Op::kEnd      ? at == name.size()
                       : of.op == Op::kWordEdge ? (at > 0 && is_word_at(at - 1)) != is_word_at(at)
                                                : false;
    if (of.op == Op::kJump) {
      pending.push_back(of.to);
    } else if (of.op == Op::kSplit) {
      pending.push_back(of.to);
      pending.push_back(of.other);
    } else if (of.op == Op::kSet || of.op == Op::kMatch) {
      list.push_back(next);
    } else if (holds) {
      pending.push_back(next + 1);
    }
  }
}

bool NamePattern::run(std::string_view name, bool anywhere) const {
  std::vector<int32_t> list;
  std::vector<bool> is_listed(steps_.size());
  for (size_t at = 0;; ++at) {
    if (at == 0 || anywhere) follow(0, name, at, list, is_listed);
    std::vector<int32_t> next;
    is_listed.assign(steps_.size(), false);
    for (const int32_t step : list) {
      const Step& of = steps_[static_cast<size_t>(step)];
      if (of.op == Op::kMatch) return true;
      const bool takes = at < name.size() && sets_[static_cast<size_t>(of.other)].test(
                                                 static_cast<unsigned char>(name[at]));
      if (takes) follow(step + 1, name, at + 1, next, is_listed);
    }
    if (at >= name.size()) return false;
    list = std::move(next);
  }
}

}  // namespace llmserve
