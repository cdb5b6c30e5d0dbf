// `llmserve._core.testing.ThreadPool`: who gets which part of a range, and who sleeps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings/register.h"
#include "core/thread_pool.h"

namespace py = pybind11;

namespace llmserve {
namespace {

constexpr int32_t kNobody = -1;
constexpr int32_t kSeveral = -2;

std::vector<int32_t> owners(ThreadPool& pool, int64_t count, int64_t grain) {
  const py::gil_scoped_release release;
  std::vector<int32_t> threads(static_cast<size_t>(count), kNobody);
  pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t i = begin; i < end; ++i) {
      int32_t& owner = threads[static_cast<size_t>(i)];
      owner = owner == kNobody ? thread_idx : kSeveral;
    }
  });
  return threads;
}

}  // namespace

void register_testing_threads(py::module_& testing) {
  py::class_<ThreadPool>(testing, "ThreadPool")
      .def(py::init<int>(), py::arg("num_threads"))
      .def("owners", &owners, py::arg("count"), py::arg("grain"),
           "The thread that parallel_for gave each index to; -1: none did, -2: more than one.")
      .def_property_readonly("num_parked", &ThreadPool::num_parked);
}

}  // namespace llmserve
