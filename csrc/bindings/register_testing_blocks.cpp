// Weights in the blocks of files, on every backend: testing.Backend's.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/staging.h"
#include "core/error.h"
#include "kernels/backend.h"
#include "quant/quant_format.h"

namespace py = pybind11;

namespace llmserve {
namespace {

const QuantFormat& find_kept_format(const std::string& name) {
  for (const QuantFormat& format : quant_format_registry())
    if (format.integers && format.name == name) return format;
  throw InvalidArgument(concat("format: no linear layer runs on blocks of ", name));
}

// Rows of K in such blocks, bytes [N, K / elements * bytes of a block], as a file has them.
LinearWeight pack_blocks(Backend& backend, const py::array& rows, const std::string& name) {
  const QuantFormat& format = find_kept_format(name);
  const ConstTensor view = host_view(rows);
  if (view.dtype != DType::kU8 || view.rank != 2 || !view.is_contiguous() ||
      view.shape[1] % format.block_bytes != 0)
    throw InvalidArgument("rows: expected contiguous rows of whole blocks, as bytes");
  const int64_t num_blocks = view.shape[1] / format.block_bytes;
  std::atomic<bool> is_finite{true};
  py::gil_scoped_release release;
  LinearWeight weight = backend.pack_quantized(
      *format.integers, view.shape[0], num_blocks * format.block_elements,
      [&](int64_t i, const QuantizedRow& row) {
        if (!format.unpack(view.as<std::byte>() + i * view.strides[0], num_blocks, row))
          is_finite = false;
      });
  if (!is_finite) throw InvalidArgument("pack_blocks: expected finite scales");
  return weight;
}

}  // namespace

void register_testing_blocks(py::module_& testing, py::class_<Backend>& backend) {
  using namespace py::literals;
  backend.def("pack_blocks", &pack_blocks, "rows"_a, "format"_a, py::keep_alive<0, 1>());
  testing.def(
      "kept_formats",
      [] {
        std::vector<std::tuple<std::string, int64_t, int64_t, std::string>> formats;
        for (const QuantFormat& format : quant_format_registry())
          if (format.integers)
            formats.emplace_back(format.name, format.block_elements, format.block_bytes,
                                 format.integers->name);
        return formats;
      },
      "Of files, those whose blocks linear layers run on: name, elements and bytes of a block, and "
      "whose layout it is that they run in.");
}

}  // namespace llmserve
