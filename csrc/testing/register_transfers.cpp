// Transfers of blocks between a backend's memory and the host's, for tests and benchmarks.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/block_runs.h"
#include "kernels/cuda_loader.h"
#include "kernels/piece_runs.h"
#include "testing/staging.h"

namespace py = pybind11;

namespace llmserve {

void register_testing_transfers(py::module_& testing, py::class_<Backend>& backend);

namespace {

// A float32 NumPy array of zeros in the memory that blocks are transferred to.
py::array transfer_array(const py::object& self, const std::vector<py::ssize_t>& shape) {
  py::ssize_t num_elements = 1;
  for (const py::ssize_t dim : shape) num_elements *= dim;
  auto memory = std::make_unique<std::pair<py::object, Buffer>>(
      self, Buffer(num_elements * static_cast<py::ssize_t>(sizeof(float)),
                   self.cast<Backend&>().transfer_memory()));
  auto* data = reinterpret_cast<float*>(memory->second.data());
  const py::capsule owner(memory.release(), [](void* held) {
    const std::unique_ptr<std::pair<py::object, Buffer>> pair(
        static_cast<std::pair<py::object, Buffer>*>(held));
    pair->second = Buffer();  // before its backend
  });
  return py::array_t<float>(shape, data, owner);
}

// Host backends' device arrays are NumPy's.
Tensor cache_of(py::object& array) {
  if (py::isinstance<DeviceArray>(array)) return cache_part_of(array.cast<DeviceArray&>().view);
  auto numpy = array.cast<py::array>();
  return cache_part_of(host_view(numpy));
}

// Of a device array: where it begins, in bytes, and its size.
using Piece = std::tuple<DeviceArray*, int64_t, int64_t>;

std::vector<DevicePiece> pieces_of(const std::vector<Piece>& pieces) {
  std::vector<DevicePiece> found;
  for (const auto& [array, begin, num_bytes] : pieces)
    found.push_back({static_cast<std::byte*>(array->view.data) + begin, num_bytes});
  return found;
}

// What the host has of them, or gets: [bytes] u8.
using HostBytes = py::array_t<uint8_t, py::array::c_style>;

void read(DeviceCopies& copies, const std::vector<Piece>& pieces, HostBytes& out) {
  const std::vector<DevicePiece> found = pieces_of(pieces);
  uint8_t* const to = out.mutable_data();
  const auto num_bytes = static_cast<size_t>(out.size());
  const py::gil_scoped_release release;
  copies.read(found, [&](const std::byte* staged) { std::memcpy(to, staged, num_bytes); });
}

void write(DeviceCopies& copies, const std::vector<Piece>& pieces, const HostBytes& data) {
  const std::vector<DevicePiece> found = pieces_of(pieces);
  const uint8_t* const from = data.data();
  const auto num_bytes = static_cast<size_t>(data.size());
  const py::gil_scoped_release release;
  copies.write(found, [&](std::byte* staged) { std::memcpy(staged, from, num_bytes); });
}

}  // namespace

void register_testing_transfers(py::module_& testing, py::class_<Backend>& backend) {
  using namespace py::literals;
  testing.def(
      "piece_runs",
      [](const std::vector<std::pair<int64_t, int64_t>>& pieces, int64_t max_stride) {
        std::byte* const begin = nullptr;
        std::vector<DevicePiece> given;
        for (const auto& [at, num_bytes] : pieces) given.push_back({begin + at, num_bytes});
        std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>> result;
        for (const PieceRun& run : piece_runs(given, max_stride))
          result.emplace_back(run.data - begin, run.num_bytes, run.stride, run.count);
        return result;
      },
      "pieces"_a, "max_stride"_a, "[(place, bytes)] -> [(place, bytes, stride, count)]");
  py::class_<DeviceCopies>(testing, "DeviceCopies", "Parts of a device's memory, beside its ops.")
      .def("mark", &DeviceCopies::mark, "step"_a)
      .def("follow", &DeviceCopies::follow, "step"_a)
      .def("read", &read, "pieces"_a, py::arg("out").noconvert(), "[(array, first byte, bytes)]")
      .def("write", &write, "pieces"_a, "data"_a);
  backend.def(
      "make_copies",
      [](Backend& self, int64_t max_bytes) { return make_cuda_copies(self, max_bytes); },
      "max_bytes"_a, py::keep_alive<0, 1>());
  testing.def(
      "block_runs",
      [](const std::vector<std::pair<int32_t, int32_t>>& pairs) {
        std::vector<std::tuple<int64_t, int64_t, int64_t>> result;
        for (const BlockRun& run : block_runs(pairs))
          result.emplace_back(run.source, run.destination, run.count);
        return result;
      },
      "pairs"_a, "[(source, destination, count)]");
  backend.def("transfer_array", &transfer_array, "shape"_a)
      .def(
          "transfer_blocks",
          [](Backend& self, const std::vector<std::pair<int32_t, int32_t>>& pairs, py::object keys,
             py::object values, py::object host_keys, py::object host_values, bool to_host) {
            return self.transfer_blocks({.pairs = pairs,
                                         .device = {cache_of(keys), cache_of(values)},
                                         .host = {cache_of(host_keys), cache_of(host_values)},
                                         .to_host = to_host});
          },
          "pairs"_a, "keys"_a, "values"_a, "host_keys"_a, "host_values"_a, "to_host"_a)
      .def("is_transferred", &Backend::is_transferred, "id"_a)
      .def("await_transfer", &Backend::await_transfer, "id"_a);
}

}  // namespace llmserve
