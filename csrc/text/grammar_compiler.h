// Compiles grammars that anybody may send: beside the threads that serve, within bounds on size and
// time, and each one once.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "text/token_mask.h"

namespace llmserve {

struct GrammarLimits {
  int64_t max_text_bytes = 256 << 10;
  // From the call to its answer: 1000 times what a schema of everyday use takes.
  double timeout_s = 10;
  int32_t max_num_threads = 2;  // that compile at a time
  // Beside them: threads that somebody has given up waiting for, which nothing can stop. They run
  // at low priority. More of them count among max_num_threads.
  int32_t max_num_given_up = 4;
  // Of compiled grammars that nobody has used for the longest time the rest are forgotten. What one
  // takes cannot be asked for; it is estimated from its text.
  int64_t cache_bytes = 128 << 20;
};

class GrammarCompiler {
 public:
  // Turns a kind and a text into a grammar, or throws. From several threads at a time.
  using Compile = std::function<std::shared_ptr<TokenGrammar>(const std::string& kind,
                                                              const std::string& text)>;

  // make_compile is called once, before the first grammar is compiled, on its thread.
  GrammarCompiler(std::function<Compile()> make_compile, const GrammarLimits& limits);
  ~GrammarCompiler();  // does not wait for what is being compiled
  GrammarCompiler(const GrammarCompiler&) = delete;
  GrammarCompiler& operator=(const GrammarCompiler&) = delete;

  // The grammar, compiled or found; waits for it. Throws what compiling throws, InvalidArgument for
  // a text that is too long or took too long, ResourceExhausted where others kept the threads busy
  // all the time, and names `field`. A thread that took too long is left to itself; see
  // max_num_given_up. Any number of threads may call it.
  std::shared_ptr<TokenGrammar> compile(const std::string& field, const std::string& kind,
                                        const std::string& text);

  int64_t num_compiled() const;  // so far
  int64_t cached_bytes() const;  // by the estimate

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;  // with threads that outlive us
};

}  // namespace llmserve
