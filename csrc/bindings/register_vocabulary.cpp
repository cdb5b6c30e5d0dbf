#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/sampling_params.h"
#include "bindings/register.h"
#include "core/error.h"
#include "text/stop_checker.h"
#include "text/token_decoder.h"
#include "text/vocabulary.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

// The table has a place for every id up to the largest, which a file of untrusted origin names; the
// largest published is below 2^19.
constexpr int64_t kMaxTokens = 1 << 24;

Vocabulary decode_vocabulary(const py::dict& tokens, const std::vector<TokenStep>& steps,
                             const std::vector<int32_t>& special_token_ids) {
  std::vector<std::string> bytes_by_id;
  bytes_by_id.reserve(tokens.size());
  TokenDecoder decoder(steps);
  for (const auto& [token, id] : tokens) {
    const auto text = token.cast<std::string_view>();
    const auto at = id.cast<int64_t>();
    if (at < 0 || at >= kMaxTokens)
      throw CorruptFile(
          concat("the id ", at, " of the token \"", text, "\" is outside 0 to 2^24 - 1"));
    if (at >= static_cast<int64_t>(bytes_by_id.size()))
      bytes_by_id.resize(static_cast<size_t>(at) + 1);
    bytes_by_id[static_cast<size_t>(at)] = decoder.decode(text);
  }
  return {bytes_by_id, special_token_ids};
}

// As RequestBook::resume reads them.
std::string text_given_out(const Vocabulary& vocabulary, const std::vector<int32_t>& token_ids,
                           const SamplingParams& params) {
  const StopStrings stops(params.stop);
  StopChecker checker(vocabulary, stops,
                      {.skip_special_tokens = params.skip_special_tokens,
                       .spaces_between_special_tokens = params.spaces_between_special_tokens,
                       .include_stop_str_in_output = params.include_stop_str_in_output});
  std::string text;
  for (size_t i = 0; i < token_ids.size(); ++i) {
    if (token_ids[i] < 0 || token_ids[i] >= vocabulary.size())
      throw InvalidArgument(concat("resumed token id ", token_ids[i],
                                   " is outside the vocabulary [0, ", vocabulary.size(), ")"));
    const bool can_stop = static_cast<int64_t>(i) + 1 >= params.min_tokens;
    if (checker.append(token_ids[i], can_stop, text))
      throw InvalidArgument("resumed_token_ids complete a stop string: nothing follows them");
  }
  return text;
}

void register_steps(py::module_& module) {
  py::class_<ReplaceStep>(module, "ReplaceStep")
      .def(py::init([](std::string old_text, std::string new_text) {
             if (old_text.empty()) throw InvalidArgument("ReplaceStep.old_text: must not be empty");
             return ReplaceStep{std::move(old_text), std::move(new_text)};
           }),
           "old_text"_a, "new_text"_a);
  py::class_<StripStep>(module, "StripStep")
      .def(py::init([](std::string character, int64_t start, int64_t stop) {
             if (character.empty()) throw InvalidArgument("StripStep.character: must not be empty");
             return StripStep{std::move(character), start, stop};
           }),
           "character"_a, "start"_a, "stop"_a);
  py::class_<WordStep>(module, "WordStep")
      .def(py::init([](std::optional<std::string> prefix) { return WordStep{std::move(prefix)}; }),
           "prefix"_a);
  py::class_<ByteFallbackStep>(module, "ByteFallbackStep").def(py::init());
  py::class_<ByteLevelStep>(module, "ByteLevelStep").def(py::init());
}

}  // namespace

void register_vocabulary(py::module_& module) {
  register_steps(module);
  py::class_<Vocabulary>(module, "Vocabulary")
      .def(py::init([](const std::vector<py::bytes>& token_bytes,
                       const std::vector<int32_t>& special_token_ids) {
             std::vector<std::string> table(token_bytes.begin(), token_bytes.end());
             return Vocabulary(table, special_token_ids);
           }),
           "token_bytes"_a, "special_token_ids"_a)
      .def_static("decode", &decode_vocabulary, "tokens"_a, "steps"_a, "special_token_ids"_a)
      .def(
          "bytes",
          [](const Vocabulary& vocabulary, int32_t id) { return py::bytes(vocabulary.bytes(id)); },
          "id"_a)
      .def("is_special", &Vocabulary::is_special, "id"_a)
      .def("text_given_out", &text_given_out, "token_ids"_a, "params"_a,
           "The text that a request with these parameters has given out after these tokens.")
      .def_property_readonly("special_token_ids", &Vocabulary::special_token_ids)
      .def("__len__", &Vocabulary::size);
}

}  // namespace llmserve
