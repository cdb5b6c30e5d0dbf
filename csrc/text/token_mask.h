// What a request's text must match, and which token may come next: a source of bit masks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace llmserve {

// Follows one sequence through its grammar. For one thread at a time, cancel() apart.
class TokenMatcher {
 public:
  virtual ~TokenMatcher() = default;

  // The next token of the text. Throws InvalidArgument where the grammar does not allow it; the
  // matcher is of no more use then. After its end a text takes more of the tokens that end it.
  virtual void append(int32_t token_id) = 0;
  // Takes the last num_tokens back, which were appended to this matcher or to the one that it was
  // cloned from: masks are as if they had never come. InternalError, with nothing changed, for more
  // than there are.
  virtual void roll_back(int64_t num_tokens) = 0;
  // Another matcher at this place of the text. Neither notices what is done with the other,
  // cancel() included.
  virtual std::unique_ptr<TokenMatcher> clone() const = 0;
  // mask [ceil(V / 32)]: bit i % 32 of word i / 32 says whether token i may come next; tokens that
  // end the text are among them where it may end here. Throws InvalidArgument where that takes more
  // work than the grammar is worth, or nothing can come.
  virtual void fill(std::span<uint32_t> mask) = 0;
  // From any thread: a fill() under way, and every call after it, throws soon.
  virtual void cancel() = 0;
};

// A grammar, compiled for one vocabulary. Any number of threads and sequences share it.
class TokenGrammar {
 public:
  virtual ~TokenGrammar() = default;

  // At the beginning of the text.
  virtual std::unique_ptr<TokenMatcher> make_matcher() const = 0;
  // The tokens that end a text; at least one, the preferred one first.
  virtual std::span<const int32_t> end_token_ids() const = 0;
};

}  // namespace llmserve
