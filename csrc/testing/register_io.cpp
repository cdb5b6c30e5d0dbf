// The parsers of untrusted files, for the tests.
#include <filesystem>
#include <memory>
#include <string>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/model_records.h"
#include "core/error.h"
#include "io/mapped_file.h"
#include "io/text_part.h"
#include "models/config_reader.h"
#include "quant/quant_format.h"
#include "testing/register.h"

namespace py = pybind11;

namespace llmserve {
namespace {

JsonDocument parse_config(const std::string& text) {
  return take_text_part(
             Checkpoint("config", "config.json", JsonDocument::parse("config.json", text), {}, {}))
      .config();
}

py::object to_python(const JsonValue& value) {
  struct Visitor {
    py::object operator()(std::monostate) const { return py::none(); }
    py::object operator()(bool b) const { return py::bool_(b); }
    py::object operator()(int64_t i) const { return py::int_(i); }
    py::object operator()(double d) const { return py::float_(d); }
    py::object operator()(const std::string& s) const { return py::str(s); }
    py::object operator()(const JsonValue::Array& array) const {
      py::list out;
      for (const JsonValue& item : array) out.append(to_python(item));
      return out;
    }
    py::object operator()(const JsonValue::Object& object) const {
      py::dict out;
      for (const JsonMember& member : object) out[py::str(member.key)] = to_python(member.value);
      return out;
    }
  };
  return std::visit(Visitor{}, value.data);
}

// `blocks` must be whole blocks.
py::array_t<float> dequantize(const std::string& format_name, const py::bytes& blocks) {
  const std::string_view bytes(blocks);
  for (const QuantFormat& format : quant_format_registry()) {
    if (format.name != format_name) continue;
    const int64_t num_blocks = std::ssize(bytes) / format.block_bytes;
    py::array_t<float> out(num_blocks * format.block_elements);
    format.dequantize(reinterpret_cast<const std::byte*>(bytes.data()), num_blocks,
                      out.mutable_data());
    return out;
  }
  throw InvalidArgument(concat("no format ", format_name));
}

// A file as checkpoints map theirs.
class TestedFile {
 public:
  explicit TestedFile(const std::filesystem::path& path)
      : file_(CheckpointDirectory(path.parent_path().empty() ? "." : path.parent_path().string())
                  .map(path.filename().string())) {}
  py::bytes read(size_t begin, size_t num_bytes) const {
    return py::bytes(std::string(file_->text().substr(begin, num_bytes)));
  }
  void check() const { file_->read_state()->check(); }

 private:
  std::shared_ptr<const MappedFile> file_;
};

}  // namespace

void register_testing_io(py::module_& testing) {
  py::class_<TestedFile>(testing, "MappedFile")
      .def(py::init([](const std::string& path) { return TestedFile(path); }))
      .def("read", &TestedFile::read)
      .def("check", &TestedFile::check);
  testing.def("dequantize", &dequantize);
  testing.def("parse_json", [](const std::string& file, const py::bytes& text) {
    return to_python(JsonDocument::parse(file, std::string_view(text)).root());
  });
  testing.def("list_tensors",
              [](const std::string& path) { return tensor_list(open_checkpoint(path)); });
  // Without Python's objects, to tell what opening takes.
  testing.def("count_tensors",
              [](const std::string& path) { return open_checkpoint(path).tensors().size(); });
  testing.def(
      "parse_model_config",
      [](const std::string& text, int64_t max_model_len) {
        return to_dict(read_model_config(parse_config(text), max_model_len));
      },
      py::arg("text"), py::arg("max_model_len") = 0);
  testing.def(
      "rope_frequencies",
      [](const std::string& text, int64_t max_model_len) {
        const ModelConfig config = read_model_config(parse_config(text), max_model_len);
        std::vector<std::pair<std::vector<float>, float>> frequencies;
        for (const RopeParameters& parameters : config.ropes) {
          const RopeFrequencies rope =
              compute_rope(parameters, config.max_position_embeddings, config.max_model_len);
          frequencies.emplace_back(rope.inv_freq, rope.attention_factor);
        }
        return frequencies;
      },
      py::arg("text"), py::arg("max_model_len") = 0,
      "Inverse frequencies and attention factor of each of the model's rotary embeddings.");
}

}  // namespace llmserve
