#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "api/sampling_params.h"
#include "bindings/from_kwargs.h"
#include "bindings/register.h"

namespace py = pybind11;

namespace llmserve {

void register_sampling_params(py::module_& module) {
  py::class_<SamplingParams>(module, "SamplingParams")
      .def(py::init(&from_kwargs<SamplingParams>))
      .def_readwrite("n", &SamplingParams::n)
      .def_readwrite("temperature", &SamplingParams::temperature)
      .def_readwrite("top_p", &SamplingParams::top_p)
      .def_readwrite("top_k", &SamplingParams::top_k)
      .def_readwrite("min_p", &SamplingParams::min_p)
      .def_readwrite("seed", &SamplingParams::seed)
      .def_readwrite("stop", &SamplingParams::stop)
      .def_readwrite("stop_token_ids", &SamplingParams::stop_token_ids)
      .def_readwrite("ignore_eos", &SamplingParams::ignore_eos)
      .def_readwrite("max_tokens", &SamplingParams::max_tokens)
      .def_readwrite("min_tokens", &SamplingParams::min_tokens)
      .def_readwrite("logprobs", &SamplingParams::logprobs)
      .def_readwrite("detokenize", &SamplingParams::detokenize)
      .def_readwrite("skip_special_tokens", &SamplingParams::skip_special_tokens)
      .def_readwrite("include_stop_str_in_output", &SamplingParams::include_stop_str_in_output)
      .def("validate", &SamplingParams::validate);
}

}  // namespace llmserve
