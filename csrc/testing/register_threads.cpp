// `llmserve._core_testing.ThreadPool`: who gets which part of a range, and who sleeps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <tuple>
#include <vector>

#include "core/thread_pool.h"
#include "testing/register.h"

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

// Begin, end and thread of every piece, in the order in which they were done. The first piece of
// `held_thread`, if it gets one, is not done before all others are, or 60 s have passed.
std::vector<std::tuple<int64_t, int64_t, int>> pieces(ThreadPool& pool, int64_t count,
                                                      int64_t grain, int64_t max_piece,
                                                      int held_thread) {
  const py::gil_scoped_release release;
  std::vector<std::tuple<int64_t, int64_t, int>> done;
  std::mutex mutex;
  std::condition_variable changed;
  int64_t num_done = 0;
  bool has_held = false;
  pool.parallel_pieces(count, grain, max_piece, [&](int64_t begin, int64_t end, int thread_idx) {
    std::unique_lock lock(mutex);
    if (thread_idx == held_thread && !has_held) {
      has_held = true;
      changed.wait_for(lock, std::chrono::seconds(60),
                       [&] { return num_done + (end - begin) >= count; });
    }
    done.emplace_back(begin, end, thread_idx);
    num_done += end - begin;
    changed.notify_all();
  });
  return done;
}

// Calls fn once a thread; those of `failing` have no memory. How many were called.
int64_t fail(ThreadPool& pool, const std::vector<int>& failing) {
  const py::gil_scoped_release release;
  std::atomic<int64_t> num_called{0};
  pool.parallel_for(pool.num_threads(), 1, [&](int64_t, int64_t, int thread_idx) {
    ++num_called;
    if (std::ranges::count(failing, thread_idx) > 0) throw std::bad_alloc();
  });
  return num_called;
}

}  // namespace

void register_testing_threads(py::module_& testing) {
  py::class_<ThreadPool>(testing, "ThreadPool")
      .def(py::init<int>(), py::arg("num_threads"))
      .def("owners", &owners, py::arg("count"), py::arg("grain"),
           "The thread that parallel_for gave each index to; -1: none did, -2: more than one.")
      .def("pieces", &pieces, py::arg("count"), py::arg("grain"), py::arg("max_piece"),
           py::arg("held_thread") = -1,
           "(begin, end, thread) of parallel_pieces, as they were done; held_thread's first comes "
           "last.")
      .def("fail", &fail, py::arg("failing"),
           "Has these threads of a parallel_for throw bad_alloc.")
      .def_property_readonly("num_parked", &ThreadPool::num_parked);
}

}  // namespace llmserve
