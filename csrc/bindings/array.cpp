#include "bindings/array.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "core/error.h"
#include "kernels/host_ops.h"

namespace py = pybind11;

namespace llmserve {
namespace {

constexpr std::align_val_t kAlignment{64};

struct TypeRow {
  DType dtype;
  dlpack::DataType dlpack;
};

constexpr std::array kTypes{
    TypeRow{DType::kF32, {dlpack::kFloat, 32, 1}},   TypeRow{DType::kF16, {dlpack::kFloat, 16, 1}},
    TypeRow{DType::kBF16, {dlpack::kBFloat, 16, 1}}, TypeRow{DType::kF64, {dlpack::kFloat, 64, 1}},
    TypeRow{DType::kI8, {dlpack::kInt, 8, 1}},       TypeRow{DType::kU8, {dlpack::kUInt, 8, 1}},
    TypeRow{DType::kI16, {dlpack::kInt, 16, 1}},     TypeRow{DType::kI32, {dlpack::kInt, 32, 1}},
    TypeRow{DType::kI64, {dlpack::kInt, 64, 1}},     TypeRow{DType::kBool, {dlpack::kBool, 8, 1}},
};

[[noreturn]] void refuse_dtype(const std::string& name_of_argument, const std::string& got) {
  std::string names;
  for (const TypeRow& row : kTypes) names += concat(names.empty() ? "" : ", ", name(row.dtype));
  throw InvalidArgument(
      concat(name_of_argument, ": expected elements of ", names, ", got ", got, "; convert it"));
}

DType dtype_of(const std::string& name_of_argument, dlpack::DataType type) {
  for (const TypeRow& row : kTypes) {
    if (row.dlpack.code == type.code && row.dlpack.bits == type.bits && type.lanes == 1)
      return row.dtype;
  }
  refuse_dtype(name_of_argument, concat("DLPack type code ", int{type.code}, " with ",
                                        int{type.bits}, " bits and ", type.lanes, " lanes"));
}

DType dtype_of(const std::string& name_of_argument, const py::dtype& type) {
  constexpr std::string_view kKinds = "iufb";
  constexpr std::array kCodes{dlpack::kInt, dlpack::kUInt, dlpack::kFloat, dlpack::kBool};
  const size_t kind = kKinds.find(type.kind());
  const bool is_native = py::bool_(type.attr("isnative"));
  for (const TypeRow& row : kTypes) {
    if (kind != std::string_view::npos && is_native && row.dlpack.code == kCodes[kind] &&
        row.dlpack.bits == 8 * type.itemsize())
      return row.dtype;
  }
  refuse_dtype(name_of_argument, py::str(type));
}

void check_rank(const std::string& name, int64_t rank) {
  if (rank > kMaxRank) {
    throw InvalidArgument(
        concat(name, ": expected at most ", kMaxRank, " dimensions, got ", rank, "; reshape it"));
  }
}

bool is_host(int32_t type) { return type == dlpack::kCpu || type == dlpack::kCudaHost; }

[[noreturn]] void refuse_host(const std::string& name, const ArrayPlace& place) {
  throw InvalidArgument(concat(name, ": expected an array on CUDA device ", place.device,
                               " like the call's others, got one in host memory; copy it there "
                               "(torch: .to('cuda:",
                               place.device, "')), or pass backend='cpu' and all in host memory"));
}

void check_device(const std::string& name, dlpack::Device device, const ArrayPlace& place) {
  if (is_host(device.type)) {
    if (place.is_cuda) refuse_host(name, place);
    return;
  }
  if (place.is_cuda && device.type == dlpack::kCuda && device.id == place.device) return;
  const std::string where =
      device.type == dlpack::kCuda ? "CUDA" : concat("DLPack type ", device.type);
  if (place.is_cuda) {
    throw NotSupported(concat(name, ": expected an array on CUDA device ", place.device,
                              ", where the backend is, got one on device ", where, " ", device.id,
                              "; copy it there (torch: .to('cuda:", place.device, "'))"));
  }
  throw NotSupported(concat(name, ": expected an array in host memory, got one on device ", where,
                            " ", device.id, "; copy it to the CPU first (torch: .cpu())",
                            device.type == dlpack::kCuda ? ", or pass backend='cuda'" : ""));
}

dlpack::Device device_of(py::handle object) {
  const auto [type, id] = object.attr("__dlpack_device__")().cast<std::pair<int32_t, int32_t>>();
  return {type, id};
}

// `__dlpack__` of this version of the protocol, or of the one before it.
py::object request_capsule(const std::string& name, py::handle object, const ArrayPlace& place) {
  using namespace py::literals;
  const py::object method = object.attr("__dlpack__");
  py::dict options;
  if (place.is_cuda) options["stream"] = place.stream;
  try {
    try {
      return method("max_version"_a = py::make_tuple(dlpack::kMajorVersion, dlpack::kMinorVersion),
                    **options);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      return method(**options);
    }
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    throw InvalidArgument(
        concat(name, ": its __dlpack__() refused: ", std::string(py::str(error.value()))));
  }
}

// The struct in a capsule, which from now on the returned pointer owns.
template <class Managed>
std::shared_ptr<Managed> consume(const py::object& capsule, const char* name, const char* used) {
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (managed == nullptr || PyCapsule_SetName(capsule.ptr(), used) != 0)
    throw py::error_already_set();
  return {managed, [](Managed* self) {
            if (self->deleter) self->deleter(self);
          }};
}

}  // namespace

bool is_on_cuda(py::handle object) {
  return py::hasattr(object, "__dlpack_device__") && device_of(object).type == dlpack::kCuda;
}

dlpack::DataType dlpack_type(DType dtype) {
  for (const TypeRow& row : kTypes)
    if (row.dtype == dtype) return row.dlpack;
  throw NotSupported(concat("arrays of ", name(dtype), " do not cross by DLPack"));
}

Array Array::empty(DType dtype, std::span<const int64_t> shape) {
  int64_t num_bytes = size_bytes(dtype);
  bool overflows = false;
  for (const int64_t dim : shape)
    overflows |= __builtin_mul_overflow(num_bytes, dim, &num_bytes) || dim < 0;
  void* data = overflows ? nullptr
                         : ::operator new(static_cast<size_t>(std::max<int64_t>(num_bytes, 1)),
                                          kAlignment, std::nothrow);
  Tensor tensor(data, dtype, {});
  tensor.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    tensor.shape[d] = shape[static_cast<size_t>(d)];
    tensor.strides[d] = stride;
    stride *= tensor.shape[d];
  }
  if (data == nullptr) throw ResourceExhausted(concat("no memory for ", describe(tensor)));
  return {tensor, {data, [](void* memory) { ::operator delete(memory, kAlignment); }}};
}

Array Array::empty_like(const ConstTensor& tensor, DType dtype) {
  std::array<int64_t, kMaxRank> dims = tensor.shape;
  std::fill(dims.begin() + tensor.rank, dims.end(), 1);
  Array result = empty(dtype, dims);
  result.tensor_.rank = tensor.rank;
  return result;
}

Array Array::copy_of(const ConstTensor& tensor) {
  Array result = empty_like(tensor, tensor.dtype);
  const int64_t width = size_bytes(tensor.dtype);
  auto* to = result.tensor_.as<std::byte>();
  std::array<int64_t, kMaxRank> at{};
  for (int64_t i = 0, n = tensor.num_elements(); i < n; ++i, to += width) {
    int64_t offset = 0;
    for (int d = 0; d < tensor.rank; ++d) offset += at[d] * tensor.strides[d];
    std::memcpy(to, tensor.as<std::byte>() + offset * width, static_cast<size_t>(width));
    for (int d = tensor.rank - 1; d >= 0 && ++at[d] == tensor.shape[d]; --d) at[d] = 0;
  }
  return result;
}

Array Array::convert(const ConstTensor& tensor, DType dtype) {
  if (dtype == tensor.dtype) return copy_of(tensor);
  const bool is_float =
      tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16 || tensor.dtype == DType::kF16;
  if (!is_float || (dtype != DType::kF32 && dtype != DType::kBF16)) {
    throw InvalidArgument(
        concat("dtype: expected float32 or bfloat16 of a float32, float16 or bfloat16 array, got ",
               name(dtype), " of ", describe(tensor)));
  }
  const Array plain = copy_of(tensor);
  Array result = empty_like(tensor, dtype);
  const int64_t count = tensor.num_elements();
  if (dtype == DType::kF32) {
    convert_to_f32(plain.tensor_, 0, count, result.tensor_.as<float>());
  } else {
    convert_to_bf16(plain.tensor_, 0, count, result.tensor_.as<uint16_t>());
  }
  return result;
}

ImportedArray::ImportedArray(std::string name, py::handle object, const ArrayPlace& place)
    : name_(std::move(name)) {
  const bool is_ours = py::isinstance<Array>(object);
  if (place.is_cuda && (is_ours || py::isinstance<py::array>(object))) refuse_host(name_, place);
  if (is_ours) {
    const auto& array = object.cast<const Array&>();
    view_ = array.tensor();
    managed_ = array.owner();
    is_read_only_ = array.is_read_only();
  } else if (py::isinstance<py::array>(object)) {
    import_numpy(py::reinterpret_borrow<py::array>(object));
  } else if (py::hasattr(object, "__dlpack__") && py::hasattr(object, "__dlpack_device__")) {
    import_dlpack(object, place);
  } else {
    throw InvalidArgument(concat(
        name_, ": expected a NumPy array, a torch tensor or another array with __dlpack__, got ",
        std::string(py::str(py::type::of(object).attr("__name__")))));
  }
  check_extent();
  // Libraries put anything into strides that are never taken.
  int64_t stride = 1;
  for (int d = view_.rank - 1; d >= 0; --d) {
    if (view_.shape[d] == 1) view_.strides[d] = stride;
    stride *= view_.shape[d];
  }
  check_alignment();
}

void ImportedArray::import_numpy(const py::array& array) {
  check_rank(name_, array.ndim());
  view_.dtype = dtype_of(name_, array.dtype());
  view_.data = array.data();
  view_.rank = static_cast<int>(array.ndim());
  for (int d = 0; d < view_.rank; ++d) {
    view_.shape[d] = array.shape(d);
    view_.strides[d] = array.strides(d) / array.itemsize();
    if (array.strides(d) % array.itemsize() != 0) {
      throw InvalidArgument(concat(name_, ": expected strides of whole elements, got ",
                                   array.strides(d), " bytes; pass a copy"));
    }
  }
  numpy_ = array;
  is_read_only_ = !array.writeable();
}

void ImportedArray::import_dlpack(py::handle object, const ArrayPlace& place) {
  check_device(name_, device_of(object), place);
  const py::object capsule = request_capsule(name_, object, place);
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kVersionedCapsule)) {
    const auto managed = consume<dlpack::VersionedManagedTensor>(capsule, dlpack::kVersionedCapsule,
                                                                 dlpack::kUsedVersionedCapsule);
    managed_ = managed;
    if (managed->version.major != dlpack::kMajorVersion) {
      throw NotSupported(concat(name_, ": expected DLPack version ", dlpack::kMajorVersion,
                                ", got ", managed->version.major, ".", managed->version.minor));
    }
    is_read_only_ = (managed->flags & dlpack::kReadOnly) != 0;
    take(managed->tensor, place);
  } else if (PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule)) {
    const auto managed =
        consume<dlpack::ManagedTensor>(capsule, dlpack::kCapsule, dlpack::kUsedCapsule);
    managed_ = managed;
    take(managed->tensor, place);
  } else {
    throw InvalidArgument(concat(name_, ": its __dlpack__() gave no DLPack capsule"));
  }
}

void ImportedArray::take(const dlpack::Tensor& tensor, const ArrayPlace& place) {
  check_device(name_, tensor.device, place);  // what it said before was about itself
  check_rank(name_, tensor.rank);
  if (tensor.rank < 0 || (tensor.rank > 0 && tensor.shape == nullptr)) {
    throw InvalidArgument(
        concat(name_, ": its DLPack tensor has ", tensor.rank, " dimensions and no shape"));
  }
  view_.dtype = dtype_of(name_, tensor.dtype);
  view_.data = tensor.data == nullptr
                   ? nullptr
                   : static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
  view_.rank = tensor.rank;
  int64_t stride = 1;
  for (int d = view_.rank - 1; d >= 0; --d) {
    view_.shape[d] = tensor.shape[d];
    view_.strides[d] = tensor.strides ? tensor.strides[d] : stride;
    // Where it overflows, check_extent() refuses the shape.
    if (__builtin_mul_overflow(stride, tensor.shape[d], &stride)) stride = 1;
  }
}

// Shapes and strides are any library's. What is counted of them later fits 64 bits.
void ImportedArray::check_extent() const {
  const auto dims = std::span(view_.shape).first(static_cast<size_t>(view_.rank));
  const bool is_empty = std::ranges::count(dims, 0) > 0;
  int64_t num_bytes = size_bytes(view_.dtype), reach_bytes = num_bytes;
  bool overflows = false;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] < 0)
      throw InvalidArgument(concat(name_, ": its dimension ", d, " is negative: ", dims[d]));
    if (dims[d] < 2) continue;
    int64_t reach = 0;
    overflows |= __builtin_mul_overflow(num_bytes, dims[d], &num_bytes);
    overflows |= view_.strides[d] == std::numeric_limits<int64_t>::min() ||
                 __builtin_mul_overflow(std::abs(view_.strides[d]), dims[d] - 1, &reach) ||
                 __builtin_mul_overflow(reach, size_bytes(view_.dtype), &reach) ||
                 __builtin_add_overflow(reach_bytes, reach, &reach_bytes);
  }
  if (overflows) {
    throw InvalidArgument(concat(name_, ": its shape and strides reach further than memory does"));
  }
  if (view_.data == nullptr && !is_empty)
    throw InvalidArgument(concat(name_, ": it has elements, and no memory"));
}

void ImportedArray::check_alignment() const {
  if (reinterpret_cast<uintptr_t>(view_.data) % static_cast<size_t>(size_bytes(view_.dtype)) != 0) {
    throw InvalidArgument(
        concat(name_, ": expected elements at multiples of their size; pass a copy"));
  }
}

Tensor ImportedArray::writable() const {
  if (is_read_only_) {
    throw InvalidArgument(concat(name_, ": expected an array to write to, got a read-only one"));
  }
  // From the densest dimension outwards, each must step over all that lies inside it.
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int d = 0; d < view_.rank; ++d) {
    if (view_.shape[d] > 1) dims.emplace_back(std::abs(view_.strides[d]), view_.shape[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) {
      throw InvalidArgument(
          concat(name_,
                 ": expected elements with memory of their own, got an array whose elements "
                 "overlap; pass a copy"));
    }
    extent += stride * (size - 1);
  }
  Tensor tensor(const_cast<void*>(view_.data), view_.dtype, {});
  tensor.rank = view_.rank;
  tensor.shape = view_.shape;
  tensor.strides = view_.strides;
  return tensor;
}

}  // namespace llmserve
