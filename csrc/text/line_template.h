// A line of a stream of server-sent events, but for the text of the token that it brings: what a
// server writes for every token, made without Python.
#pragma once

#include <string>
#include <string_view>

#include "api/token_event.h"

namespace llmserve {

// Appends `text`, UTF-8, as the inside of a JSON string (RFC 8259, section 7): quotes, backslashes
// and control characters are escaped, everything else stays.
void append_json_escaped(std::string_view text, std::string& out);

class LineTemplate {
 public:
  // A line is prefix, the event's text as the inside of a JSON string, suffix. An event without
  // tokens has none; skips_empty: nor has one without text.
  LineTemplate(std::string prefix, std::string suffix, bool skips_empty);

  // Appends the event's line, if it has one; false, with nothing done, for an event that says more
  // than its text: an end, an error, log-probabilities.
  bool append(const TokenEvent& event, std::string& out) const;

 private:
  const std::string prefix_;
  const std::string suffix_;
  const bool skips_empty_;
};

}  // namespace llmserve
