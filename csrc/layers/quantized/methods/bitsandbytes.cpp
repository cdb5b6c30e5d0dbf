// bitsandbytes: NF4 and FP4 in blocks of the flat matrix (Dettmers et al. 2023), and LLM.int8()
// (Dettmers et al. 2022).
#include <array>
#include <utility>
#include <vector>

#include "core/error.h"
#include "io/json.h"
#include "layers/quantized/coded_weight.h"
#include "layers/quantized/methods/methods.h"
#include "layers/quantized/module_names.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxBlockSize = 1 << 20;
constexpr double kMaxOffset = 1e30;

class BitsAndBytes final : public QuantizationMethod {
 public:
  explicit BitsAndBytes(const JsonNode& config)
      : is_4_bits_(config["load_in_4bit"].as_bool_or(false) ||
                   config["_load_in_4bit"].as_bool_or(false)),
        threshold_(static_cast<float>(config["llm_int8_threshold"].as_number_or(6.0, 0.0, 1e30))),
        skipped_(config["llm_int8_skip_modules"], NameStyle::kSubstring) {}

  std::shared_ptr<const QuantizedWeight> find(ModuleTensors& tensors) const override {
    if (!tensors.exist()) {
      if (tensors.module() == "lm_head" || skipped_.contain(tensors.module())) return nullptr;
      return is_4_bits_ ? four_bits(tensors, "nf4", "") : int8(tensors);
    }
    for (const std::string_view type : {"nf4", "fp4"}) {
      const std::string state = concat("weight.quant_state.bitsandbytes__", type);
      if (tensors.has(state)) return four_bits(tensors, type, state);
    }
    return tensors.has_type("weight", DType::kI8) ? int8(tensors) : nullptr;
  }

 private:
  std::shared_ptr<const QuantizedWeight> int8(ModuleTensors& tensors) const;
  static std::shared_ptr<const QuantizedWeight> four_bits(ModuleTensors& tensors,
                                                          std::string_view type,
                                                          const std::string& state);

  bool is_4_bits_;
  float threshold_;
  ModuleNames skipped_;
};

std::shared_ptr<const QuantizedWeight> BitsAndBytes::int8(ModuleTensors& tensors) const {
  const int64_t n = tensors.rows();
  const int64_t k = tensors.columns();
  CodedParts parts{.bits = 8, .zero = 128, .outlier_threshold = threshold_};
  if (tensors.exist()) {
    parts.codes = {.words = tensors.need("weight", {DType::kI8}, {n, k}),
                   .bits = 8,
                   .word_bits = 8,
                   .line_stride = k,
                   .per_word = 1,
                   .flip = 0x80};
    parts.scales = {.array = tensors.need_elements("SCB", {DType::kF32, DType::kF16}, n),
                    .row_stride = 1,
                    .factor = 1.0f / 127.0f};
    // 0: by rows. The others are tiles of one device each.
    if (tensors.has("weight_format")) {
      const StoredArray format =
          tensors.need_elements("weight_format", {DType::kU8, DType::kI8}, 1);
      if (format.byte(0) != 0)
        tensors.fail(format, concat("expected 0, rows, got the layout ", int{format.byte(0)},
                                    ", which is of one device; save the model again"));
    }
  }
  return std::make_shared<CodedWeight>(concat("LLM.int8(), outliers from ", threshold_), tensors,
                                       std::move(parts));
}

// The table of codes, as floats.
std::shared_ptr<const std::vector<float>> numbers_of(const StoredArray& table) {
  auto numbers = std::make_shared<std::vector<float>>();
  for (int64_t i = 0; i < table.size(); ++i) numbers->push_back(table.value(i));
  return numbers;
}

std::shared_ptr<const QuantizedWeight> BitsAndBytes::four_bits(ModuleTensors& tensors,
                                                               std::string_view type,
                                                               const std::string& state) {
  constexpr int64_t kDefaultBlock = 64;
  const int64_t n = tensors.rows();
  const int64_t k = tensors.columns();
  const std::string text = type == "nf4" ? "NF4" : "FP4";
  CodedParts parts{.flat_block = kDefaultBlock};
  if (!tensors.exist()) return std::make_shared<CodedWeight>(text, tensors, std::move(parts));

  const StoredArray said = tensors.need_elements(state, {DType::kU8}, ModuleTensors::kAnyCount);
  const JsonDocument document = JsonDocument::parse(
      said.entry->name,
      {reinterpret_cast<const char*>(said.data), static_cast<size_t>(said.size())});
  const JsonNode json(document);
  parts.flat_block = json["blocksize"].as_int_or(kDefaultBlock, 2, kMaxBlockSize);
  const std::vector<JsonNode> shape = json["shape"].as_array();
  if (shape.size() != 2 || shape[0].as_int(0, INT64_MAX) != n || shape[1].as_int(0, INT64_MAX) != k)
    json["shape"].fail(concat("expected [", n, ", ", k, "], as config.json has it, got ",
                              json["shape"].describe()));
  if (n * k % 2 != 0)
    throw NotSupported(concat("tensor \"", tensors.request().name,
                              "\": an odd number of weights, two to a byte, is not supported"));
  const int64_t num_blocks = (n * k + parts.flat_block - 1) / parts.flat_block;
  const StoredArray table = tensors.need_elements("weight.quant_map", {DType::kF32}, 16);
  const auto numbers = numbers_of(table);
  parts.numbers = *numbers;
  parts.keeper = numbers;
  static constexpr std::array<uint8_t, 2> kHighFirst{1, 0};
  parts.codes = {.words = tensors.need_elements("weight", {DType::kU8}, n * k / 2),
                 .word_bits = 8,
                 .line_stride = 0,
                 .per_word = 2,
                 .order = kHighFirst.data(),
                 .flat_columns = k};
  if (!tensors.has("weight.nested_absmax")) {
    parts.scales.array = tensors.need_elements("weight.absmax", {DType::kF32}, num_blocks);
    return std::make_shared<CodedWeight>(text, tensors, std::move(parts));
  }
  NestedScales nested{.size = json["nested_blocksize"].as_int_or(256, 1, kMaxBlockSize)};
  nested.offset =
      static_cast<float>(json["nested_offset"].as_number_or(0.0, -kMaxOffset, kMaxOffset));
  parts.scales.array = tensors.need_elements("weight.absmax", {DType::kU8}, num_blocks);
  nested.table = tensors.need_elements("weight.nested_quant_map", {DType::kF32}, 256);
  nested.outer = tensors.need_elements("weight.nested_absmax", {DType::kF32},
                                       (num_blocks + nested.size - 1) / nested.size);
  parts.scales.nested = std::make_shared<const NestedScales>(nested);
  return std::make_shared<CodedWeight>(text + ", double quantization", tensors, std::move(parts));
}

}  // namespace

std::unique_ptr<QuantizationMethod> read_bitsandbytes(const JsonNode& config) {
  return std::make_unique<BitsAndBytes>(config);
}

}  // namespace llmserve
