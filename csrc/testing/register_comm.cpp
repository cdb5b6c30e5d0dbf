// Communicators on the arrays of a backend, for tests: nothing else uses them yet.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <memory>

#include "comm/local_communicator.h"
#include "comm/nccl_communicator.h"
#include "core/error.h"
#include "kernels/backend.h"
#include "kernels/cuda_loader.h"
#include "testing/register.h"
#include "testing/staging.h"

namespace py = pybind11;

namespace llmserve {
namespace {

Reduction parse_reduction(const std::string& text) {
  if (text == "sum") return Reduction::kSum;
  if (text == "max") return Reduction::kMax;
  throw InvalidArgument(concat("reduction: expected sum or max, got ", text));
}

// Of host backends' arrays, which are NumPy's, or DeviceArrays.
Tensor tensor_of(const py::object& array) {
  if (py::isinstance<DeviceArray>(array)) return array.cast<DeviceArray&>().view;
  auto numpy = array.cast<py::array>();
  return host_view(numpy);
}

NcclLibrary open(const std::string& folder) {
  if (folder.empty()) return open_nccl();
  const std::string folders[] = {folder};
  return open_nccl(folders);
}

// `is_done` stands for a device's queue where there is none.
std::unique_ptr<Communicator> make_nccl(Backend& backend, const std::string& folder, int rank,
                                        int world_size, double timeout_s,
                                        const std::optional<std::function<bool()>>& is_done) {
  NcclLibrary library = open(folder);
  NcclOptions options{.rank = rank, .world_size = world_size, .memory = &backend.memory()};
  options.id = make_nccl_id(library);
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  if (backend.memory().is_host())
    options.queue.is_done = is_done.value_or([] { return true; });
  else
    options.queue = cuda_queue(backend);
  const py::gil_scoped_release release;
  return std::make_unique<NcclCommunicator>(std::move(library), std::move(options));
}

}  // namespace

void register_testing_comm(py::module_& testing) {
  using namespace py::literals;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Communicator>(testing, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world_size", &Communicator::world_size)
      .def_property_readonly("description", &Communicator::description)
      .def(
          "all_reduce",
          [](Communicator& self, const py::object& data, const std::string& reduction) {
            self.all_reduce(tensor_of(data), parse_reduction(reduction));
          },
          "data"_a, "reduction"_a = "sum")
      .def(
          "all_gather",
          [](Communicator& self, const py::object& x, const py::object& out) {
            self.all_gather(tensor_of(x), tensor_of(out));
          },
          "x"_a, "out"_a)
      .def(
          "reduce_scatter",
          [](Communicator& self, const py::object& x, const py::object& out,
             const std::string& reduction) {
            self.reduce_scatter(tensor_of(x), tensor_of(out), parse_reduction(reduction));
          },
          "x"_a, "out"_a, "reduction"_a = "sum")
      .def(
          "broadcast",
          [](Communicator& self, const py::object& data, int root) {
            self.broadcast(tensor_of(data), root);
          },
          "data"_a, "root"_a = 0)
      .def("wait", &Communicator::wait, Unlocked())
      .def("barrier", &Communicator::barrier, Unlocked())
      .def("check", &Communicator::check)
      .def("abort", &Communicator::abort);
  testing.def("local_communicator", []() -> std::unique_ptr<Communicator> {
    return std::make_unique<LocalCommunicator>();
  });
  testing.def("nccl_communicator", &make_nccl, "backend"_a, py::kw_only(), "folder"_a = "",
              "rank"_a = 0, "world_size"_a = 1, "timeout_s"_a = 60.0, "is_done"_a = py::none(),
              py::keep_alive<0, 1>());
  testing.def(
      "nccl_library",
      [](const std::string& folder) {
        const NcclLibrary library = open(folder);
        return py::make_tuple(library.path, library.version, library.description());
      },
      "folder"_a = "", "(path, version, description)");
}

}  // namespace llmserve
