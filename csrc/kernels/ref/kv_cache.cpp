#include "core/float_types.h"
#include "kernels/host_ops.h"
#include "kernels/ref/ref_backend.h"

namespace llmserve {
namespace {

void put(const Tensor& cache, int64_t idx, float x) {
  if (cache.dtype == DType::kF32)
    cache.as<float>()[idx] = x;
  else
    cache.as<uint16_t>()[idx] = f32_to_bf16(x);
}

}  // namespace

void RefBackend::do_store_kv(const StoreKvArgs& args) {
  const PagedKvCache& cache = args.cache;
  const int64_t heads = cache.keys.shape[1];
  const int64_t block_size = cache.keys.shape[2];
  const int64_t value_dim = cache.values.shape[3];
  for (int64_t t = 0; t < args.keys.shape[0]; ++t) {
    const int64_t slot = args.slots[static_cast<size_t>(t)];
    if (slot < 0) continue;
    const int64_t block = slot / block_size;
    const int64_t offset = slot % block_size;
    for (int64_t h = 0; h < heads; ++h) {
      const float* key =
          args.keys.as<float>() + t * args.keys.strides[0] + h * args.keys.strides[1];
      const bool is_fp8 = cache.keys.dtype == DType::kF8E4M3;
      if (is_fp8) store_fp8_key(cache, block, h, offset, key);
      for (int64_t d = 0; !is_fp8 && d < cache.keys.shape[3]; ++d)
        put(cache.keys, cache.key_index(block, h, offset, d), key[d]);
      if (cache.has_values_in_keys()) continue;
      const float* value =
          args.values.as<float>() + t * args.values.strides[0] + h * args.values.strides[1];
      if (is_fp8) {
        store_fp8_value(cache, block, h, offset, value);
        continue;
      }
      const int64_t row = ((block * heads + h) * block_size + offset) * value_dim;
      for (int64_t d = 0; d < value_dim; ++d) put(cache.values, row + d, value[d]);
    }
  }
}

void RefBackend::do_copy_blocks(const CopyBlocksArgs& args) { copy_blocks_on_host(args); }

}  // namespace llmserve
