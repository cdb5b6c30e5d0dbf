// FP8 as transformers, vLLM and DeepSeek write it: E4M3 with a scale a tensor, a row or a block.
#include "layers/quantized/methods/fp8.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"
#include "layers/quantized/methods/methods.h"
#include "layers/quantized/module_names.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxBlock = int64_t{1} << 20;

int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

class Fp8 final : public QuantizationMethod {
 public:
  explicit Fp8(const JsonNode& config)
      : block_(read_block_size(config["weight_block_size"])),
        skipped_(config["modules_to_not_convert"].is_null() ? config["ignored_layers"]
                                                            : config["modules_to_not_convert"],
                 NameStyle::kSubstring) {
    const JsonNode format = config["fmt"];
    if (!format.is_null() && format.as_string() != "e4m3" && format.as_string() != "float8_e4m3fn")
      throw NotSupported(
          concat(format.where(), ": ", format.describe(), " is not supported (e4m3)"));
  }

  std::shared_ptr<const QuantizedWeight> find(ModuleTensors& tensors) const override {
    if (!tensors.exist()) {
      if (tensors.module() == "lm_head" || skipped_.contain(tensors.module())) return nullptr;
      return find_fp8_weight(tensors, "weight_scale", block_, /*rounds_to_fp8=*/true);
    }
    if (!tensors.has_type("weight", DType::kF8E4M3)) return nullptr;
    return find_fp8_weight(
        tensors, tensors.has("weight_scale_inv") ? "weight_scale_inv" : "weight_scale", block_,
        /*rounds_to_fp8=*/true);
  }

 private:
  BlockSize block_;
  ModuleNames skipped_;
};

}  // namespace

BlockSize read_block_size(const JsonNode& node) {
  if (node.is_null()) return {};
  const std::vector<JsonNode> sizes = node.as_array();
  if (sizes.size() != 2) node.fail(concat("expected [rows, columns], got ", node.describe()));
  return {sizes[0].as_int(1, kMaxBlock), sizes[1].as_int(1, kMaxBlock)};
}

std::shared_ptr<const QuantizedWeight> find_fp8_weight(ModuleTensors& tensors,
                                                       std::string_view scale,
                                                       const BlockSize& block, bool rounds_to_fp8) {
  const ModuleRequest& request = tensors.request();
  const int64_t n = tensors.rows();
  const int64_t k = tensors.columns();
  const int64_t matrices = std::max<int64_t>(1, request.num_matrices);
  const int64_t down = block.rows == 0 ? 1 : blocks_of(n, block.rows);
  const int64_t across = block.rows == 0 ? 1 : blocks_of(k, block.columns);
  CodedParts parts{.bits = 8, .numbers = e4m3_numbers(), .rounds_to_fp8 = rounds_to_fp8};
  std::string kind = block.rows == 0 ? "" : concat(", blocks of ", block.rows, "x", block.columns);
  if (tensors.exist()) {
    const int64_t height = request.is_transposed ? k : n;
    const int64_t width = request.is_transposed ? n : k;
    const StoredArray weight =
        request.num_matrices == 0
            ? tensors.need("weight", {DType::kF8E4M3}, {height, width})
            : tensors.need("weight", {DType::kF8E4M3}, {matrices, height, width});
    parts.codes = {.words = weight,
                   .bits = 8,
                   .word_bits = 8,
                   .is_along_k = !request.is_transposed,
                   .line_stride = width,
                   .per_word = 1};
    if (request.is_transposed && matrices > 1) {
      parts.codes.matrix_rows = n;
      parts.codes.matrix_stride = n * k;
    }
    const StoredArray scales = tensors.need_elements(
        scale, {DType::kF32, DType::kBF16, DType::kF16, DType::kU8}, ModuleTensors::kAnyCount);
    parts.scales.array = scales;
    const int64_t count = scales.size();
    if (count == matrices * n && n > 1 && block.rows == 0) {
      parts.scales.row_stride = 1;
      kind = ", a scale a row";
    } else if (block.rows > 0 && count == matrices * down * across) {
      parts.group = block.columns;
      parts.scales.row_stride = request.is_transposed ? 1 : across;
      parts.scales.group_stride = request.is_transposed ? down : 1;
      parts.scales.rows = block.rows;
      if (request.num_matrices > 0) {
        parts.scales.matrix_rows = n;
        parts.scales.matrix_stride = down * across;
      }
    } else if (count == matrices && matrices > 1) {
      parts.scales.matrix_rows = n;
      parts.scales.matrix_stride = 1;
      kind = ", a scale a tensor";
    } else if (count == 1) {
      kind = ", a scale a tensor";
    } else {
      tensors.fail(scales,
                   concat("expected one scale, one for each of ", n, " rows",
                          block.rows == 0 ? std::string()
                                          : concat(", or ", down, " x ", across, " for blocks of ",
                                                   block.rows, " x ", block.columns),
                          ", got ", count));
    }
    tensors.ignore({"input_scale", "activation_scale", "_input_scale"});
  } else if (block.rows > 0) {
    parts.group = block.columns;
  }
  return std::make_shared<CodedWeight>(concat("FP8", kind), tensors, std::move(parts));
}

std::unique_ptr<QuantizationMethod> read_fp8(const JsonNode& config) {
  return std::make_unique<Fp8>(config);
}

}  // namespace llmserve
