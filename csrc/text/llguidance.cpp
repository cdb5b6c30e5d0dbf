#include "text/llguidance.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "text/llguidance_api.h"

namespace llmserve {

struct LlGuidance::State {
  llg::Functions functions;
  llg::Tokenizer* tokenizer = nullptr;
  std::vector<int32_t> end_token_ids;
  size_t num_mask_words = 0;

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    if (tokenizer != nullptr) functions.free_tokenizer(tokenizer);
  }
};

namespace {

using State = std::shared_ptr<const LlGuidance::State>;

constexpr uint8_t kSpecialMarker = 0xff;  // before the name of a special token
// What llguidance calls a place of a text that nothing can follow.
constexpr std::string_view kNothingFollows = "NoExtensionBias";
constexpr size_t kMaxErrorBytes = 300;  // llguidance repeats the grammar

std::string error_of(const llg::Functions& functions, llg::Matcher* matcher) {
  const char* error = functions.get_error(matcher);
  std::string text = error == nullptr ? "llguidance gives no reason" : error;
  if (const size_t end = text.find("\n<non-verbose/>"); end != std::string::npos) text.resize(end);
  if (text == kNothingFollows) return "no token may come next";
  if (text.size() > kMaxErrorBytes) {
    size_t end = kMaxErrorBytes;
    while (end > 0 && (text[end] & 0xc0) == 0x80) --end;  // characters stay whole
    text = text.substr(0, end) + "...";
  }
  return text;
}

class Matcher final : public TokenMatcher {
 public:
  Matcher(State state, llg::Matcher* matcher)
      : state_(std::move(state)),
        matcher_(matcher),
        cancellation_(state_->functions.get_cancellation_handle(matcher)) {}
  ~Matcher() override {
    state_->functions.free_cancellation_handle(cancellation_);
    state_->functions.free_matcher(matcher_);
  }
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

  void append(int32_t token_id) override {
    if (has_stopped() && std::ranges::count(state_->end_token_ids, token_id) > 0) {
      ++num_ends_;  // the mask has it, but llguidance would not take it
      return;
    }
    if (state_->functions.consume_token(matcher_, static_cast<uint32_t>(token_id)) != 0) fail();
    ++num_tokens_;
  }
  void roll_back(int64_t num_tokens) override {
    // Asked for more, llguidance would be of no more use.
    check_internal(0 <= num_tokens && num_tokens <= num_tokens_ + num_ends_,
                   "no more tokens are taken back than were appended");
    const int64_t num_ends = std::min(num_tokens, num_ends_);
    num_tokens -= num_ends;
    if (state_->functions.roll_back(matcher_, static_cast<size_t>(num_tokens)) != 0) fail();
    num_ends_ -= num_ends;
    num_tokens_ -= num_tokens;
  }
  std::unique_ptr<TokenMatcher> clone() const override {
    auto other = std::make_unique<Matcher>(state_, state_->functions.clone_matcher(matcher_));
    other->num_tokens_ = num_tokens_;
    other->num_ends_ = num_ends_;
    return other;
  }
  void fill(std::span<uint32_t> mask) override {
    check_internal(mask.size() == state_->num_mask_words, "a mask has a bit for each token");
    if (state_->functions.compute_mask(matcher_, mask.data(), mask.size_bytes()) != 0) fail();
  }
  void cancel() override { state_->functions.cancel(cancellation_); }

 private:
  [[noreturn]] void fail() {
    throw InvalidArgument("the grammar cannot be followed: " +
                          error_of(state_->functions, matcher_));
  }

  bool has_stopped() const {
    return state_->functions.is_stopped(matcher_) &&
           state_->functions.get_error(matcher_) == nullptr;
  }

  const State state_;
  llg::Matcher* const matcher_;
  llg::CancellationHandle* const cancellation_;
  int64_t num_tokens_ = 0;  // that llguidance took, and were not taken back
  int64_t num_ends_ = 0;    // the end tokens after them
};

class Grammar final : public TokenGrammar {
 public:
  Grammar(State state, llg::Matcher* start) : state_(std::move(state)), start_(start) {}
  ~Grammar() override { state_->functions.free_matcher(start_); }
  Grammar(const Grammar&) = delete;
  Grammar& operator=(const Grammar&) = delete;

  // Throws InvalidArgument unless the grammar is one, and something matches it. The mask of the
  // start is found by the way, and with it much of what a fill() has to look up.
  void check() {
    std::vector<uint32_t> mask(state_->num_mask_words);
    if (state_->functions.get_error(start_) != nullptr)
      throw InvalidArgument(error_of(state_->functions, start_));
    if (state_->functions.compute_mask(start_, mask.data(), mask.size() * sizeof(mask[0])) != 0) {
      throw InvalidArgument("no text can begin to match it: " +
                            error_of(state_->functions, start_));
    }
  }

  std::unique_ptr<TokenMatcher> make_matcher() const override {
    const std::lock_guard lock(mutex_);
    return std::make_unique<Matcher>(state_, state_->functions.clone_matcher(start_));
  }
  std::span<const int32_t> end_token_ids() const override { return state_->end_token_ids; }

 private:
  const State state_;
  mutable std::mutex mutex_;  // guards start_
  llg::Matcher* const start_;
};

}  // namespace

LlGuidance::LlGuidance(const std::string& library_path, const Vocabulary& vocabulary,
                       int64_t vocab_size, std::span<const int32_t> end_token_ids) {
  if (end_token_ids.empty()) {
    throw InvalidArgument(
        "structured outputs need a token that ends a text, and neither the model's config.json and "
        "generation_config.json nor its tokenizer name one of its vocabulary");
  }
  for (const int32_t id : end_token_ids)
    if (id < 0 || id >= vocab_size)
      throw InvalidArgument(concat("structured outputs: the end token id ", id,
                                   " is outside the model's vocabulary (0 to ", vocab_size - 1,
                                   ")"));
  auto state = std::make_shared<State>();
  state->functions = llg::load_functions(library_path);
  state->end_token_ids.assign(end_token_ids.begin(), end_token_ids.end());
  state->num_mask_words = static_cast<size_t>((vocab_size + 31) / 32);
  std::vector<uint32_t> lengths;
  std::vector<uint8_t> bytes;
  for (int32_t id = 0; id < vocab_size; ++id) {
    const size_t begin = bytes.size();
    const std::string_view token = vocabulary.bytes(id);
    if (vocabulary.is_special(id)) bytes.push_back(kSpecialMarker);
    bytes.insert(bytes.end(), token.begin(), token.end());
    lengths.push_back(static_cast<uint32_t>(bytes.size() - begin));
  }
  const std::vector<uint32_t> ends(end_token_ids.begin(), end_token_ids.end());
  const llg::TokenizerInit init{.vocab_size = static_cast<uint32_t>(vocab_size),
                                .tok_eos = ends[0],
                                .token_lens = lengths.data(),
                                .token_bytes = bytes.data(),
                                // Without a tokenizer to ask, no token is ever forced: the model
                                // spells what is fixed as it likes.
                                .use_approximate_greedy_tokenize_fn = true,
                                .tok_eos_extra = ends.data() + 1,
                                .tok_eos_extra_count = static_cast<uint32_t>(ends.size() - 1)};
  std::array<char, 512> error{};
  state->tokenizer = state->functions.new_tokenizer(&init, error.data(), error.size());
  if (state->tokenizer == nullptr)
    throw NotSupported(concat("llguidance does not take this vocabulary: ", error.data()));
  state_ = std::move(state);
}

std::shared_ptr<TokenGrammar> LlGuidance::compile(const std::string& kind,
                                                  const std::string& text) const {
  if (text.find('\0') != std::string::npos)
    throw InvalidArgument("a grammar is text without NUL characters");
  llg::MatcherInit init{};
  state_->functions.set_defaults(&init, state_->tokenizer);
  init.log_buffer_level = init.log_stderr_level = 0;
  init.limits.verbose_errors = false;
  const auto grammar = std::make_shared<Grammar>(
      state_, state_->functions.new_matcher(&init, kind.c_str(), text.c_str()));
  grammar->check();
  return grammar;
}

}  // namespace llmserve
