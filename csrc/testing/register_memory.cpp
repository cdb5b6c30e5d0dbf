// What the process may take, as the system's files say, for the tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "core/system.h"
#include "testing/register.h"

namespace py = pybind11;

namespace llmserve {

void register_testing_memory(py::module_& testing) {
  py::class_<MemoryLimits>(testing, "MemoryLimits")
      .def_readonly("total_bytes", &MemoryLimits::total_bytes)
      .def_readonly("available_bytes", &MemoryLimits::available_bytes)
      .def_readonly("bounded_by", &MemoryLimits::bounded_by);
  testing.def("read_memory_limits", &read_memory_limits, py::arg("root"));
}

}  // namespace llmserve
