// Weights in the blocks of files, and in any format that is made of its traits, on every backend:
// testing.Backend's.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.h"
#include "kernels/backend.h"
#include "quant/fp8_activations.h"
#include "quant/linear_format.h"
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

ScaleType parse_scale_type(const std::string& name) {
  constexpr std::pair<std::string_view, ScaleType> kTypes[] = {
      {"float32", ScaleType::kF32},
      {"float16", ScaleType::kF16},
      {"bfloat16", ScaleType::kBF16},
      {"fp8", ScaleType::kE4M3},
      {"power-of-two", ScaleType::kPowerOfTwo}};
  for (const auto& [known, type] : kTypes)
    if (known == name) return type;
  throw InvalidArgument(concat("scale_type: none is called '", name, "'"));
}

const LinearFormat& make_format(int bits, int64_t group_size, const std::string& scale_type,
                                bool has_min, bool has_zero, bool has_row_scale, bool is_fp8,
                                const std::vector<int8_t>& table, const std::vector<float>& values,
                                float outlier_threshold, bool rounds_to_fp8) {
  for (const size_t size : {table.size(), values.size()})
    if (size != 0 && size != 16) throw InvalidArgument("table, values: expected 16 numbers");
  const LinearFormat& made = linear_format({.bits = bits,
                                            .group_size = group_size,
                                            .has_min = has_min,
                                            .scale_type = parse_scale_type(scale_type),
                                            .table = table.empty() ? nullptr : table.data(),
                                            .has_zero = has_zero,
                                            .has_row_scale = has_row_scale,
                                            .values = values.empty() ? nullptr : values.data(),
                                            .is_fp8 = is_fp8,
                                            .outlier_threshold = outlier_threshold});
  return rounds_to_fp8 ? with_fp8_activations(made) : made;
}

template <class T>
using Numbers = py::array_t<T, py::array::c_style>;

// Of row i, `count` numbers, which there may be none of.
template <class T>
void copy_row(const std::optional<Numbers<T>>& from, int64_t i, int64_t count, T* to) {
  if (from)
    std::copy_n(from->data() + i * count, count, to);
  else
    std::fill_n(to, count, T{});
}

// Numbers q [N, K], as LinearFormat says, scales (and minima) [N, groups], zero points [N, groups]
// and scales of rows [N].
LinearWeight pack_numbers(Backend& backend, const LinearFormat& format, const Numbers<int8_t>& q,
                          const Numbers<float>& scales, const std::optional<Numbers<float>>& mins,
                          const std::optional<Numbers<int16_t>>& zeros,
                          const std::optional<Numbers<float>>& row_scales,
                          const std::optional<std::vector<int32_t>>& input_order) {
  const int64_t n = q.shape(0);
  const int64_t k = q.shape(1);
  check_fits(format, "q", k);
  const int64_t groups = format.num_groups(k);
  const auto check = [](const char* name, py::ssize_t size, int64_t expected) {
    if (size != expected)
      throw InvalidArgument(concat(name, ": expected ", expected, " numbers, got ", size));
  };
  check("scales", scales.size(), n * groups);
  if (mins) check("mins", mins->size(), n * groups);
  if (format.has_zero) check("zeros", zeros ? zeros->size() : 0, n * groups);
  if (format.has_row_scale) check("row_scales", row_scales ? row_scales->size() : 0, n);
  if (input_order) check("input_order", std::ssize(*input_order), k);
  py::gil_scoped_release release;
  LinearWeight weight =
      backend.pack_quantized(format, n, k, [&](int64_t i, const QuantizedRow& row) {
        std::copy_n(q.data() + i * k, k, row.values);
        std::copy_n(scales.data() + i * groups, groups, row.scales);
        copy_row(mins, i, groups, row.mins);
        if (format.has_zero) copy_row(zeros, i, groups, row.zeros);
        if (format.has_row_scale) copy_row(row_scales, i, 1, row.row_scale);
      });
  if (input_order) weight.input_order = std::make_shared<std::vector<int32_t>>(*input_order);
  return weight;
}

}  // namespace

void register_testing_blocks(py::module_& testing, py::class_<Backend>& backend) {
  using namespace py::literals;
  backend.def("pack_blocks", &pack_blocks, "rows"_a, "format"_a, py::keep_alive<0, 1>());
  backend.def("embedding_of_blocks", &embedding_of_blocks, "table"_a, "format"_a, "token_ids"_a,
              "scale"_a = 1.0f);
  py::class_<LinearFormat, std::unique_ptr<LinearFormat, py::nodelete>>(
      testing, "LinearFormat", "How a weight's numbers are kept; made once of its traits.")
      .def_readonly("name", &LinearFormat::name)
      .def_property_readonly("description",
                             [](const LinearFormat& self) { return describe(self); });
  testing.def("make_format", &make_format, "bits"_a = 8, "group_size"_a = 0,
              "scale_type"_a = "float32", py::kw_only(), "has_min"_a = false, "has_zero"_a = false,
              "has_row_scale"_a = false, "is_fp8"_a = false, "table"_a = std::vector<int8_t>{},
              "values"_a = std::vector<float>{}, "outlier_threshold"_a = 0.0f,
              "rounds_to_fp8"_a = false, py::return_value_policy::reference);
  backend.def("pack_numbers", &pack_numbers, "format"_a, "q"_a, "scales"_a, py::kw_only(),
              "mins"_a = py::none(), "zeros"_a = py::none(), "row_scales"_a = py::none(),
              "input_order"_a = py::none(), py::keep_alive<0, 1>());
  backend.def(
      "packed_bytes_format",
      [](const Backend& self, int64_t n, int64_t k, const LinearFormat& format) {
        return self.packed_bytes(n, k, format);
      },
      "out_features"_a, "in_features"_a, "format"_a);
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
