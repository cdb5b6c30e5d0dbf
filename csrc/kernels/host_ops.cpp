#include "kernels/host_ops.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/float_types.h"
#include "core/shape_check.h"
#include "kernels/backend.h"
#include "kernels/block_runs.h"

namespace llmserve {
namespace {

// Checkpoints are mapped as they are: elements may be unaligned.
template <class T>
T load_unaligned(const void* data, int64_t idx) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(data) + idx * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

}  // namespace

void compute_rotary_table(const RotaryTableArgs& args) {
  const int64_t half = static_cast<int64_t>(args.inv_freq.size());
  for (size_t t = 0; t < args.positions.size(); ++t) {
    const double grown = std::log1p(static_cast<double>(args.positions[t] / args.period));
    const float scale =
        args.scale * static_cast<float>(1.0 + static_cast<double>(args.growth) * grown);
    float* row = args.cos_sin.as<float>() + static_cast<int64_t>(t) * args.cos_sin.strides[0];
    for (int64_t i = 0; i < half; ++i) {
      const float angle =
          static_cast<float>(args.positions[t]) * args.inv_freq[static_cast<size_t>(i)];
      row[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * scale;
      row[half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * scale;
    }
  }
}

void read_table_row(const EmbeddingArgs& args, int64_t id, float* out) {
  const int64_t at = id * args.table.strides[0];
  const int64_t width = args.out.shape[1];
  if (args.blocks)
    args.blocks->dequantize(args.table.as<std::byte>() + at, width / args.blocks->block_elements,
                            out);
  else
    convert_to_f32(args.table, at, width, out);
  if (args.scale == 1.0f) return;
  for (int64_t i = 0; i < width; ++i) out[i] *= args.scale;
}

void copy_given_rows(const EmbeddingArgs& args) {
  const int64_t width = args.out.shape[1];
  for (const GivenRows& given : args.given) {
    for (int64_t i = 0; i < given.count; ++i) {
      std::memcpy(args.out.as<float>() + (given.begin + i) * args.out.strides[0],
                  given.rows + i * width, static_cast<size_t>(width) * sizeof(float));
    }
  }
}

void copy_blocks_on_host(const CopyBlocksArgs& args) {
  for (const auto& [source, destination] : args.pairs) {
    for (const Tensor& part : {args.cache.keys, args.cache.values}) {
      const int64_t bytes = cache_block_bytes(part);
      std::memmove(part.as<std::byte>() + destination * bytes,
                   part.as<std::byte>() + source * bytes, static_cast<size_t>(bytes));
    }
  }
}

void store_fp8_key(const PagedKvCache& cache, int64_t block, int64_t head, int64_t offset,
                   const float* key) {
  auto* bytes = cache.keys.as<uint8_t>();
  std::vector<uint8_t> codes(static_cast<size_t>(cache.keys.shape[3]));
  const float scale = round_row_to_fp8(key, cache.keys.shape[3], codes.data());
  for (int64_t d = 0; d < std::ssize(codes); ++d)
    bytes[cache.key_index(block, head, offset, d)] = codes[static_cast<size_t>(d)];
  std::memcpy(bytes + cache_scale_offset(cache.keys, block, head, offset), &scale, sizeof(scale));
}

void store_fp8_value(const PagedKvCache& cache, int64_t block, int64_t head, int64_t offset,
                     const float* value) {
  const Tensor& values = cache.values;
  auto* bytes = values.as<uint8_t>();
  uint8_t* row =
      bytes + block * values.strides[0] + head * values.strides[1] + offset * values.strides[2];
  const float scale = round_row_to_fp8(value, values.shape[3], row);
  std::memcpy(bytes + cache_scale_offset(values, block, head, offset), &scale, sizeof(scale));
}

int64_t Backend::transfer_blocks(const TransferBlocksArgs& args) {
  validate(args);
  const PagedKvCache& from = args.to_host ? args.device : args.host;
  const PagedKvCache& to = args.to_host ? args.host : args.device;
  const auto copy = [](const Tensor& source, const Tensor& destination, const BlockRun& run) {
    const int64_t bytes = cache_block_bytes(source);
    std::memcpy(destination.as<std::byte>() + run.destination * bytes,
                source.as<std::byte>() + run.source * bytes,
                static_cast<size_t>(run.count * bytes));
  };
  for (const BlockRun& run : block_runs(args.pairs)) {
    copy(from.keys, to.keys, run);
    if (!from.has_values_in_keys()) copy(from.values, to.values, run);
  }
  return 0;
}

LinearWeight Backend::pack_quantized(const LinearFormat& format, int64_t, int64_t,
                                     const QuantizedRowReader&) {
  throw NotSupported(concat("quantization '", format.name, "' is not supported on device '", name(),
                            "'; use device='cpu', or no quantization"));
}

void check_weight_ids(const GroupedLinearArgs& args) {
  const auto* ids = args.weight_ids.as<int32_t>();
  for (int64_t r = 0; r < args.weight_ids.shape[0]; ++r) {
    if (ids[r] >= std::ssize(args.weights))
      throw InvalidArgument(concat("grouped_linear.weight_ids: expected ids below ",
                                   args.weights.size(), ", got ", ids[r], " at ", r));
  }
}

int64_t check_linear_parts(std::span<const ConstTensor> parts, DType dtype) {
  if (dtype != DType::kF32 && dtype != DType::kBF16) {
    throw InvalidArgument(
        concat("pack_linear: expected dtype float32 or bfloat16, got ", name(dtype)));
  }
  if (parts.empty()) throw InvalidArgument("pack_linear: expected at least one matrix, got none");
  int64_t rows = 0;
  const int64_t width = parts[0].rank == 2 ? parts[0].shape[1] : -1;
  for (const ConstTensor& part : parts) {
    check_tensor("pack_linear.parts", part, {{"N"}, {"K", width}},
                 {DType::kF32, DType::kBF16, DType::kF16});
    if (!part.is_contiguous()) throw InvalidArgument("pack_linear.parts: expected contiguous rows");
    rows += part.shape[0];
  }
  return rows;
}

void convert_to_f32(const ConstTensor& from, int64_t offset, int64_t n, float* to) {
  switch (from.dtype) {
    case DType::kF32:
      std::memcpy(to, from.as<std::byte>() + offset * 4, static_cast<size_t>(n) * 4);
      break;
    case DType::kBF16:
      for (int64_t i = 0; i < n; ++i)
        to[i] = bf16_to_f32(load_unaligned<uint16_t>(from.data, offset + i));
      break;
    default:
      for (int64_t i = 0; i < n; ++i)
        to[i] = f16_to_f32(load_unaligned<uint16_t>(from.data, offset + i));
  }
}

void convert_to_bf16(const ConstTensor& from, int64_t offset, int64_t n, uint16_t* to) {
  switch (from.dtype) {
    case DType::kBF16:
      std::memcpy(to, from.as<std::byte>() + offset * 2, static_cast<size_t>(n) * 2);
      break;
    case DType::kF32:
      for (int64_t i = 0; i < n; ++i)
        to[i] = f32_to_bf16(load_unaligned<float>(from.data, offset + i));
      break;
    default:
      for (int64_t i = 0; i < n; ++i)
        to[i] = f32_to_bf16(f16_to_f32(load_unaligned<uint16_t>(from.data, offset + i)));
  }
}

}  // namespace llmserve
