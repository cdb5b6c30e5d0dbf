// MXFP4 as gpt-oss has it: the experts of a layer in two tensors, "…_blocks" and "…_scales".
#include "layers/quantized/methods/fp4.h"
#include "layers/quantized/methods/methods.h"
#include "layers/quantized/module_names.h"

namespace llmserve {
namespace {

class Mxfp4 final : public QuantizationMethod {
 public:
  explicit Mxfp4(const JsonNode& config)
      : skipped_(config["modules_to_not_convert"], NameStyle::kSubstring) {}

  std::shared_ptr<const QuantizedWeight> find(ModuleTensors& tensors) const override {
    // With files, the tensors say it.
    const bool is_quantized =
        tensors.exist() ? tensors.has("_blocks")
                        : tensors.request().num_matrices > 0 && !skipped_.contain(tensors.module());
    return is_quantized ? find_mxfp4_weight(tensors, "_blocks", "_scales") : nullptr;
  }

 private:
  ModuleNames skipped_;
};

}  // namespace

std::unique_ptr<QuantizationMethod> read_mxfp4(const JsonNode& config) {
  return std::make_unique<Mxfp4>(config);
}

}  // namespace llmserve
