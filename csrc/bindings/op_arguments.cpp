#include "bindings/op_arguments.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <utility>

#include "bindings/op_call.h"
#include "core/error.h"

namespace py = pybind11;

namespace llmserve {
namespace {

bool is_list(py::handle object) {
  return py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object);
}

// [begin, end) of the bytes that a view touches.
std::pair<const std::byte*, const std::byte*> extent(const ConstTensor& tensor) {
  int64_t low = 0, high = 0;
  for (int d = 0; d < tensor.rank; ++d) {
    if (tensor.shape[d] == 0) return {nullptr, nullptr};
    const int64_t reach = (tensor.shape[d] - 1) * tensor.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  const int64_t width = size_bytes(tensor.dtype);
  return {tensor.as<std::byte>() + low * width, tensor.as<std::byte>() + (high + 1) * width};
}

bool is_same_view(const ConstTensor& a, const ConstTensor& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rank == b.rank && a.shape == b.shape &&
         a.strides == b.strides;
}

template <class T>
T element(const std::string& name, py::handle value) {
  try {
    return value.cast<T>();
  } catch (const py::cast_error&) {
    const char* kind = std::is_integral_v<T> ? "an integer in range" : "a number";
    throw InvalidArgument(
        concat(name, ": expected ", kind, ", got ", std::string(py::repr(value))));
  }
}

int64_t integer_at(const ConstTensor& tensor, int64_t offset) {
  return tensor.dtype == DType::kI32 ? tensor.as<int32_t>()[offset] : tensor.as<int64_t>()[offset];
}

// The module, if something has imported it; none otherwise.
py::object loaded_torch() {
  const py::dict modules = py::module_::import("sys").attr("modules");
  return modules.contains("torch") ? py::object(modules["torch"]) : py::none();
}

bool is_tensor(const py::object& torch, py::handle object) {
  return !torch.is_none() && py::isinstance(object, torch.attr("Tensor"));
}

py::object make_on_device(const std::string& name, DType dtype, std::span<const int64_t> shape,
                          py::handle like) {
  using namespace py::literals;
  const py::object torch = loaded_torch();
  if (!is_tensor(torch, like)) {
    throw NotSupported(concat(name, ": only torch makes new arrays on a device; pass out="));
  }
  const py::object type = torch.attr(py::str(std::string(llmserve::name(dtype))));
  return torch.attr("empty")(py::cast(std::vector<int64_t>(shape.begin(), shape.end())),
                             "dtype"_a = type, "device"_a = like.attr("device"));
}

// A device's array as Python's numbers.
py::object on_host(const std::string& name, const py::object& values) {
  if (!is_on_cuda(values)) return values;
  if (!py::hasattr(values, "tolist"))
    throw InvalidArgument(concat(name, ": expected an array in host memory or a torch tensor"));
  return values.attr("tolist")();
}

ImportedArray import_integers(const std::string& name, const py::object& values, int rank) {
  ImportedArray array(name, values);
  const ConstTensor& view = array.view();
  if ((view.dtype != DType::kI32 && view.dtype != DType::kI64) || view.rank != rank) {
    throw InvalidArgument(concat(name, ": expected int32 or int64 of ", rank,
                                 rank == 1 ? " dimension" : " dimensions", ", got ",
                                 describe(view)));
  }
  return array;
}

int32_t narrow(const std::string& name, int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
    throw InvalidArgument(concat(name, ": expected 32-bit integers, got ", value));
  return static_cast<int32_t>(value);
}

}  // namespace

Activation parse_activation(const std::string& name) {
  for (size_t i = 0; i < std::size(kActivations); ++i)
    if (kActivations[i].name == name) return static_cast<Activation>(i);
  throw InvalidArgument(concat("activation: unknown name \"", name, "\""));
}

RouterScore parse_router_score(const std::string& name) {
  for (size_t i = 0; i < std::size(kRouterScores); ++i)
    if (kRouterScores[i] == name) return static_cast<RouterScore>(i);
  throw InvalidArgument(concat("score: unknown name \"", name, "\""));
}

KeyLayout parse_key_layout(const std::string& name) {
  if (name == "rows") return KeyLayout::kRows;
  if (name == "panels") return KeyLayout::kPanels;
  throw InvalidArgument(concat("key_layout: expected rows or panels, got ", name));
}

OutputArray::OutputArray(const std::string& name, const py::object& given, DType dtype,
                         std::span<const int64_t> shape, const ArrayPlace& place, py::handle like)
    : name_(name), given_(given) {
  if (given.is_none() && !place.is_cuda) {
    made_ = Array::empty(dtype, shape);
    tensor_ = made_->tensor();
  } else {
    if (given.is_none()) given_ = make_on_device(name, dtype, shape, like);
    imported_.emplace(name, given_, place);
    tensor_ = imported_->writable();
  }
}

void OutputArray::check_apart(std::span<const ConstTensor> inputs, bool can_be_first) const {
  if (made_) return;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (i == 0 && can_be_first && is_same_view(inputs[i], tensor_)) continue;
    if (overlap(inputs[i], tensor_)) {
      throw InvalidArgument(
          concat(name_, ": expected memory apart from the inputs, got an array that overlaps one",
                 can_be_first ? " without being the first of them" : ""));
    }
  }
}

py::object OutputArray::result(py::handle like) const {
  if (!made_) return given_;
  py::object array = py::cast(*made_);
  if (py::isinstance<py::array>(like)) return array.attr("__array__")();
  const py::object torch = loaded_torch();
  return is_tensor(torch, like) ? torch.attr("from_dlpack")(array) : array;
}

ArrayPlace cuda_place() {
  ArrayPlace place{.is_cuda = true, .device = 0, .stream = 1};
  const py::object torch = loaded_torch();
  if (torch.is_none() || !torch.attr("cuda").attr("is_initialized")().cast<bool>()) return place;
  const py::object stream = torch.attr("cuda").attr("current_stream")(place.device);
  const auto handle = stream.attr("cuda_stream").cast<uint64_t>();
  if (handle != 0) place.stream = handle;  // DLPack's name for the default stream is 1
  return place;
}

bool overlap(const ConstTensor& a, const ConstTensor& b) {
  const auto [a_begin, a_end] = extent(a);
  const auto [b_begin, b_end] = extent(b);
  return a_begin < b_end && b_begin < a_end;
}

std::vector<int64_t> import_int64s(const std::string& name, const py::object& given) {
  const py::object values = on_host(name, given);
  std::vector<int64_t> result;
  if (is_list(values)) {
    for (const py::handle value : values) result.push_back(element<int64_t>(name, value));
    return result;
  }
  const ImportedArray array = import_integers(name, values, 1);
  for (int64_t i = 0; i < array.view().shape[0]; ++i)
    result.push_back(integer_at(array.view(), i * array.view().strides[0]));
  return result;
}

std::vector<int32_t> import_int32s(const std::string& name, const py::object& values) {
  std::vector<int32_t> result;
  for (const int64_t value : import_int64s(name, values)) result.push_back(narrow(name, value));
  return result;
}

BlockTables import_block_tables(const std::string& name, const py::object& given) {
  const py::object tables = on_host(name, given);
  BlockTables result;
  if (is_list(tables)) {
    std::vector<std::vector<int32_t>> rows;
    for (const py::handle row : tables)
      rows.push_back(import_int32s(name, py::reinterpret_borrow<py::object>(row)));
    result.num_rows = static_cast<int64_t>(rows.size());
    for (const auto& row : rows)
      result.max_blocks = std::max(result.max_blocks, static_cast<int64_t>(row.size()));
    for (auto& row : rows) {
      row.resize(static_cast<size_t>(result.max_blocks));
      result.blocks.insert(result.blocks.end(), row.begin(), row.end());
    }
    return result;
  }
  const ImportedArray array = import_integers(name, tables, 2);
  const ConstTensor& view = array.view();
  result.num_rows = view.shape[0];
  result.max_blocks = view.shape[1];
  for (int64_t b = 0; b < view.shape[0]; ++b)
    for (int64_t i = 0; i < view.shape[1]; ++i)
      result.blocks.push_back(
          narrow(name, integer_at(view, b * view.strides[0] + i * view.strides[1])));
  return result;
}

template <class T>
std::vector<T> import_row_values(const std::string& name, const py::object& values,
                                 int64_t num_rows) {
  const py::object list = py::hasattr(values, "tolist") ? values.attr("tolist")() : values;
  if (!is_list(list)) {
    return std::vector<T>(static_cast<size_t>(num_rows), element<T>(name, list));
  }
  std::vector<T> result;
  for (const py::handle value : list) result.push_back(element<T>(name, value));
  if (num_rows >= 0 && static_cast<int64_t>(result.size()) != num_rows) {
    throw InvalidArgument(concat(name, ": expected one value, or one for each of the S=", num_rows,
                                 " rows, got ", result.size()));
  }
  return result;
}

template std::vector<float> import_row_values(const std::string&, const py::object&, int64_t);
template std::vector<int32_t> import_row_values(const std::string&, const py::object&, int64_t);
template std::vector<int64_t> import_row_values(const std::string&, const py::object&, int64_t);
template std::vector<uint64_t> import_row_values(const std::string&, const py::object&, int64_t);

}  // namespace llmserve
