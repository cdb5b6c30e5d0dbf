#include "models/model.h"

#include "core/error.h"

namespace llmserve {

std::vector<KvLayerSpec> kv_lanes(std::span<const KvLayerSpec> layers) {
  std::vector<KvLayerSpec> lanes;
  for (const KvLayerSpec& layer : layers) {
    const auto lane = static_cast<size_t>(layer.lane);
    if (lane >= lanes.size()) lanes.resize(lane + 1);
    check_internal(lanes[lane].num_kv_heads == 0 || lanes[lane].has_rows_of(layer),
                   "layers of a lane are alike");
    lanes[lane] = layer;
  }
  return lanes;
}

int64_t Model::kv_bytes_per_token(DType dtype) const {
  int64_t bytes = 0;
  for (const KvLayerSpec& layer : kv_layers()) bytes += layer.bytes_per_token(dtype);
  return bytes;
}

}  // namespace llmserve
