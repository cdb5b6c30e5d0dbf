// Grammars by llguidance: JSON schemas, regular expressions, Lark. Its masks are of bytes: a token
// is what the vocabulary says that it is as text, and special tokens come only where a grammar
// names them or the text may end.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "text/token_mask.h"
#include "text/vocabulary.h"

namespace llmserve {

class LlGuidance {
 public:
  // Opens the library file and lays out the vocabulary, padded to vocab_size ids: a second or so
  // for a large one. Throws NotSupported, and InvalidArgument without end_token_ids.
  LlGuidance(const std::string& library_path, const Vocabulary& vocabulary, int64_t vocab_size,
             std::span<const int32_t> end_token_ids);

  // `kind` is llguidance's: "json_schema", "regex", "lark" or "llguidance". Throws InvalidArgument
  // for a text that is no such grammar, is past llguidance's bounds on a grammar's size, or that
  // nothing can match. How long it takes is not bounded: see GrammarCompiler.
  std::shared_ptr<TokenGrammar> compile(const std::string& kind, const std::string& text) const;

  struct State;

 private:
  std::shared_ptr<const State> state_;  // lives as long as any grammar
};

}  // namespace llmserve
