#include <pybind11/pybind11.h>

#include <string>

#include "bindings/register.h"
#include "text/line_template.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {

void register_line_template(py::module_& module) {
  py::class_<LineTemplate>(module, "LineTemplate")
      .def(py::init<std::string, std::string, bool>(), "prefix"_a, "suffix"_a, "skips_empty"_a)
      .def(
          "render",
          [](const LineTemplate& line, const TokenEvent& event) -> py::object {
            const auto rendered = line.render(event);
            if (!rendered) return py::none();
            return py::bytes(*rendered);
          },
          "event"_a);
}

}  // namespace llmserve
