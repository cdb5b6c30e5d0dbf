#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/register.h"
#include "sampling/processor_queue.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

// A writable view that keeps the job alive, whoever holds it.
template <class T>
py::array_t<T> view_of(std::vector<T>& values, const py::object& job) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data(), job);
}

}  // namespace

void register_processor_queue(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<ProcessorJob, std::shared_ptr<ProcessorJob>>(module, "ProcessorJob")
      .def_readonly("key", &ProcessorJob::key)
      .def_readonly("is_release", &ProcessorJob::is_release)
      .def_property_readonly("token_ids",
                             [](const py::object& self) {
                               return view_of(self.cast<ProcessorJob&>().token_ids, self);
                             })
      .def_property_readonly("logits", [](const py::object& self) {
        return view_of(self.cast<ProcessorJob&>().logits, self);
      });
  py::class_<ProcessorQueue, std::shared_ptr<ProcessorQueue>>(
      module, "ProcessorQueue", "Hands rows of logits to a thread of Python's.")
      .def(py::init<>())
      .def("make_processor", &ProcessorQueue::make_processor, "key"_a)
      .def("take", &ProcessorQueue::take, Release())
      .def("finish", &ProcessorQueue::finish, "job"_a, "error"_a, Release())
      .def_property_readonly("num_taken", &ProcessorQueue::num_taken)
      .def("close", &ProcessorQueue::close, Release());
}

}  // namespace llmserve
