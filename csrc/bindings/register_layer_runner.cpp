// One decoder layer at a time, for calibration.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/model_records.h"
#include "bindings/register.h"
#include "core/error.h"
#include "engine/layer_runner.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

using Floats = py::array_t<float, py::array::c_style>;

// A NumPy array that is written to: [rows, columns] f32.
Tensor matrix(const char* name, Floats& array, int64_t columns) {
  if (array.ndim() != 2 || array.shape(1) != columns || !array.writeable())
    throw InvalidArgument(concat(name, ": expected a writable float32 array [T, ", columns, "]"));
  return Tensor(array.mutable_data(), DType::kF32, {array.shape(0), array.shape(1)});
}

// Calls Python with the names and the rows, whose memory the array only borrows.
class PythonObserver final : public LinearObserver {
 public:
  explicit PythonObserver(const py::function& see) : see_(see) {}
  void see(std::span<const std::string> weights, const ConstTensor& x) override {
    const py::gil_scoped_acquire acquire;
    const py::capsule borrowed(x.data, [](void*) {});
    const py::array_t<float> rows({x.shape[0], x.shape[1]}, {x.strides[0] * 4, x.strides[1] * 4},
                                  x.as<float>(), borrowed);
    see_(std::vector<std::string>(weights.begin(), weights.end()), rows);
  }

 private:
  const py::function& see_;
};

void check_layer(const ModelConfig& config, int64_t layer_idx) {
  if (layer_idx < 0 || layer_idx >= config.num_layers)
    throw InvalidArgument(
        concat("layer_idx: expected 0 to ", config.num_layers - 1, ", got ", layer_idx));
}

}  // namespace

void register_layer_runner(py::module_& module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<LayerRunner>(module, "LayerRunner",
                          "Runs a decoder's layers one at a time over hidden states.")
      .def(py::init([](const std::string& path, const std::string& config_text,
                       const std::string& dtype, int64_t max_model_len, int64_t max_tokens,
                       int64_t max_sequences, int32_t num_threads) {
             const py::gil_scoped_release release;
             return std::make_unique<LayerRunner>(
                 LayerRunner::Options{.model_path = path,
                                      .config_text = config_text,
                                      .dtype = dtype,
                                      .max_model_len = max_model_len,
                                      .max_tokens = max_tokens,
                                      .max_sequences = max_sequences,
                                      .num_threads = num_threads});
           }),
           "path"_a, py::kw_only(), "config_text"_a = "", "dtype"_a = "auto", "max_model_len"_a = 0,
           "max_tokens"_a = 2048, "max_sequences"_a = 128, "num_threads"_a = 1)
      .def_property_readonly("config",
                             [](const LayerRunner& self) { return to_dict(self.config()); })
      .def_property_readonly("fixed_bytes", &LayerRunner::fixed_bytes)
      .def(
          "layer_names",
          [](const LayerRunner& self, int64_t layer_idx) {
            check_layer(self.config(), layer_idx);
            return layer_names(self.config(), layer_idx);
          },
          "layer_idx"_a, "The full names of a layer's weights, and what its norms do.")
      .def(
          "embed",
          [](LayerRunner& self, const std::vector<int32_t>& token_ids,
             const std::vector<int32_t>& lengths, Floats& hidden) {
            const Tensor to = matrix("hidden", hidden, self.config().hidden_size);
            const py::gil_scoped_release release;
            self.embed(token_ids, lengths, to);
          },
          "token_ids"_a, "lengths"_a, py::arg("hidden").noconvert(),
          "Writes what the first layer reads to hidden [T, E].")
      .def("load", &LayerRunner::load, "layer_idx"_a, "path"_a = "", Unlocked(),
           "Takes a layer's weights, from the model or from another folder.")
      .def("unload", &LayerRunner::unload)
      .def(
          "forward",
          [](LayerRunner& self, const std::vector<int32_t>& lengths, Floats& hidden,
             const std::optional<py::function>& observe) {
            const Tensor rows = matrix("hidden", hidden, self.config().hidden_size);
            std::optional<PythonObserver> observer;
            if (observe) observer.emplace(*observe);
            KvRange range;
            {
              const py::gil_scoped_release release;
              self.forward(lengths, rows, observer ? &*observer : nullptr,
                           observer ? &range : nullptr);
            }
            return std::pair(range.keys, range.values);
          },
          "lengths"_a, py::arg("hidden").noconvert(), "observe"_a = py::none(),
          "hidden [T, E] becomes what the loaded layer makes of it. observe(names, x) is called "
          "with the inputs [M, K] of its linear layers, which are lent for the call. Returns the "
          "largest magnitudes of keys and values, 0 without observe.");
}

}  // namespace llmserve
