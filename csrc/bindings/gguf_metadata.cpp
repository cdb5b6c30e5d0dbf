#include "bindings/gguf_metadata.h"

#include "core/error.h"
#include "io/gguf.h"

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

}  // namespace

py::dict read_gguf_metadata(const std::string& path, const std::string& prefix) {
  const GgufFile file = open_gguf_file(path);
  py::dict out;
  for (const GgufValue& value : file.metadata()) {
    const bool is_read = value.key.starts_with(prefix) && value.type != GgufType::kArray &&
                         !(value.is_array && value.type == GgufType::kBool);
    if (is_read) out[py::str(value.key.data(), value.key.size())] = to_python(file, value);
  }
  return out;
}

}  // namespace llmserve
