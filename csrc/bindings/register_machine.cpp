// What this machine can do, for benchmarks, and what this process has taken of its memory.
#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "bindings/field_repr.h"
#include "bindings/register.h"
#include "core/memory.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/gemm_probe.h"
#include "kernels/cpu/machine_probe.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {

void register_machine(py::module_& module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  module.def(
      "cpu_isa", [] { return select_cpu_isa("").name; },
      "The instruction set that models run on: the CPU's best, or what LLMSERVE_CPU_ISA leaves.");
  py::class_<MachineProbe>(module, "MachineProbe", "Measures what memory can do.")
      .def(py::init([](int num_threads, const std::string& isa, int64_t num_bytes) {
             return std::make_unique<MachineProbe>(select_cpu_isa(isa), num_threads, num_bytes);
           }),
           "num_threads"_a = 1, "isa"_a = "", "num_bytes"_a = int64_t{256} << 20)
      .def("read_gb_per_s", &MachineProbe::read_gb_per_s, Unlocked(),
           "Of a streaming read, measured once.")
      .def("copy_gb_per_s", &MachineProbe::copy_gb_per_s, "num_bytes"_a, Unlocked(),
           "Of a plain copy into new memory, measured once; at most the probe's own num_bytes.");
  py::class_<GemmProbe>(module, "GemmProbe", "Measures what linear layers can do.")
      .def(py::init([](int num_threads, const std::string& isa, int64_t rows, int64_t outputs,
                       int64_t inputs) {
             return std::make_unique<GemmProbe>(
                 isa, num_threads, GemmShape{.rows = rows, .outputs = outputs, .inputs = inputs});
           }),
           "num_threads"_a, "isa"_a, "rows"_a, "outputs"_a, "inputs"_a)
      .def("ops_per_s", &GemmProbe::ops_per_s, "arithmetic"_a, Unlocked(),
           "Operations a second, two a multiply-add, with weights in \"float32\", \"bfloat16\" or "
           "a format of quantization, measured once.");
  py::class_<HostAllocations>(module, "HostAllocations")
      .def("__repr__", &field_repr)
      .def_readonly("num_bytes", &HostAllocations::num_bytes)
      .def_readonly("untouched_bytes", &HostAllocations::untouched_bytes);
  module.def("host_allocations", &host_allocations,
             "Bytes of host memory that engines hold for weights, caches and workspace, and those "
             "of them that nothing has touched yet.");
}

}  // namespace llmserve
