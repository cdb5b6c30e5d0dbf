// AWQ: integers packed along N (gemm) or along K (gemv). Lin et al. 2023; the layouts are
// AutoAWQ's.
#include "layers/quantized/methods/awq.h"

#include <utility>

#include "core/error.h"
#include "layers/quantized/methods/gptq.h"
#include "layers/quantized/methods/methods.h"

namespace llmserve {
namespace {

constexpr int kBits = 4;
constexpr int kPerWord = 8;
// Where a word has column i of eight: AutoAWQ packs 0, 2, 4, 6, 1, 3, 5, 7 from the low bits on.
constexpr uint8_t kPlaces[kPerWord] = {0, 4, 1, 5, 2, 6, 3, 7};

class Awq final : public QuantizationMethod {
 public:
  explicit Awq(const JsonNode& config)
      : skipped_(config["modules_to_not_convert"], NameStyle::kSubstring) {
    // AutoAWQ's own quant_config.json has other spellings.
    const JsonNode bits = config["bits"].is_null() ? config["w_bit"] : config["bits"];
    if (bits.as_int_or(kBits, 1, 8) != kBits)
      throw NotSupported(
          concat(bits.where(), ": ", bits.describe(), " bits are not supported for AWQ, only 4"));
    const JsonNode group =
        config["group_size"].is_null() ? config["q_group_size"] : config["group_size"];
    params_.group = read_group_size(group, 128);
    const JsonNode version = config["version"];
    std::string name = version.is_null() ? "gemm" : version.as_string();
    for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    if (name != "gemm" && name != "gemv")
      throw NotSupported(concat(version.where(), ": ", version.describe(),
                                " is not supported (gemm, gemv): it is laid out for kernels of "
                                "other engines; save the model as gemm"));
    params_.is_gemv = name == "gemv";
  }

  std::shared_ptr<const QuantizedWeight> find(ModuleTensors& tensors) const override {
    if (tensors.exist() ? !tensors.has("qweight")
                        : tensors.module() == "lm_head" || skipped_.contain(tensors.module()))
      return nullptr;
    return find_awq_weight(tensors, params_);
  }

 private:
  AwqParams params_;
  ModuleNames skipped_;
};

void find_gemm(ModuleTensors& tensors, int64_t num_groups, CodedParts& parts) {
  const int64_t n = tensors.rows();
  const int64_t k = tensors.columns();
  if (n % kPerWord != 0)
    throw NotSupported(concat("tensor \"", tensors.full_name("qweight"), "\": AWQ of ", n,
                              " rows, which is no multiple of 8, is not supported"));
  const auto fields = [&](std::string_view suffix, int64_t lines) {
    return FieldMatrix{.words = tensors.need(suffix, {DType::kI32}, {lines, n / kPerWord}),
                       .is_along_k = false,
                       .line_stride = n / kPerWord,
                       .per_word = kPerWord,
                       .order = kPlaces};
  };
  parts.codes = fields("qweight", k);
  parts.zeros = fields("qzeros", num_groups);
  parts.scales = {
      .array = tensors.need("scales", {DType::kF16, DType::kBF16, DType::kF32}, {num_groups, n}),
      .row_stride = 1,
      .group_stride = n};
}

// Rows of zero points and scales are padded, as its kernel wants them.
void find_gemv(ModuleTensors& tensors, int64_t num_groups, CodedParts& parts) {
  const int64_t n = tensors.rows();
  const int64_t k = tensors.columns();
  if (k % kPerWord != 0)
    throw NotSupported(concat("tensor \"", tensors.full_name("qweight"), "\": AWQ of ", k,
                              " columns, which is no multiple of 8, is not supported"));
  parts.codes = {.words = tensors.need("qweight", {DType::kI32}, {n, k / kPerWord}),
                 .line_stride = k / kPerWord,
                 .per_word = kPerWord};
  const StoredArray zeros = tensors.need("qzeros", {DType::kI32}, {n, -1});
  const StoredArray scales =
      tensors.need("scales", {DType::kF16, DType::kBF16, DType::kF32}, {n, -1});
  const int64_t words = zeros.entry->shape[1];
  if (words * kPerWord < num_groups)
    tensors.fail(zeros, concat("expected room for ", num_groups, " groups in a row, got ",
                               words * kPerWord));
  if (scales.entry->shape[1] < num_groups)
    tensors.fail(scales, concat("expected at least ", num_groups, " scales in a row, got ",
                                scales.entry->shape[1]));
  parts.zeros = {.words = zeros, .line_stride = words, .per_word = kPerWord};
  parts.scales = {.array = scales, .row_stride = scales.entry->shape[1], .group_stride = 1};
}

}  // namespace

std::shared_ptr<const QuantizedWeight> find_awq_weight(ModuleTensors& tensors,
                                                       const AwqParams& params) {
  const int64_t k = tensors.columns();
  const int64_t group = params.group == 0 ? k : params.group;
  const int64_t num_groups = (k + group - 1) / group;
  CodedParts parts{.bits = kBits, .has_zeros = true, .group = params.group};
  parts.scales.planned_type = ScaleType::kF16;
  if (tensors.exist()) {
    if (params.is_gemv)
      find_gemv(tensors, num_groups, parts);
    else
      find_gemm(tensors, num_groups, parts);
  }
  return std::make_shared<CodedWeight>(
      concat("AWQ 4 bits, ", params.group == 0 ? "a scale a row" : concat("groups of ", group),
             ", zero points"),
      tensors, std::move(parts));
}

std::unique_ptr<QuantizationMethod> read_awq(const JsonNode& config) {
  return std::make_unique<Awq>(config);
}

}  // namespace llmserve
