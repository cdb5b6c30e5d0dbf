#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "bindings/register.h"
#include "text/token_mask.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {

void register_testing_grammar(py::module_& testing) {
  py::class_<TokenMatcher>(testing, "TokenMatcher")
      .def(py::init([](const TokenGrammar& grammar) { return grammar.make_matcher(); }),
           "grammar"_a)
      .def("append", &TokenMatcher::append, "token_id"_a)
      .def(
          "mask",
          [](TokenMatcher& matcher, int64_t vocab_size) {
            py::array_t<uint32_t> mask((vocab_size + 31) / 32);
            matcher.fill({mask.mutable_data(), static_cast<size_t>(mask.size())});
            return mask;
          },
          "vocab_size"_a)
      .def("cancel", &TokenMatcher::cancel);
}

}  // namespace llmserve
