// compressed-tensors, which LLM Compressor writes: groups of modules, each with a scheme of its
// own.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "layers/quantized/methods/fp4.h"
#include "layers/quantized/methods/fp8.h"
#include "layers/quantized/methods/gptq.h"
#include "layers/quantized/methods/methods.h"

namespace llmserve {
namespace {

struct Scheme {
  int bits = 8;
  bool is_float = false;
  bool is_symmetric = true;
  int64_t group = 0;  // elements of K; 0: all
  BlockSize block;
  bool has_fp8_activations = false;
};

struct ModuleGroup {
  ModuleNames targets;
  Scheme scheme;
};

// What `config_groups` may name instead of writing a scheme out.
struct Preset {
  std::string_view name;
  Scheme scheme;
};
constexpr Preset kPresets[] = {
    {"W8A16", {.bits = 8}},
    {"W4A16", {.bits = 4, .group = 128}},
    {"W4A16_ASYM", {.bits = 4, .is_symmetric = false, .group = 128}},
    {"W8A8", {.bits = 8}},
    {"INT8", {.bits = 8}},
    {"W4A8", {.bits = 4, .group = 128}},
    {"FP8", {.bits = 8, .is_float = true, .has_fp8_activations = true}},
    {"FP8_DYNAMIC", {.bits = 8, .is_float = true, .has_fp8_activations = true}},
    {"FP8_BLOCK", {.bits = 8, .is_float = true, .block = {128, 128}, .has_fp8_activations = true}},
    {"NVFP4", {.bits = 4, .is_float = true, .group = 16}},
    {"NVFP4A16", {.bits = 4, .is_float = true, .group = 16}},
    {"MXFP4", {.bits = 4, .is_float = true, .group = 32}},
    {"MXFP4A16", {.bits = 4, .is_float = true, .group = 32}},
};

constexpr std::string_view kFormats[] = {
    "pack-quantized",  "int-quantized",        "float-quantized",
    "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "mixed-precision",      "dense"};

void check_format(const JsonNode& node) {
  if (node.is_null()) return;
  for (const std::string_view format : kFormats)
    if (node.as_string() == format) return;
  throw NotSupported(concat(node.where(), ": ", node.describe(),
                            " is not supported (pack-quantized, int-quantized, float-quantized, "
                            "naive-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized, "
                            "mxfp8-quantized)"));
}

Scheme read_scheme(const JsonNode& weights, const JsonNode& activations) {
  Scheme scheme;
  scheme.bits = static_cast<int>(weights["num_bits"].as_int_or(8, 2, 8));
  const JsonNode type = weights["type"];
  const std::string kind = type.is_null() ? "int" : type.as_string();
  if (kind != "int" && kind != "float")
    throw NotSupported(
        concat(type.where(), ": ", type.describe(), " is not supported (int, float)"));
  scheme.is_float = kind == "float";
  scheme.is_symmetric = weights["symmetric"].as_bool_or(true);
  scheme.group = read_group_size(weights["group_size"], 0);
  scheme.block = read_block_size(weights["block_structure"]);
  if (scheme.is_float && scheme.bits == 8 && scheme.group > 0) scheme.block = {1, scheme.group};
  if (activations.is_object() && !activations["type"].is_null())
    scheme.has_fp8_activations = activations["type"].as_string() == "float" &&
                                 activations["num_bits"].as_int_or(8, 1, 64) == 8;
  return scheme;
}

class CompressedTensors final : public QuantizationMethod {
 public:
  explicit CompressedTensors(const JsonNode& config)
      : ignored_(config["ignore"], NameStyle::kExactOrRe) {
    check_format(config["format"]);
    const JsonNode sparsity = config["sparsity_config"];
    if (sparsity.is_object() && !sparsity["format"].is_null() &&
        sparsity["format"].as_string() != "dense")
      throw NotSupported(concat(sparsity["format"].where(), ": ", sparsity["format"].describe(),
                                " is not supported: sparse weights; use a checkpoint without "
                                "sparsity"));
    for (const auto& [name, node] : config["config_groups"].as_object()) {
      if (groups_.size() >= kMaxGroups)
        config["config_groups"].fail(concat("expected at most ", kMaxGroups, " groups"));
      groups_.push_back(node.is_array() ? preset(name, node) : written_out(node));
    }
  }

  std::shared_ptr<const QuantizedWeight> find(ModuleTensors& tensors) const override {
    const Scheme* scheme = scheme_of(tensors.module());
    if (!tensors.exist()) return scheme ? planned(tensors, *scheme) : nullptr;
    if (tensors.has_type("weight_packed", DType::kU8)) {
      if (tensors.has_type("weight_scale", DType::kF8E4M3)) return find_nvfp4_weight(tensors, {});
      return find_mxfp4_weight(tensors, "weight_packed", "weight_scale");
    }
    const bool is_packed = tensors.has("weight_packed");
    const bool is_float = tensors.has_type("weight", DType::kF8E4M3);
    if (!is_packed && !is_float && !tensors.has_type("weight", DType::kI8)) return nullptr;
    if (is_float)
      return find_fp8_weight(tensors, "weight_scale", scheme ? scheme->block : BlockSize{},
                             scheme && scheme->has_fp8_activations);
    if (!scheme)
      throw CorruptFile(concat("tensor \"",
                               tensors.full_name(is_packed ? "weight_packed" : "weight"),
                               "\" is quantized, and config_groups of the configuration have no "
                               "target that names it"));
    return integers(tensors, *scheme, is_packed);
  }

 private:
  static constexpr size_t kMaxGroups = 4096;

  static ModuleGroup preset(const std::string& name, const JsonNode& targets) {
    for (const Preset& row : kPresets)
      if (row.name == name) return {ModuleNames(targets, NameStyle::kExactOrRe), row.scheme};
    throw NotSupported(concat(targets.where(), ": the scheme ", name, " is not known"));
  }

  static ModuleGroup written_out(const JsonNode& node) {
    check_format(node["format"]);
    return {ModuleNames(node["targets"], NameStyle::kExactOrRe),
            read_scheme(node["weights"], node["input_activations"])};
  }

  // The group that names the module itself, and otherwise the first that names it by a pattern or
  // its class.
  const Scheme* scheme_of(const std::string& module) const {
    if (ignored_.names(module)) return nullptr;
    for (const ModuleGroup& group : groups_)
      if (group.targets.names(module)) return &group.scheme;
    for (const ModuleGroup& group : groups_)
      if (group.targets.contain(module)) return &group.scheme;
    return nullptr;
  }

  std::shared_ptr<const QuantizedWeight> planned(ModuleTensors& tensors,
                                                 const Scheme& scheme) const {
    if (ignored_.contain(tensors.module())) return nullptr;
    if (!scheme.is_float) return integers(tensors, scheme, /*is_packed=*/scheme.bits < 8);
    if (scheme.bits == 8)
      return find_fp8_weight(tensors, "weight_scale", scheme.block, scheme.has_fp8_activations);
    return scheme.group == 32 ? find_mxfp4_weight(tensors, "weight_packed", "weight_scale")
                              : find_nvfp4_weight(tensors, {});
  }

  static std::shared_ptr<const QuantizedWeight> integers(ModuleTensors& tensors,
                                                         const Scheme& scheme, bool is_packed);

  ModuleNames ignored_;
  std::vector<ModuleGroup> groups_;
};

// [N, K], or, of a tensor of several matrices, [X, N, K], whose rows count on.
StoredArray need_matrix(ModuleTensors& tensors, std::string_view suffix, DType dtype, int64_t rows,
                        int64_t columns) {
  const int64_t matrices = tensors.request().num_matrices;
  return matrices == 0 ? tensors.need(suffix, {dtype}, {rows, columns})
                       : tensors.need(suffix, {dtype}, {matrices, rows, columns});
}

std::string text_of(const std::vector<int64_t>& dims) {
  std::string text;
  for (const int64_t dim : dims) text += concat(text.empty() ? "[" : ", ", dim);
  return text + "]";
}

void check_shape(ModuleTensors& tensors) {
  if (!tensors.has("weight_shape")) return;
  std::vector<int64_t> expected{tensors.rows(), tensors.columns()};
  if (tensors.request().num_matrices > 0)
    expected.insert(expected.begin(), tensors.request().num_matrices);
  const StoredArray shape = tensors.need_elements("weight_shape", {DType::kI64, DType::kI32},
                                                  static_cast<int64_t>(expected.size()));
  std::vector<int64_t> got;
  for (int64_t i = 0; i < shape.size(); ++i)
    got.push_back(shape.entry->dtype == DType::kI32 ? int64_t{shape.word(i)}
                                                    : static_cast<int64_t>(shape.long_word(i)));
  if (got != expected)
    tensors.fail(shape, concat("expected ", text_of(expected), ", as config.json has it, got ",
                               text_of(got)));
}

// Packed along K. Of bits that do not divide 32, a word once held whole fields alone: such files
// are wider.
FieldMatrix packed_codes(ModuleTensors& tensors, int bits) {
  const int64_t k = tensors.columns();
  const StoredArray words = need_matrix(tensors, "weight_packed", DType::kI32, tensors.rows(), -1);
  const int64_t width = words.entry->shape[words.entry->shape.size() - 1];
  const int64_t dense = (k * bits + 31) / 32;
  const int whole = 32 / bits;
  const int64_t padded = (k + whole - 1) / whole;
  if (width != dense && width != padded)
    tensors.fail(words,
                 concat("expected rows of ", dense, " words (or ", padded, ", of older files) for ",
                        k, " weights of ", bits, " bits, got ", width));
  const bool is_padded = 32 % bits == 0 || width != dense;
  return {.words = words, .bits = bits, .line_stride = width, .per_word = is_padded ? whole : 0};
}

std::shared_ptr<const QuantizedWeight> CompressedTensors::integers(ModuleTensors& tensors,
                                                                   const Scheme& scheme,
                                                                   bool is_packed) {
  const int64_t n = tensors.rows();
  const int64_t k = tensors.columns();
  const int64_t all_rows = n * std::max<int64_t>(1, tensors.request().num_matrices);
  const int64_t group = scheme.group == 0 ? k : scheme.group;
  const int64_t num_groups = (k + group - 1) / group;
  const int bits = scheme.bits;
  CodedParts parts{.bits = bits,
                   .zero = 1 << (bits - 1),
                   .has_zeros = !scheme.is_symmetric,
                   .group = scheme.group};
  parts.scales.planned_type = ScaleType::kBF16;
  const std::string text =
      concat("compressed-tensors ", bits, " bits, ",
             scheme.group == 0 ? "a scale a row" : concat("groups of ", scheme.group),
             scheme.is_symmetric ? "" : ", zero points");
  if (!tensors.exist()) return std::make_shared<CodedWeight>(text, tensors, std::move(parts));
  if (scheme.block.rows > 0)
    throw NotSupported(concat("tensor \"", tensors.request().name,
                              "\": integers with scales of blocks are not supported"));

  if (is_packed) {
    parts.codes = packed_codes(tensors, bits);
    check_shape(tensors);
  } else {
    parts.codes = {.words = need_matrix(tensors, "weight", DType::kI8, n, k),
                   .bits = 8,
                   .word_bits = 8,
                   .line_stride = k,
                   .per_word = 1,
                   .flip = 0x80};
    parts.zero = 128;
  }
  const StoredArray scales = tensors.need_elements(
      "weight_scale", {DType::kBF16, DType::kF16, DType::kF32}, ModuleTensors::kAnyCount);
  parts.scales.array = scales;
  if (scales.size() == all_rows * num_groups) {
    parts.scales.row_stride = num_groups;
    parts.scales.group_stride = 1;
  } else if (scales.size() != 1) {
    tensors.fail(scales, concat("expected one scale, or ", num_groups, " for each of ", all_rows,
                                " rows, got ", scales.size()));
  }
  if (scheme.is_symmetric) {
    tensors.ignore({"weight_zero_point"});
  } else if (is_packed) {
    const int whole = 32 / bits;
    const int64_t words = parts.codes.per_word > 0 ? (n + whole - 1) / whole : (n * bits + 31) / 32;
    parts.zeros = {
        .words = need_matrix(tensors, "weight_zero_point", DType::kI32, words, num_groups),
        .bits = bits,
        .is_along_k = false,
        .line_stride = 1,
        .word_stride = num_groups,
        .per_word = parts.codes.per_word};
    if (tensors.request().num_matrices > 0) {
      parts.zeros.matrix_rows = n;
      parts.zeros.matrix_stride = words * num_groups;
    }
  } else {
    const StoredArray zeros =
        tensors.need_elements("weight_zero_point", {DType::kI8}, scales.size());
    parts.zeros = {.words = zeros,
                   .bits = 8,
                   .word_bits = 8,
                   .line_stride = scales.size() == 1 ? 0 : num_groups,
                   .word_stride = scales.size() == 1 ? 0 : 1,
                   .per_word = 1,
                   .flip = 0x80};
  }
  if (tensors.has("weight_g_idx"))
    parts.group_of = read_group_index(tensors, tensors.need("weight_g_idx", {DType::kI32}, {k}),
                                      group, num_groups);
  tensors.ignore({"input_scale", "input_zero_point"});
  const std::string order = parts.group_of.empty() ? "" : ", act order";
  return std::make_shared<CodedWeight>(text + order, tensors, std::move(parts));
}

}  // namespace

std::unique_ptr<QuantizationMethod> read_compressed_tensors(const JsonNode& config) {
  return std::make_unique<CompressedTensors>(config);
}

}  // namespace llmserve
