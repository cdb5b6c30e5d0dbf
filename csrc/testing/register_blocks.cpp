// Weights in the blocks of files, on every backend: testing.Backend's.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "kernels/backend.h"
#include "quant/quant_format.h"
#include "testing/staging.h"

namespace py = pybind11;

namespace llmserve {
namespace {

const QuantFormat& find_format(const std::string& name) {
  for (const QuantFormat& format : quant_format_registry())
    if (!format.dtype && format.name == name) return format;
  throw InvalidArgument(concat("format: no blocks of ", name));
}

// Blocks in every row.
int64_t blocks_of_rows(const ConstTensor& rows, const QuantFormat& format) {
  if (rows.dtype != DType::kU8 || rows.rank != 2 || !rows.is_contiguous() ||
      rows.shape[1] % format.block_bytes != 0)
    throw InvalidArgument("rows: expected contiguous rows of whole blocks, as bytes");
  return rows.shape[1] / format.block_bytes;
}

// Rows of K in such blocks, bytes [N, K / elements * bytes of a block], as a file has them.
LinearWeight pack_blocks(Backend& backend, const py::array& rows, const std::string& name) {
  const QuantFormat& format = find_format(name);
  if (!format.integers)
    throw InvalidArgument(concat("format: no linear layer runs on blocks of ", name));
  const ConstTensor view = host_view(rows);
  const int64_t num_blocks = blocks_of_rows(view, format);
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

// Rows of a table in blocks, bytes [V, K / elements * bytes of a block].
py::array_t<float> embedding_of_blocks(Backend& backend, const py::array& table,
                                       const std::string& name,
                                       const std::vector<int32_t>& token_ids, float scale) {
  const QuantFormat& format = find_format(name);
  const ConstTensor view = host_view(table);
  const int64_t width = blocks_of_rows(view, format) * format.block_elements;
  const int64_t num_tokens = std::ssize(token_ids);
  py::array_t<float> out({num_tokens, width});
  const Tensor rows(out.mutable_data(), DType::kF32, {num_tokens, width});
  backend.embedding(
      {.table = view, .token_ids = token_ids, .out = rows, .scale = scale, .blocks = &format});
  return out;
}

}  // namespace

void register_testing_blocks(py::module_& testing, py::class_<Backend>& backend) {
  using namespace py::literals;
  backend.def("pack_blocks", &pack_blocks, "rows"_a, "format"_a, py::keep_alive<0, 1>());
  backend.def("embedding_of_blocks", &embedding_of_blocks, "table"_a, "format"_a, "token_ids"_a,
              "scale"_a = 1.0f);
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
