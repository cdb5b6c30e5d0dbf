// What the process may take and has taken, for the tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "bindings/register.h"
#include "core/memory.h"
#include "core/system.h"

namespace py = pybind11;

namespace llmserve {

void register_testing_memory(py::module_& testing) {
  py::class_<MemoryLimits>(testing, "MemoryLimits")
      .def_readonly("total_bytes", &MemoryLimits::total_bytes)
      .def_readonly("available_bytes", &MemoryLimits::available_bytes)
      .def_readonly("bounded_by", &MemoryLimits::bounded_by);
  testing.def("read_memory_limits", &read_memory_limits, py::arg("root"));
  py::class_<HostAllocations>(testing, "HostAllocations")
      .def_readonly("num_bytes", &HostAllocations::num_bytes)
      .def_readonly("untouched_bytes", &HostAllocations::untouched_bytes);
  testing.def("host_allocations", &host_allocations);
}

}  // namespace llmserve
