// How checkpoints that were quantized elsewhere are read: the one table of the methods.
//
// config.json (or a file of its own beside it) says by which method and with which parameters.
// Which weights are quantized say the tensors: lists of modules that were left alone are only
// needed to plan from a config.json by itself.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "io/checkpoint.h"
#include "layers/quantized/module_tensors.h"
#include "layers/quantized/quantized_weight.h"

namespace llmserve {

// Immutable once read.
class QuantizationMethod {
 public:
  virtual ~QuantizationMethod() = default;
  // The weight, or null where the checkpoint has it as floats. Throws CorruptFile (a tensor that is
  // absent, or of another type or shape than the configuration says), NotSupported.
  virtual std::shared_ptr<const QuantizedWeight> find(ModuleTensors& tensors) const = 0;
  // Whether a tensor that no weight asked for says how to round what llmserve rounds by itself, a
  // token at a time: scales of activations, and of keys and values.
  virtual bool is_spare(std::string_view tensor) const;
  // Of those, what is of keys and values alone.
  static bool is_cache_scale(std::string_view tensor);
};

// One row a method: the only place that lists them.
struct QuantizationMethodRow {
  std::string_view name;     // quant_method
  std::string_view summary;  // of one that is refused: what to use instead
  // Throws CorruptFile and NotSupported, naming the field. Null: the method is refused.
  std::unique_ptr<QuantizationMethod> (*read)(const JsonNode& config);
};
std::span<const QuantizationMethodRow> quantization_method_registry();

// That of a checkpoint; null where it says nothing of one. Throws NotSupported for a method that is
// unknown or refused, by its name.
std::unique_ptr<QuantizationMethod> read_quantization_method(const Checkpoint& checkpoint);

}  // namespace llmserve
