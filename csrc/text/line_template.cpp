#include "text/line_template.h"

#include <utility>

namespace llmserve {
namespace {

// What stands after the backslash; 0 for a character that has no short form.
char short_escape(char c) {
  switch (c) {
    case '"':
    case '\\':
      return c;
    case '\b':
      return 'b';
    case '\f':
      return 'f';
    case '\n':
      return 'n';
    case '\r':
      return 'r';
    case '\t':
      return 't';
    default:
      return 0;
  }
}

bool says_more(const TokenEvent& event) {
  return event.finish_reason != FinishReason::kNone || !event.logprobs.empty() ||
         !event.prompt_logprobs.empty() || event.pooled != nullptr;
}

}  // namespace

void append_json_escaped(std::string_view text, std::string& out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && c != '"' && c != '\\') {
      out += c;
    } else if (const char letter = short_escape(c); letter != 0) {
      out += {'\\', letter};
    } else {
      out += "\\u00";
      out += {kHex[byte >> 4], kHex[byte & 15]};
    }
  }
}

LineTemplate::LineTemplate(std::string prefix, std::string suffix, bool skips_empty)
    : prefix_(std::move(prefix)), suffix_(std::move(suffix)), skips_empty_(skips_empty) {}

bool LineTemplate::append(const TokenEvent& event, std::string& out) const {
  if (says_more(event)) return false;
  if (event.token_ids.empty() || (event.text.empty() && skips_empty_)) return true;
  out += prefix_;
  append_json_escaped(event.text, out);
  out += suffix_;
  return true;
}

}  // namespace llmserve
