#include "core/float_types.h"
#include "kernels/host_ops.h"
#include "kernels/ref/ref_backend.h"

namespace llmserve {
namespace {

void store(const ConstTensor& from, std::span<const int64_t> slots, const Tensor& cache) {
  const int64_t heads = cache.shape[1];
  const int64_t block_size = cache.shape[2];
  const int64_t width = cache.shape[3];
  for (size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < 0) continue;
    const int64_t block = slots[t] / block_size;
    const int64_t offset = slots[t] % block_size;
    for (int64_t h = 0; h < heads; ++h) {
      const float* x =
          from.as<float>() + static_cast<int64_t>(t) * from.strides[0] + h * from.strides[1];
      const int64_t to = ((block * heads + h) * block_size + offset) * width;
      for (int64_t d = 0; d < width; ++d) {
        if (cache.dtype == DType::kF32)
          cache.as<float>()[to + d] = x[d];
        else
          cache.as<uint16_t>()[to + d] = f32_to_bf16(x[d]);
      }
    }
  }
}

}  // namespace

void RefBackend::store_kv(const StoreKvArgs& args) {
  validate(args);
  store(args.keys, args.slots, args.cache.keys);
  store(args.values, args.slots, args.cache.values);
}

void RefBackend::copy_blocks(const CopyBlocksArgs& args) {
  validate(args);
  copy_blocks_on_host(args);
}

}  // namespace llmserve
