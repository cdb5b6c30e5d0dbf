#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/register.h"
#include "text/vocabulary.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {

void register_vocabulary(py::module_& module) {
  py::class_<Vocabulary>(module, "Vocabulary")
      .def(py::init([](const std::vector<py::bytes>& token_bytes,
                       const std::vector<int32_t>& special_token_ids) {
             std::vector<std::string> table(token_bytes.begin(), token_bytes.end());
             return Vocabulary(table, special_token_ids);
           }),
           "token_bytes"_a, "special_token_ids"_a)
      .def(
          "bytes",
          [](const Vocabulary& vocabulary, int32_t id) { return py::bytes(vocabulary.bytes(id)); },
          "id"_a)
      .def("is_special", &Vocabulary::is_special, "id"_a)
      .def("__len__", &Vocabulary::size);
}

}  // namespace llmserve
