// A checkpoint that is open: what a start reads of it, from one look at its files.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/register.h"
#include "core/error.h"
#include "io/checkpoint.h"
#include "io/gguf.h"
#include "models/config_reader.h"

namespace py = pybind11;

namespace llmserve {
namespace {

py::str to_text(const GgufFile& file, const GgufValue& value, std::string_view bytes) {
  PyObject* text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), nullptr);
  if (!text) {
    PyErr_Clear();
    file.fail(value.key, "expected UTF-8 text");
  }
  return py::reinterpret_steal<py::str>(text);
}

py::object to_number(const GgufFile& file, const GgufValue& value, int64_t idx) {
  const bool is_float = value.type == GgufType::kF32 || value.type == GgufType::kF64;
  if (is_float) return py::float_(file.number(value, idx));
  return py::int_(file.integer(value, idx));
}

py::bytes to_bytes(const GgufFile& file, const GgufValue& value) {
  return {reinterpret_cast<const char*>(file.file()->bytes().data()) + value.offset,
          static_cast<size_t>(value.count)};
}

py::object to_list(const GgufFile& file, const GgufValue& value) {
  if (value.type == GgufType::kU8 || value.type == GgufType::kI8) return to_bytes(file, value);
  py::list out(value.count);
  if (value.type == GgufType::kString) {
    size_t i = 0;
    file.for_each_string(value,
                         [&](std::string_view text) { out[i++] = to_text(file, value, text); });
    return out;
  }
  for (int64_t i = 0; i < value.count; ++i) out[static_cast<size_t>(i)] = to_number(file, value, i);
  return out;
}

py::object to_python(const GgufFile& file, const GgufValue& value) {
  if (value.is_array) return to_list(file, value);
  if (value.type == GgufType::kString) return to_text(file, value, file.string(value));
  if (value.type == GgufType::kBool) return py::bool_(file.boolean(value));
  return to_number(file, value, 0);
}

// The metadata whose keys begin with `prefix`: int, float, bool, str, a list of them, or bytes for
// an array of 8-bit integers. Nested arrays are left out. Throws CorruptFile: text that is not
// UTF-8.
py::dict metadata(const GgufFile& file, const std::string& prefix) {
  py::dict out;
  for (const GgufValue& value : file.metadata()) {
    const bool is_read = value.key.starts_with(prefix) && value.type != GgufType::kArray &&
                         !(value.is_array && value.type == GgufType::kBool);
    if (is_read) out[py::str(value.key.data(), value.key.size())] = to_python(file, value);
  }
  return out;
}

// The same mapping, whose header is read again: it is short beside the tensors.
std::optional<GgufFile> gguf_of(const Checkpoint& checkpoint) {
  if (checkpoint.format() != "gguf") return std::nullopt;
  return GgufFile(checkpoint.files()[0]);
}

}  // namespace

void register_checkpoint(py::module_& module) {
  py::class_<GgufFile>(module, "GgufFile")
      .def(py::init(&open_gguf_file), py::arg("path"), py::call_guard<py::gil_scoped_release>())
      .def("metadata", &metadata, py::arg("prefix"),
           "The metadata whose keys begin with `prefix`, by key.");
  py::class_<Checkpoint, std::shared_ptr<Checkpoint>>(module, "Checkpoint")
      .def(py::init([](const std::string& path, std::string config_text) {
             const py::gil_scoped_release release;
             return std::make_shared<Checkpoint>(open_checkpoint(path, std::move(config_text)));
           }),
           py::arg("path"), py::arg("config_text") = "",
           "config_text is read in the place of config.json, unless it is empty.")
      .def_property_readonly("path", &Checkpoint::path)
      .def_property_readonly("gguf", &gguf_of, "The file, if it is one: nothing is opened again.")
      .def(
          "read_vocab_size",
          [](const Checkpoint& checkpoint) {
            return read_model_config(checkpoint.config()).vocab_size;
          },
          "V of the model.");
}

}  // namespace llmserve
