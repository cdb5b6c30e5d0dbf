// GPTQ: integers packed along K, zero points and scales of groups. Frantar et al. 2022; the layout
// is AutoGPTQ's and GPTQModel's.
#include "layers/quantized/methods/gptq.h"

#include <utility>

#include "core/error.h"
#include "layers/quantized/methods/methods.h"

namespace llmserve {
namespace {

class Gptq final : public QuantizationMethod {
 public:
  explicit Gptq(const JsonNode& config) : params_(read_params(config, {})) {
    const JsonNode format = config["checkpoint_format"];
    const std::string name = format.is_null() ? "gptq" : format.as_string();
    if (name != "gptq" && name != "gptq_v2")
      throw NotSupported(concat(format.where(), ": ", format.describe(),
                                " is not supported (gptq, gptq_v2): it is laid out for kernels of "
                                "other engines; save the model in one of these formats"));
    params_.has_v2_zeros = name == "gptq_v2";
    has_quantized_head_ = config["lm_head"].as_bool_or(false);
    const JsonNode dynamic = config["dynamic"];
    if (dynamic.is_null() || (!dynamic.is_object() && !dynamic.is_array() && !dynamic.as_bool()))
      return;
    for (const auto& [key, node] : dynamic.as_object()) {
      if (overrides_.size() >= kMaxOverrides)
        dynamic.fail(concat("expected at most ", kMaxOverrides, " patterns"));
      const bool is_skipped = key.starts_with("-:");
      const size_t prefix = is_skipped || key.starts_with("+:") ? 2 : 0;
      overrides_.push_back({NamePattern(std::string_view(key).substr(prefix), node.where()),
                            is_skipped, is_skipped ? params_ : read_params(node, params_)});
    }
  }

  std::shared_ptr<const QuantizedWeight> find(ModuleTensors& tensors) const override {
    GptqParams params = params_;
    bool is_skipped = !has_quantized_head_ && tensors.module() == "lm_head";
    for (const Override& each : overrides_) {
      if (!matches(each.pattern, tensors.module())) continue;
      is_skipped = each.is_skipped;
      params = each.params;
      break;
    }
    if (tensors.exist() ? !tensors.has("qweight") : is_skipped) return nullptr;
    return find_gptq_weight(tensors, params);
  }

 private:
  static constexpr size_t kMaxOverrides = 4096;
  struct Override {
    NamePattern pattern;
    bool is_skipped;
    GptqParams params;
  };

  static bool matches(const NamePattern& pattern, const std::string& module) {
    for (const std::string& name : names_of_module(module))
      if (pattern.matches_beginning(name)) return true;
    return false;
  }

  static GptqParams read_params(const JsonNode& config, GptqParams params) {
    params.bits = static_cast<int>(config["bits"].as_int_or(params.bits, 2, 8));
    if (params.bits != 2 && params.bits != 3 && params.bits != 4 && params.bits != 8)
      throw NotSupported(concat(config["bits"].where(), ": ", params.bits,
                                " bits are not supported (2, 3, 4, 8)"));
    params.group = read_group_size(config["group_size"], params.group);
    params.is_symmetric = config["sym"].as_bool_or(params.is_symmetric);
    params.is_ordered = config["desc_act"].as_bool_or(params.is_ordered);
    return params;
  }

  GptqParams params_;
  bool has_quantized_head_ = false;
  std::vector<Override> overrides_;
};

}  // namespace

int64_t read_group_size(const JsonNode& node, int64_t fallback) {
  const int64_t size = node.as_int_or(fallback == 0 ? -1 : fallback, -1, int64_t{1} << 20);
  return size == -1 ? 0 : size;
}

std::shared_ptr<const QuantizedWeight> find_gptq_weight(ModuleTensors& tensors,
                                                        const GptqParams& params) {
  const int64_t n = tensors.rows();
  const int64_t k = tensors.columns();
  const int64_t group = params.group == 0 ? k : params.group;
  const int64_t num_groups = (k + group - 1) / group;
  const int bits = params.bits;
  const std::string text =
      concat("GPTQ ", bits, " bits, ",
             params.group == 0 ? "a scale a row" : concat("groups of ", params.group),
             params.is_symmetric ? "" : ", zero points");
  CodedParts parts{.bits = bits, .has_zeros = !params.is_symmetric, .group = params.group};
  parts.scales.planned_type = ScaleType::kF16;
  if (!tensors.exist()) return std::make_shared<CodedWeight>(text, tensors, std::move(parts));

  const int per_word = 32 % bits == 0 ? 32 / bits : 0;
  if (k * bits % 32 != 0 || n * bits % 32 != 0)
    throw NotSupported(concat("tensor \"", tensors.full_name("qweight"), "\": GPTQ of ", bits,
                              " bits and a matrix [", n, ", ", k,
                              "], whose sides are no whole words of 32 bits, is not supported"));
  parts.codes = {.words = tensors.need("qweight", {DType::kI32}, {k * bits / 32, n}),
                 .bits = bits,
                 .line_stride = 1,
                 .word_stride = n,
                 .per_word = per_word};
  parts.scales = {
      .array = tensors.need("scales", {DType::kF16, DType::kBF16, DType::kF32}, {num_groups, n}),
      .row_stride = 1,
      .group_stride = n};
  parts.zero = 1 << (bits - 1);
  if (params.is_symmetric) {
    tensors.ignore({"qzeros"});
  } else {
    parts.zeros = {.words = tensors.need("qzeros", {DType::kI32}, {num_groups, n * bits / 32}),
                   .bits = bits,
                   .is_along_k = false,
                   .line_stride = n * bits / 32,
                   .per_word = per_word};
    parts.zero_added = params.has_v2_zeros ? 0 : 1;
    parts.zero_mask = (1u << bits) - 1;
  }
  if (tensors.has("g_idx"))
    parts.group_of =
        read_group_index(tensors, tensors.need("g_idx", {DType::kI32}, {k}), group, num_groups);
  const std::string order = parts.group_of.empty() ? "" : ", act order";
  return std::make_shared<CodedWeight>(text + order, tensors, std::move(parts));
}

std::unique_ptr<QuantizationMethod> read_gptq(const JsonNode& config) {
  return std::make_unique<Gptq>(config);
}

}  // namespace llmserve
