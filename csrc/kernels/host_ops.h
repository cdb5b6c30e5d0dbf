// Work that is done once at load or once a step, the same for every host backend.
#pragma once

#include <span>

#include "core/tensor.h"
#include "kernels/ops.h"

namespace llmserve {

// rotary_table's definition: the angle is rounded to f32, as Hugging Face transformers does, its
// cosine and sine are taken in double and rounded to f32.
void compute_rotary_table(const RotaryTableArgs& args);

// Row `id` of an embedding's table, scaled, to out [E].
void read_table_row(const EmbeddingArgs& args, int64_t id, float* out);
// The given rows of an embedding, over what the table gave.
void copy_given_rows(const EmbeddingArgs& args);

// copy_blocks's definition: in order, since a pair's source may be an earlier one's destination.
void copy_blocks_on_host(const CopyBlocksArgs& args);

// Write a key [D] or a value [Dv] in f8 and its scale, as StoreKvArgs says.
void store_fp8_key(const PagedKvCache& cache, int64_t block, int64_t head, int64_t offset,
                   const float* key);
void store_fp8_value(const PagedKvCache& cache, int64_t block, int64_t head, int64_t offset,
                     const float* value);

// [T, H, D] or [R, D] as rows of D: how many, and row i.
template <class Void>
int64_t num_rows(const BasicTensor<Void>& x) {
  return x.rank == 3 ? x.shape[0] * x.shape[1] : x.shape[0];
}
template <class Void>
auto* row_of(const BasicTensor<Void>& x, int64_t i) {
  const int64_t num_heads = x.rank == 3 ? x.shape[1] : 1;
  return x.template as<float>() + i / num_heads * x.strides[0] + i % num_heads * x.strides[1];
}

// Throws InvalidArgument, naming the entry, for an id that is no weight's.
void check_weight_ids(const GroupedLinearArgs& args);
// [N], of a weight of a grouped_linear that has biases.
inline ConstTensor bias_of_weight(const GroupedLinearArgs& args, int32_t id) {
  return {args.bias.as<float>() + id * args.bias.strides[0], DType::kF32, {args.bias.shape[1]}};
}

// N of the parts stacked along it. Throws InvalidArgument unless the parts are contiguous [N_i, K]
// of f32, bf16 or f16 with one K and dtype is f32 or bf16.
int64_t check_linear_parts(std::span<const ConstTensor> parts, DType dtype);

// n elements of a row-major f32, bf16 or f16 tensor at `offset`, as f32 or rounded to bf16.
void convert_to_f32(const ConstTensor& from, int64_t offset, int64_t n, float* to);
void convert_to_bf16(const ConstTensor& from, int64_t offset, int64_t n, uint16_t* to);

}  // namespace llmserve
