// `llmserve.Array`: memory of the engine's that torch, NumPy and others read in place.
#include "bindings/array.h"

#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/register.h"
#include "core/error.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

// What a capsule's struct points to. Lives until the consumer's deleter runs, on whatever thread.
template <class Managed>
struct Exported {
  Managed managed;
  std::array<int64_t, kMaxRank> shape;
  std::array<int64_t, kMaxRank> strides;
  std::shared_ptr<const void> owner;
};

dlpack::Tensor export_tensor(const Tensor& tensor, int64_t* shape, int64_t* strides) {
  return {.data = tensor.data,
          .rank = tensor.rank,
          .dtype = dlpack_type(tensor.dtype),
          .shape = shape,
          .strides = strides};
}

template <class Managed>
std::unique_ptr<Exported<Managed>> export_as(const Array& array) {
  auto exported = std::make_unique<Exported<Managed>>();
  exported->shape = array.tensor().shape;
  exported->strides = array.tensor().strides;
  exported->owner = array.owner();
  exported->managed.tensor =
      export_tensor(array.tensor(), exported->shape.data(), exported->strides.data());
  exported->managed.context = exported.get();
  exported->managed.deleter = [](Managed* self) {
    delete static_cast<Exported<Managed>*>(self->context);
  };
  return exported;
}

// A capsule that nobody consumed still has its first name, and frees what it holds.
template <class Managed>
py::object to_capsule(std::unique_ptr<Exported<Managed>> exported, const char* name) {
  PyObject* capsule = PyCapsule_New(&exported->managed, name, [](PyObject* self) {
    const char* given = PyCapsule_GetName(self);
    const bool is_unused = given == std::string_view(dlpack::kCapsule) ||
                           given == std::string_view(dlpack::kVersionedCapsule);
    if (!is_unused) return;
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(self, given));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  exported.release();
  return py::reinterpret_steal<py::object>(capsule);
}

// The protocol's errors are BufferErrors: that is what consumers catch.
py::object to_dlpack(const Array& self, const py::object& stream,
                     std::optional<std::pair<int32_t, int32_t>> max_version,
                     std::optional<std::pair<int32_t, int32_t>> dl_device,
                     std::optional<bool> copy) {
  if (!stream.is_none()) throw py::buffer_error("an array in host memory takes stream=None");
  if (dl_device && *dl_device != std::pair<int32_t, int32_t>(dlpack::kCpu, 0)) {
    throw py::buffer_error("expected dl_device (1, 0), the CPU; copy it to another device there");
  }
  const bool is_copied = copy.value_or(false);
  const Array array = is_copied ? Array::copy_of(self.tensor()) : self;
  if (max_version && max_version->first >= static_cast<int32_t>(dlpack::kMajorVersion)) {
    auto exported = export_as<dlpack::VersionedManagedTensor>(array);
    exported->managed.flags =
        (array.is_read_only() ? dlpack::kReadOnly : 0) | (is_copied ? dlpack::kIsCopied : 0);
    return to_capsule(std::move(exported), dlpack::kVersionedCapsule);
  }
  if (array.is_read_only()) {
    throw py::buffer_error(
        "a read-only array crosses by DLPack 1.0 or later (max_version); use copy=True");
  }
  return to_capsule(export_as<dlpack::ManagedTensor>(array), dlpack::kCapsule);
}

// The array as NumPy sees it, in place, or of bfloat16 the same values in float32.
py::array to_numpy(const py::object& self, std::optional<bool> copy) {
  const auto& array = self.cast<const Array&>();
  const Tensor& tensor = array.tensor();
  if (tensor.dtype == DType::kBF16) {
    if (copy == false) {
      throw py::value_error(
          "NumPy has no bfloat16: it gets float32 values, which are a copy; read the array in "
          "place by DLPack (torch.from_dlpack)");
    }
    return to_numpy(py::cast(Array::convert(tensor, DType::kF32)), copy);
  }
  std::vector<py::ssize_t> shape, strides;
  for (int d = 0; d < tensor.rank; ++d) {
    shape.push_back(tensor.shape[d]);
    strides.push_back(tensor.strides[d] * size_bytes(tensor.dtype));
  }
  py::array view(py::dtype(std::string(name(tensor.dtype))), shape, strides, tensor.data, self);
  if (array.is_read_only()) view.attr("setflags")("write"_a = false);
  return view;
}

py::object to_numpy_as(const py::object& self, const py::object& dtype, std::optional<bool> copy) {
  py::object array = to_numpy(self, copy);
  if (!dtype.is_none() && !py::dtype::from_args(dtype).equal(array.attr("dtype"))) {
    if (copy == false) throw py::value_error("another dtype takes a copy");
    return array.attr("astype")(dtype);
  }
  return copy == true ? array.attr("copy")() : array;
}

Array make_array(const py::object& values, const std::optional<std::string>& dtype) {
  const ImportedArray array("values", values);
  if (!dtype) return Array::copy_of(array.view());
  for (const DType wanted : {DType::kF32, DType::kBF16})
    if (name(wanted) == *dtype) return Array::convert(array.view(), wanted);
  throw InvalidArgument(concat("dtype: expected float32 or bfloat16, got '", *dtype, "'"));
}

}  // namespace

void register_array(py::module_& module) {
  py::class_<Array>(module, "Array", R"doc(
An array that other libraries read in place: ``torch.from_dlpack(array)``, ``numpy.asarray(array)``
and whatever else takes ``__dlpack__``. All of them share its memory, which lives as long as the
last one. NumPy has no bfloat16 and gets a copy in float32; by DLPack it stays bfloat16.

``Array(values, dtype=None)`` copies an array into memory of its own, as dtype "float32" or
"bfloat16" (rounded to nearest even) where one is given.

>>> import numpy
>>> from llmserve import Array
>>> array = Array(numpy.array([1.0, 1.001], numpy.float32), "bfloat16")
>>> array
Array(bfloat16 [2])
>>> numpy.asarray(array)
array([1., 1.], dtype=float32)
)doc")
      .def(py::init(&make_array), "values"_a, "dtype"_a = py::none())
      .def_property_readonly("shape",
                             [](const Array& self) {
                               py::tuple shape(static_cast<size_t>(self.tensor().rank));
                               for (size_t d = 0; d < shape.size(); ++d)
                                 shape[d] = self.tensor().shape[d];
                               return shape;
                             })
      .def_property_readonly("dtype", [](const Array& self) { return name(self.tensor().dtype); })
      .def("__len__",
           [](const Array& self) {
             if (self.tensor().rank == 0) throw py::type_error("an array without dimensions");
             return self.tensor().shape[0];
           })
      .def("__repr__",
           [](const Array& self) { return concat("Array(", describe(self.tensor()), ")"); })
      .def("__dlpack_device__",
           [](const Array&) { return std::pair<int32_t, int32_t>(dlpack::kCpu, 0); })
      .def("__dlpack__", &to_dlpack, py::kw_only(), "stream"_a = py::none(),
           "max_version"_a = py::none(), "dl_device"_a = py::none(), "copy"_a = py::none())
      .def("__array__", &to_numpy_as, "dtype"_a = py::none(), "copy"_a = py::none())
      // For copy and pickle.
      .def("__reduce__", [](const py::object& self) {
        const DType dtype = self.cast<const Array&>().tensor().dtype;
        const py::object as = dtype == DType::kBF16 ? py::cast(name(dtype)) : py::none();
        return py::make_tuple(py::type::of(self), py::make_tuple(to_numpy(self, {}), as));
      });
}

}  // namespace llmserve
