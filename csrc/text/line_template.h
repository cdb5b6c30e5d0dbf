// A line of a stream of server-sent events, but for the text of the token that it brings: what a
// server writes for every token, made without Python.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "api/token_event.h"

namespace llmserve {

// Appends `text`, UTF-8, as the inside of a JSON string (RFC 8259, section 7): quotes, backslashes
// and control characters are escaped, everything else stays.
void append_json_escaped(std::string_view text, std::string& out);

class LineTemplate {
 public:
  // A line is prefix, the event's text as the inside of a JSON string, suffix. skips_empty: an
  // event without text has no line.
  LineTemplate(std::string prefix, std::string suffix, bool skips_empty);

  // The event's line, which is empty where there is none; nothing at all for an event that says
  // more than its text: an end, an error, log-probabilities.
  std::optional<std::string> render(const TokenEvent& event) const;

 private:
  const std::string prefix_;
  const std::string suffix_;
  const bool skips_empty_;
};

}  // namespace llmserve
