#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "api/sampling_params.h"
#include "bindings/from_kwargs.h"
#include "bindings/register.h"
#include "core/mix.h"
#include "sampling/logits_processor.h"
#include "text/token_mask.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {

void register_sampling_params(py::module_& module) {
  py::class_<RepetitionDetection>(module, "RepetitionDetection")
      .def(py::init(&from_kwargs<RepetitionDetection>))
      .def_readwrite("max_pattern_size", &RepetitionDetection::max_pattern_size)
      .def_readwrite("min_pattern_size", &RepetitionDetection::min_pattern_size)
      .def_readwrite("min_count", &RepetitionDetection::min_count)
      .def("validate", &RepetitionDetection::validate);
  py::class_<ThinkingBudget>(module, "ThinkingBudget")
      .def(py::init(&from_kwargs<ThinkingBudget>))
      .def_readwrite("max_tokens", &ThinkingBudget::max_tokens)
      .def_readwrite("start_token_ids", &ThinkingBudget::start_token_ids)
      .def_readwrite("end_token_ids", &ThinkingBudget::end_token_ids);
  py::class_<LogitsProcessor, std::shared_ptr<LogitsProcessor>>(
      module, "LogitsProcessor", "Changes what a request's tokens are drawn from.");
  py::class_<SamplingParams> params(module, "SamplingParams");
  for_each_draw_field([&]<class Value>(const DrawField<Value>& field) {
    params.def_property(
        field.name,
        [member = field.member](const SamplingParams& self) { return self.draw.*member; },
        [member = field.member](SamplingParams& self, Value value) { self.draw.*member = value; });
  });
  params.def(py::init(&from_kwargs<SamplingParams>))
      .def_readwrite("n", &SamplingParams::n)
      .def_readwrite("seed", &SamplingParams::seed)
      .def_readwrite("stop", &SamplingParams::stop)
      .def_readwrite("stop_token_ids", &SamplingParams::stop_token_ids)
      .def_readwrite("ignore_eos", &SamplingParams::ignore_eos)
      .def_readwrite("max_tokens", &SamplingParams::max_tokens)
      .def_readwrite("min_tokens", &SamplingParams::min_tokens)
      .def_readwrite("logprobs", &SamplingParams::logprobs)
      .def_readwrite("logprob_token_ids", &SamplingParams::logprob_token_ids)
      .def_readwrite("prompt_logprobs", &SamplingParams::prompt_logprobs)
      .def_readwrite("detokenize", &SamplingParams::detokenize)
      .def_readwrite("skip_special_tokens", &SamplingParams::skip_special_tokens)
      .def_readwrite("spaces_between_special_tokens",
                     &SamplingParams::spaces_between_special_tokens)
      .def_readwrite("include_stop_str_in_output", &SamplingParams::include_stop_str_in_output)
      .def_readwrite("logit_bias", &SamplingParams::logit_bias)
      .def_readwrite("allowed_token_ids", &SamplingParams::allowed_token_ids)
      .def_readwrite("bad_words", &SamplingParams::bad_words)
      .def_readwrite("skip_reading_prefix_cache", &SamplingParams::skip_reading_prefix_cache)
      .def_readwrite("thinking_budget", &SamplingParams::thinking_budget)
      .def_readwrite("repetition_detection", &SamplingParams::repetition_detection)
      .def_readwrite("logits_processors", &SamplingParams::logits_processors)
      .def_readwrite("grammar", &SamplingParams::grammar)
      .def("validate", &SamplingParams::validate)
      .def("validate_token_ids", &SamplingParams::validate_token_ids, "vocab_size"_a);
  module.def("sample_seed", &sample_seed, "request_seed"_a, "sample_index"_a,
             "The seed of one of a request's n samples.");
}

}  // namespace llmserve
