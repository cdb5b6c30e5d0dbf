#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "bindings/register.h"
#include "engine/lent_connection.h"
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
            std::string rendered;
            if (!line.append(event, rendered)) return py::none();
            return py::bytes(rendered);
          },
          "event"_a);
  py::class_<WrittenLines>(module, "WrittenLines")
      .def_property_readonly("rest",
                             [](const WrittenLines& lines) { return py::bytes(lines.rest); })
      .def_property_readonly("samples", [](const WrittenLines& lines) {
        py::list samples;
        for (const auto& [request_id, sample_index, token_ids] : lines.samples)
          samples.append(py::make_tuple(request_id, sample_index, token_ids));
        return samples;
      });
  py::class_<LentConnection, std::shared_ptr<LentConnection>>(module, "LentConnection")
      .def(py::init<int>(), "fd"_a)
      .def("add", &LentConnection::add, "request_id"_a, "sample_index"_a, "line"_a)
      .def_property_readonly("last_us", &LentConnection::last_us);
}

}  // namespace llmserve
