#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/from_kwargs.h"
#include "bindings/register.h"
#include "text/grammar_compiler.h"
#include "text/llguidance.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {

void register_grammar(py::module_& module) {
  py::class_<TokenGrammar, std::shared_ptr<TokenGrammar>>(
      module, "TokenGrammar", "What the text of a request must match, compiled.");
  py::class_<GrammarLimits>(module, "GrammarLimits")
      .def(py::init(&from_kwargs<GrammarLimits>))
      .def_readwrite("max_text_bytes", &GrammarLimits::max_text_bytes)
      .def_readwrite("timeout_s", &GrammarLimits::timeout_s)
      .def_readwrite("max_num_threads", &GrammarLimits::max_num_threads)
      .def_readwrite("max_num_given_up", &GrammarLimits::max_num_given_up)
      .def_readwrite("cache_bytes", &GrammarLimits::cache_bytes);
  py::class_<GrammarCompiler>(module, "GrammarCompiler")
      .def(py::init([](const std::string& library_path, const Vocabulary& vocabulary,
                       int64_t vocab_size, const std::vector<int32_t>& end_token_ids,
                       const GrammarLimits& limits) {
             const auto make_compile = [=]() -> GrammarCompiler::Compile {
               const auto backend = std::make_shared<LlGuidance>(library_path, vocabulary,
                                                                 vocab_size, end_token_ids);
               return [backend](const std::string& kind, const std::string& text) {
                 return backend->compile(kind, text);
               };
             };
             return std::make_unique<GrammarCompiler>(make_compile, limits);
           }),
           "library_path"_a, "vocabulary"_a, "vocab_size"_a, "end_token_ids"_a,
           "limits"_a = GrammarLimits{})
      .def("compile", &GrammarCompiler::compile, "field"_a, "kind"_a, "text"_a,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_compiled", &GrammarCompiler::num_compiled)
      .def_property_readonly("cached_bytes", &GrammarCompiler::cached_bytes);
}

}  // namespace llmserve
