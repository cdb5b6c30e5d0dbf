#include "layers/quantized/methods/fp4.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

// The first column in the low half of a byte.
FieldMatrix nibbles(const StoredArray& bytes, int64_t k) {
  return {.words = bytes, .word_bits = 8, .line_stride = k / 2, .per_word = 2};
}

void check_columns(const ModuleTensors& tensors, int64_t group, std::string_view format) {
  if (tensors.columns() % group == 0) return;
  throw NotSupported(concat("tensor \"", tensors.request().name, "\": ", format, " of ",
                            tensors.columns(), " columns, which are no whole groups of ", group,
                            ", is not supported"));
}

}  // namespace

std::shared_ptr<const QuantizedWeight> find_nvfp4_weight(ModuleTensors& tensors,
                                                         const Nvfp4Names& names) {
  constexpr int64_t kGroup = 16;
  const int64_t n = tensors.rows();
  const int64_t k = tensors.columns();
  check_columns(tensors, kGroup, "NVFP4");
  CodedParts parts{.numbers = e2m1_numbers(), .has_row_scale = true, .group = kGroup};
  parts.scales.planned_type = ScaleType::kE4M3;
  if (tensors.exist()) {
    parts.codes = nibbles(tensors.need(names.weight, {DType::kU8}, {n, k / 2}), k);
    parts.scales = {.array = tensors.need("weight_scale", {DType::kF8E4M3}, {n, k / kGroup}),
                    .row_stride = k / kGroup,
                    .group_stride = 1};
    parts.row_scale = {.array = tensors.need_elements(names.global_scale, {DType::kF32}, 1),
                       .is_reciprocal = names.divides};
    tensors.ignore({"input_scale", "input_global_scale"});
  }
  return std::make_shared<CodedWeight>("NVFP4, groups of 16", tensors, std::move(parts));
}

std::shared_ptr<const QuantizedWeight> find_mxfp4_weight(ModuleTensors& tensors,
                                                         std::string_view weight,
                                                         std::string_view scale) {
  constexpr int64_t kGroup = 32;
  const int64_t n = tensors.rows();
  const int64_t k = tensors.columns();
  const int64_t matrices = tensors.request().num_matrices;
  check_columns(tensors, kGroup, "MXFP4");
  CodedParts parts{.numbers = e2m1_numbers(), .group = kGroup};
  parts.scales.planned_type = ScaleType::kPowerOfTwo;
  if (tensors.exist()) {
    const int64_t groups = k / kGroup;
    parts.codes = nibbles(
        matrices == 0 ? tensors.need(weight, {DType::kU8}, {n, k / 2})
                      : tensors.need(weight, {DType::kU8}, {matrices, n, groups, kGroup / 2}),
        k);
    parts.scales = {.array = matrices == 0
                                 ? tensors.need(scale, {DType::kU8}, {n, groups})
                                 : tensors.need(scale, {DType::kU8}, {matrices, n, groups}),
                    .row_stride = groups,
                    .group_stride = 1};
  }
  return std::make_shared<CodedWeight>("MXFP4, groups of 32", tensors, std::move(parts));
}

}  // namespace llmserve
