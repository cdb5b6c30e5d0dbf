// NVIDIA's ModelOpt: FP8, NVFP4 and AWQ of 4 bits, or a mix of them.
#include <utility>

#include "core/error.h"
#include "layers/quantized/methods/fp4.h"
#include "layers/quantized/methods/fp8.h"
#include "layers/quantized/methods/gptq.h"
#include "layers/quantized/methods/methods.h"

namespace llmserve {
namespace {

enum class Algorithm : uint8_t { kFp8, kFp8Blocks, kNvfp4, kW4A16Awq, kMixed };
struct AlgorithmRow {
  std::string_view name;
  Algorithm algorithm;
  bool has_fp8_activations = false;
};
constexpr AlgorithmRow kAlgorithms[] = {
    {"FP8", Algorithm::kFp8, true},       {"FP8_PER_CHANNEL_PER_TOKEN", Algorithm::kFp8, true},
    {"FP8_PB_WO", Algorithm::kFp8Blocks}, {"FP8_PB_REAL", Algorithm::kFp8Blocks, true},
    {"NVFP4", Algorithm::kNvfp4},         {"NVFP4_AWQ", Algorithm::kNvfp4},
    {"W4A16_AWQ", Algorithm::kW4A16Awq},  {"MIXED_PRECISION", Algorithm::kMixed},
};

// Of the whole model; absent where only the KV cache is quantized.
AlgorithmRow read_algorithm(const JsonNode& node) {
  if (node.is_null()) return {"", Algorithm::kMixed};
  std::string known;
  for (const AlgorithmRow& row : kAlgorithms) {
    if (row.name == node.as_string()) return row;
    known += concat(known.empty() ? "" : ", ", row.name);
  }
  throw NotSupported(
      concat(node.where(), ": ", node.describe(), " is not supported (", known, ")"));
}

class ModelOpt final : public QuantizationMethod {
 public:
  // In a file of its own the fields stand below "quantization".
  explicit ModelOpt(const JsonNode& root)
      : ModelOpt(root, root["quantization"].is_object() ? root["quantization"] : root) {}

  std::shared_ptr<const QuantizedWeight> find(ModuleTensors& tensors) const override {
    if (!tensors.exist()) return planned(tensors);
    if (tensors.has_type("weight", DType::kF8E4M3))
      return find_fp8_weight(tensors, fp8_scale(tensors), block_of(tensors),
                             rounds_to_fp8(tensors));
    if (!tensors.has_type("weight", DType::kU8)) return nullptr;
    if (tensors.has_type("weight_scale", DType::kF8E4M3)) return nvfp4(tensors);
    return awq(tensors);
  }

 private:
  ModelOpt(const JsonNode& /*root*/, const JsonNode& config)
      : algorithm_(read_algorithm(config["quant_algo"]).algorithm),
        has_fp8_activations_(read_algorithm(config["quant_algo"]).has_fp8_activations),
        group_(read_group_size(config["group_size"], 128)),
        skipped_(config["exclude_modules"].is_null() ? config["ignore"] : config["exclude_modules"],
                 NameStyle::kGlob) {
    if (algorithm_ == Algorithm::kMixed && !config["quantized_layers"].is_null())
      for (const auto& [module, node] : config["quantized_layers"].as_object()) {
        read_algorithm(node["quant_algo"]);
        if (!node["group_size"].is_null()) read_group_size(node["group_size"], 128);
      }
  }

  static std::string_view fp8_scale(const ModuleTensors& tensors) {
    return tensors.has("weight_scale_inv") ? "weight_scale_inv" : "weight_scale";
  }

  // Of a mix, where activations have a scale.
  bool rounds_to_fp8(const ModuleTensors& tensors) const {
    return has_fp8_activations_ || (algorithm_ == Algorithm::kMixed && tensors.has("input_scale"));
  }

  // Scales in a grid of 128 x 128 are those of blocks.
  static BlockSize block_of(ModuleTensors& tensors) {
    constexpr int64_t kBlock = 128;
    const StoredArray scales = tensors.find(fp8_scale(tensors));
    if (!scales || scales.entry->shape.size() < 2) return {};
    const int64_t blocks =
        (tensors.rows() + kBlock - 1) / kBlock * ((tensors.columns() + kBlock - 1) / kBlock);
    const bool is_a_row = scales.size() == tensors.rows();
    return scales.size() == blocks && !is_a_row ? BlockSize{kBlock, kBlock} : BlockSize{};
  }

  static std::shared_ptr<const QuantizedWeight> nvfp4(ModuleTensors& tensors) {
    return find_nvfp4_weight(
        tensors, {.weight = "weight", .global_scale = "weight_scale_2", .divides = false});
  }

  // Two rows to a byte, the first in its low half, as signed integers. What x is multiplied by
  // before is left to the columns of the weight.
  std::shared_ptr<const QuantizedWeight> awq(ModuleTensors& tensors) const {
    const int64_t n = tensors.rows();
    const int64_t k = tensors.columns();
    const int64_t group = group_ == 0 ? k : group_;
    CodedParts parts{.zero = 8, .group = group_};
    if (tensors.exist()) {
      if (n % 2 != 0)
        throw NotSupported(concat("tensor \"", tensors.request().name,
                                  "\": an odd number of rows, ", n,
                                  ", two to a byte, is not supported"));
      const int64_t num_groups = (k + group - 1) / group;
      parts.codes = {.words = tensors.need("weight", {DType::kU8}, {n / 2, k}),
                     .word_bits = 8,
                     .is_along_k = false,
                     .line_stride = 1,
                     .word_stride = k,
                     .per_word = 2,
                     .flip = 8};
      parts.scales = {
          .array = tensors.need("weight_scale", {DType::kF32, DType::kBF16, DType::kF16},
                                {n, num_groups}),
          .row_stride = num_groups,
          .group_stride = 1};
      if (tensors.has("pre_quant_scale"))
        parts.column_factor =
            tensors.need_elements("pre_quant_scale", {DType::kF32, DType::kBF16, DType::kF16}, k);
      if (tensors.has("weight_scale_2"))
        throw NotSupported(concat("tensor \"", tensors.full_name("weight_scale_2"),
                                  "\": W4A8_AWQ is not supported (W4A16_AWQ)"));
      tensors.ignore({"input_scale"});
    }
    return std::make_shared<CodedWeight>(concat("ModelOpt AWQ 4 bits, groups of ", group), tensors,
                                         std::move(parts));
  }

  std::shared_ptr<const QuantizedWeight> planned(ModuleTensors& tensors) const {
    if (tensors.module() == "lm_head" || skipped_.contain(tensors.module())) return nullptr;
    switch (algorithm_) {
      case Algorithm::kFp8:
        return find_fp8_weight(tensors, "weight_scale", {}, has_fp8_activations_);
      case Algorithm::kFp8Blocks:
        return find_fp8_weight(tensors, "weight_scale", {128, 128}, has_fp8_activations_);
      case Algorithm::kNvfp4:
        return nvfp4(tensors);
      case Algorithm::kW4A16Awq:
        return awq(tensors);
      case Algorithm::kMixed:
        break;
    }
    return nullptr;  // a plan in floats, which takes more than the files will
  }

  Algorithm algorithm_;
  bool has_fp8_activations_;
  int64_t group_;
  ModuleNames skipped_;
};

}  // namespace

std::unique_ptr<QuantizationMethod> read_modelopt(const JsonNode& config) {
  return std::make_unique<ModelOpt>(config);
}

}  // namespace llmserve
