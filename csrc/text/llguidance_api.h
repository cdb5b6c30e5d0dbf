// The part of llguidance's C interface that we call, by pointers: its Python wheel exports the
// functions, and nothing of it is linked. Layouts as of llguidance 1.9.1 (parser/llguidance.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace llmserve::llg {

struct Tokenizer;
struct Matcher;
struct CancellationHandle;

struct TokenizerInit {  // LlgTokenizerInitV2
  size_t struct_size = sizeof(TokenizerInit);
  uint32_t vocab_size = 0;
  uint32_t tok_eos = 0;
  const uint32_t* token_lens = nullptr;  // [vocab_size]
  const uint8_t* token_bytes = nullptr;  // all tokens, one after another; special ones begin 0xff
  const char* tokenizer_json = nullptr;  // in place of the two
  bool tokenize_assumes_string = false;
  void* tokenize_fn = nullptr;
  bool use_approximate_greedy_tokenize_fn = false;
  const void* tokenize_user_data = nullptr;
  const char* const* slices = nullptr;  // null: the defaults
  const uint32_t* tok_eos_extra = nullptr;
  uint32_t tok_eos_extra_count = 0;
};

struct ParserLimits {
  size_t max_items_in_row;
  uint64_t initial_lexer_fuel;
  uint64_t step_lexer_fuel;
  size_t step_max_items;
  size_t max_lexer_states;
  size_t max_grammar_size;
  bool precompute_large_lexemes;
  bool verbose_errors;
};

struct MatcherInit {  // LlgConstraintInit
  const Tokenizer* tokenizer;
  uint32_t log_buffer_level;
  uint32_t log_stderr_level;
  bool ff_tokens_ok;
  bool backtrack_ok;
  ParserLimits limits;
  std::byte reserved[512];  // a later version's limits may be more: the defaults are written to all
};

struct Functions {
  Tokenizer* (*new_tokenizer)(const TokenizerInit*, char* error, size_t error_size);
  void (*free_tokenizer)(Tokenizer*);
  void (*set_defaults)(MatcherInit*, const Tokenizer*);
  Matcher* (*new_matcher)(const MatcherInit*, const char* kind, const char* text);  // never null
  Matcher* (*clone_matcher)(const Matcher*);
  void (*free_matcher)(Matcher*);
  const char* (*get_error)(Matcher*);  // null: none
  bool (*is_stopped)(const Matcher*);  // also before its end token, where nothing else can come
  int32_t (*consume_token)(Matcher*, uint32_t token);                    // 0: taken
  int32_t (*roll_back)(Matcher*, size_t num_tokens);                     // 0: taken back
  int32_t (*compute_mask)(Matcher*, uint32_t* mask, size_t mask_bytes);  // 0: filled
  CancellationHandle* (*get_cancellation_handle)(Matcher*);
  void (*cancel)(const CancellationHandle*);
  void (*free_cancellation_handle)(CancellationHandle*);
};

// The functions of a library file, which stays open for good. Throws NotSupported, with what to
// install, for one that cannot be opened or lacks a function.
Functions load_functions(const std::string& path);

}  // namespace llmserve::llg
