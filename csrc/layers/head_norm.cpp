#include "layers/head_norm.h"

namespace llmserve {
namespace {

std::vector<WeightPart> vector_parts(const std::string& full, int64_t num_heads, int64_t head_dim,
                                     QkNorm kind) {
  if (kind == QkNorm::kHead) return {{full, head_dim}};
  if (kind == QkNorm::kProjection) return {{full, num_heads * head_dim}};
  const size_t place = full.find("{}");
  if (place == std::string::npos) return {{.name = full, .size = num_heads, .width = head_dim}};
  std::vector<WeightPart> parts;
  for (int64_t h = 0; h < num_heads; ++h)
    parts.push_back({std::string(full).replace(place, 2, std::to_string(h)), head_dim});
  return parts;
}

// Columns [begin, begin + width) of all tokens as rows [T, width].
Tensor columns(const Tensor& heads, int64_t first_head, int64_t width) {
  Tensor rows = heads.slice(1, first_head, 1);
  rows.rank = 2;
  rows.shape[1] = width;
  rows.strides[1] = 1;
  return rows;
}

}  // namespace

HeadNorm::HeadNorm(WeightLoader& weights, const std::string& name, int64_t num_heads,
                   int64_t head_dim, QkNorm kind, const NormSpec& spec)
    : kind_(kind),
      spec_(spec),
      weight_(weights.vector(WeightGroup::kNorm,
                             vector_parts(name + ".weight", num_heads, head_dim, kind))) {
  if (spec.kind == NormKind::kLayer && spec.has_bias)
    bias_ =
        weights.vector(WeightGroup::kNorm, vector_parts(name + ".bias", num_heads, head_dim, kind));
}

void HeadNorm::forward(const ForwardContext& context, const Tensor& heads, int64_t first) const {
  const int64_t num_heads = heads.shape[1];
  const int64_t head_dim = heads.shape[2];
  const ConstTensor weight = weight_.view();
  const ConstTensor bias = bias_.view();
  if (kind_ == QkNorm::kHead && spec_.kind == NormKind::kRms)
    return normalise(context, spec_, heads, weight, {}, heads);
  if (kind_ == QkNorm::kProjection) {
    const Tensor rows = columns(heads, 0, num_heads * head_dim);
    return normalise(context, spec_, rows, weight, bias, rows);
  }
  for (int64_t h = 0; h < num_heads; ++h) {
    const Tensor rows = columns(heads, h, head_dim);
    const int64_t begin = kind_ == QkNorm::kHead ? 0 : (first + h) * head_dim;
    const auto of_head = [&](const ConstTensor& all) {
      return all ? all.slice(0, begin, head_dim) : all;
    };
    normalise(context, spec_, rows, of_head(weight), of_head(bias), rows);
  }
}

}  // namespace llmserve
