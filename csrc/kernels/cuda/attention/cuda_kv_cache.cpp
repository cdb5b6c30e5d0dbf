// What is written to the KV cache.
#include <algorithm>

#include "kernels/cuda/argument_views.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_check.h"

namespace llmserve::cuda {

void CudaBackend::do_store_kv(const StoreKvArgs& args) {
  check_layout("store_kv", args.cache);
  check_grid("store_kv", args.keys.shape[0]);
  memory_.make_current();
  const int64_t* slots = slots_(args.slots);
  const auto store = [&](const ConstTensor& from, const Tensor& cache) {
    store_cache({.from = from.as<float>(),
                 .token_stride = from.strides[0],
                 .head_stride = from.strides[1],
                 .num_tokens = from.shape[0],
                 .slots = slots,
                 .cache = part_of(cache),
                 .storage = storage_of(cache.dtype)},
                stream());
  };
  store(args.keys, args.cache.keys);
  if (!args.cache.has_values_in_keys()) store(args.values, args.cache.values);
}

// Each copy is in the stream's order, so that a block may be copied on.
void CudaBackend::do_copy_blocks(const CopyBlocksArgs& args) {
  memory_.make_current();
  for (const auto& [source, destination] : args.pairs) {
    if (source == destination) continue;
    for (const Tensor& part : {args.cache.keys, args.cache.values}) {
      const int64_t bytes = cache_block_bytes(part);
      check("cudaMemcpyAsync of a block",
            cudaMemcpyAsync(part.as<std::byte>() + destination * bytes,
                            part.as<std::byte>() + source * bytes, static_cast<size_t>(bytes),
                            cudaMemcpyDeviceToDevice, stream()));
      if (args.cache.has_values_in_keys()) break;
    }
  }
}

std::optional<QkvParams> CudaBackend::qkv_params(const PrepareQkvArgs& args) {
  const auto lie_side_by_side = [](const ConstTensor& heads) {
    return heads.strides[1] == heads.shape[2] || heads.shape[1] == 1;
  };
  const bool turn_alike =
      !args.q_cos_sin || !args.k_cos_sin || args.q_cos_sin.shape[1] == args.k_cos_sin.shape[1];
  if (args.cache.has_values_in_keys() || args.k.shape[2] > kQkvMaxWidth || !turn_alike ||
      !lie_side_by_side(args.q) || !lie_side_by_side(args.k) || !lie_side_by_side(args.v))
    return std::nullopt;
  check_layout("prepare_qkv", args.cache);
  return QkvParams{.q = rows_of(args.q),
                   .k = rows_of(ConstTensor(args.k)),
                   .v = rows_of(args.v),
                   .q_norm = args.q_norm.as<float>(),
                   .k_norm = args.k_norm.as<float>(),
                   .norm = args.numbers,
                   .q_cos_sin = rows_of(args.q_cos_sin),
                   .k_cos_sin = rows_of(args.k_cos_sin),
                   .half = std::max(args.q_cos_sin.shape[1], args.k_cos_sin.shape[1]) / 2,
                   .interleaved = args.interleaved,
                   .num_tokens = args.q.shape[0],
                   .num_heads = args.q.shape[1],
                   .slots = slots_(args.slots),
                   .keys = part_of(args.cache.keys),
                   .values = part_of(args.cache.values),
                   .storage = storage_of(args.cache.keys.dtype),
                   .token_blocks = qkv_blocks(args.q.shape[1] + 2 * args.k.shape[1]),
                   .norm_threads = rms_threads(args.k.shape[2])};
}

void CudaBackend::do_prepare_qkv(const PrepareQkvArgs& args) {
  memory_.make_current();
  const std::optional<QkvParams> params = qkv_params(args);
  if (!params) return Backend::do_prepare_qkv(args);
  check_grid("prepare_qkv", params->num_tokens * params->token_blocks);
  cuda::prepare_qkv(*params, stream());
}

}  // namespace llmserve::cuda
