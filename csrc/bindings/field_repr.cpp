#include "bindings/field_repr.h"

#include <string>

namespace py = pybind11;

namespace llmserve {

py::str field_repr(const py::object& record) {
  const py::object type = py::type::of(record);
  const py::object property = py::module_::import("builtins").attr("property");
  std::string text = py::cast<std::string>(type.attr("__name__")) + "(";
  const char* separator = "";
  for (const auto item : type.attr("__dict__").attr("items")()) {
    const auto [name, value] = py::cast<std::pair<std::string, py::object>>(item);
    if (!py::isinstance(value, property)) continue;
    text += separator + name + "=" + py::cast<std::string>(py::repr(record.attr(name.c_str())));
    separator = ", ";
  }
  return text + ")";
}

}  // namespace llmserve
