// Makes a vocabulary, the steps of its decoder, stop strings and a sequence of tokens of the input.
// What comes out of the tokens may depend on their bytes alone: it has to be what comes out of the
// same bytes one by one.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "text/stop_checker.h"
#include "text/token_decoder.h"
#include "text/vocabulary.h"

namespace {

using namespace llmserve;

constexpr size_t kMaxTextBytes = 24;

TokenStep take_step(FuzzedDataProvider& input) {
  const auto text = [&] {
    std::string taken = input.ConsumeRandomLengthString(kMaxTextBytes);
    return taken.empty() ? "a" : taken;  // as the binding demands
  };
  switch (input.ConsumeIntegralInRange(0, 4)) {
    case 0: {
      std::string old_text = text();
      return ReplaceStep{std::move(old_text), input.ConsumeRandomLengthString(kMaxTextBytes)};
    }
    case 1: {
      std::string character = text();
      return StripStep{std::move(character), input.ConsumeIntegralInRange<int64_t>(-1, 8),
                       input.ConsumeIntegralInRange<int64_t>(-1, 8)};
    }
    case 2:
      return WordStep{input.ConsumeBool() ? std::optional(text()) : std::nullopt};
    case 3:
      return ByteFallbackStep{};
    default:
      return ByteLevelStep{};
  }
}

struct Said {
  std::string text;
  std::optional<size_t> stop;
  bool operator==(const Said&) const = default;
};

Said say(const Vocabulary& vocabulary, const StopStrings& stops, StopChecker::Options options,
         const std::vector<int32_t>& token_ids) {
  StopChecker checker(vocabulary, stops, options);
  Said said;
  for (const int32_t id : token_ids) {
    said.stop = checker.append(id, true, said.text);
    if (said.stop) return said;
  }
  said.stop = checker.flush(said.text);
  return said;
}

void run(FuzzedDataProvider input) {
  std::vector<TokenStep> steps(input.ConsumeIntegralInRange<size_t>(0, 6));
  for (TokenStep& step : steps) step = take_step(input);
  TokenDecoder decoder(steps);
  std::vector<std::string> tokens(input.ConsumeIntegralInRange<size_t>(1, 8));
  for (std::string& token : tokens)
    token = decoder.decode(input.ConsumeRandomLengthString(kMaxTextBytes));
  std::vector<std::string> stop_texts(input.ConsumeIntegralInRange<size_t>(0, 3));
  for (std::string& stop : stop_texts) {
    stop = input.ConsumeRandomLengthString(kMaxTextBytes);
    if (stop.empty()) stop = "s";  // a request's may not be empty
  }
  const StopStrings stops(stop_texts);
  const StopChecker::Options options{.include_stop_str_in_output = input.ConsumeBool()};

  const Vocabulary vocabulary(tokens, {});
  std::vector<int32_t> ids;
  std::vector<int32_t> bytes;
  while (input.remaining_bytes() > 0) {
    const auto id = input.ConsumeIntegralInRange<int32_t>(-1, vocabulary.size());
    ids.push_back(id);
    for (const char byte : vocabulary.bytes(id)) bytes.push_back(static_cast<uint8_t>(byte));
  }
  std::vector<std::string> all_bytes(256);
  for (size_t byte = 0; byte < all_bytes.size(); ++byte)
    all_bytes[byte] = std::string(1, static_cast<char>(byte));
  const Vocabulary of_bytes(all_bytes, {});
  if (say(vocabulary, stops, options, ids) != say(of_bytes, stops, options, bytes)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    run(FuzzedDataProvider(data, size));
  } catch (const llmserve::CorruptFile&) {
  }
  return 0;
}
