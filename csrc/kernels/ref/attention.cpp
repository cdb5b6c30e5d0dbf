#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "core/float_types.h"
#include "kernels/attention_ranks.h"
#include "kernels/ref/ref_backend.h"
#include "kernels/ref/scalar_math.h"

namespace llmserve {
namespace {

// One query row's running softmax: the maximum, the sum and the unnormalised output.
struct Softmax {
  float m = -std::numeric_limits<float>::infinity();
  float l = 0;
  std::vector<float> o;

  explicit Softmax(int64_t width) : o(static_cast<size_t>(width), 0.0f) {}

  void merge(const Softmax& tile) {
    const float m_new = std::max(m, tile.m);
    const float scale_old = ref::v_exp(m - m_new);
    const float scale_tile = ref::v_exp(tile.m - m_new);
    l = l * scale_old + tile.l * scale_tile;
    for (size_t i = 0; i < o.size(); ++i) o[i] = o[i] * scale_old + tile.o[i] * scale_tile;
    m = m_new;
  }
};

// One KV head of one sequence.
struct KvHead {
  const PagedAttentionArgs& args;
  const int32_t* block_table;
  int64_t head;
  bool has_pairs;  // queries and probabilities are rounded to bf16 and multiplied in pairs

  int64_t block_of(int64_t position) const {
    return block_table[position / args.cache.keys.shape[2]];
  }
  int64_t offset_of(int64_t position) const { return position % args.cache.keys.shape[2]; }

  // Elements are codes in f8, whose row's scale comes in by itself.
  static float at(const Tensor& part, int64_t idx) {
    if (part.dtype == DType::kF32) return part.as<float>()[idx];
    if (part.dtype == DType::kBF16) return bf16_to_f32(part.as<uint16_t>()[idx]);
    return fp8_to_f32(part.as<uint8_t>()[idx]);
  }
  float key(int64_t position, int64_t d) const {
    const PagedKvCache& cache = args.cache;
    return at(cache.keys, cache.key_index(block_of(position), head, offset_of(position), d));
  }
  float value(int64_t position, int64_t d) const {
    const Tensor& values = args.cache.values;
    return at(values, block_of(position) * values.strides[0] + head * values.strides[1] +
                          offset_of(position) * values.strides[2] + d);
  }
  // Whose rows have the scales of the values.
  const Tensor& scales_of_values() const {
    return args.cache.has_values_in_keys() ? args.cache.keys : args.cache.values;
  }
  float row_scale(const Tensor& part, int64_t position) const {
    if (part.dtype != DType::kF8E4M3) return 1.0f;
    float scale = 0;
    std::memcpy(&scale,
                part.as<uint8_t>() +
                    cache_scale_offset(part, block_of(position), head, offset_of(position)),
                sizeof(scale));
    return scale;
  }

  float dot(const float* q, int64_t position) const {
    const int64_t head_dim = args.q.shape[2];
    float sum = 0;
    if (!has_pairs) {
      for (int64_t d = 0; d < head_dim; ++d) sum += q[d] * key(position, d);
      return sum;
    }
    std::vector<uint16_t> a, b;
    for (int64_t d = 0; d < head_dim; ++d) {
      a.push_back(round_to_bf16(q[d]));
      b.push_back(f32_to_bf16(key(position, d)));
    }
    return dot_bf16(Bf16Products::kPairs, a.data(), b.data(), head_dim);
  }

  float score(const float* q, int64_t position) const {
    const float score = dot(q, position) * (args.scale * row_scale(args.cache.keys, position));
    return args.soft_cap > 0 ? args.soft_cap * ref::v_tanh(score / args.soft_cap) : score;
  }

  Softmax tile(const float* q, int64_t begin, int64_t end) const {
    Softmax result(args.cache.values.shape[3]);
    std::vector<float> scores;
    for (int64_t j = begin; j < end; ++j) {
      scores.push_back(score(q, j));
      result.m = std::max(result.m, scores.back());
    }
    if (has_pairs) return weigh_in_pairs(scores, begin, end, std::move(result));
    for (int64_t j = begin; j < end; ++j) {
      const float p = ref::v_exp(scores[static_cast<size_t>(j - begin)] - result.m);
      result.l += p;
      const float weight = p * row_scale(scales_of_values(), j);
      for (size_t i = 0; i < result.o.size(); ++i)
        result.o[i] += weight * value(j, static_cast<int64_t>(i));
    }
    return result;
  }

  // Pairs of positions from an even one on; the other of a pair that is not seen counts as zero.
  Softmax weigh_in_pairs(const std::vector<float>& scores, int64_t begin, int64_t end,
                         Softmax result) const {
    const int64_t first = begin / 2 * 2;
    std::vector<uint16_t> p(static_cast<size_t>((end - first + 1) / 2 * 2));
    std::vector<uint16_t> column(p.size());
    for (int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<size_t>(j - first);
      const float weight = ref::v_exp_bf16(scores[static_cast<size_t>(j - begin)] - result.m);
      result.l += bf16_to_f32(round_to_bf16(weight));
      p[at] = round_to_bf16(weight * row_scale(scales_of_values(), j));
    }
    for (size_t i = 0; i < result.o.size(); ++i) {
      for (int64_t j = begin; j < end; ++j)
        column[static_cast<size_t>(j - first)] = f32_to_bf16(value(j, static_cast<int64_t>(i)));
      result.o[i] =
          dot_bf16(Bf16Products::kPairs, p.data(), column.data(), static_cast<int64_t>(p.size()));
    }
    return result;
  }

  Softmax span(const float* q, int64_t begin, int64_t end) const {
    Softmax sum(args.cache.values.shape[3]);
    for (int64_t t = begin / kKvTile * kKvTile; t < end; t += kKvTile)
      sum.merge(tile(q, std::max(begin, t), std::min(end, t + kKvTile)));
    return sum;
  }

  // `sink` is the head's, or null.
  void row(const float* q, int64_t position, const float* sink, float* out) const {
    const int64_t begin = args.window > 0 ? std::max<int64_t>(0, position - args.window + 1) : 0;
    Softmax sum(args.cache.values.shape[3]);
    for (int64_t s = begin / kKvSpan * kKvSpan; s <= position; s += kKvSpan)
      sum.merge(span(q, std::max(begin, s), std::min(position + 1, s + kKvSpan)));
    const float m = sink == nullptr ? sum.m : std::max(sum.m, *sink);
    const float kept = sink == nullptr ? 1.0f : ref::v_exp(sum.m - m);
    const float l = sink == nullptr ? sum.l : sum.l * kept + ref::v_exp(*sink - m);
    for (size_t i = 0; i < sum.o.size(); ++i) out[i] = sum.o[i] * kept / l;
  }
};

}  // namespace

void RefBackend::do_paged_attention(const PagedAttentionArgs& args) {
  if (args.ranks != nullptr) args.ranks->meet(nullptr);  // each walks all positions
  const int64_t group = args.q.shape[1] / args.cache.keys.shape[1];
  const bool has_pairs = args.cache.keys.dtype != DType::kF32 && bf16_ != Bf16Products::kNone;
  for (size_t b = 0; b < args.kv_lens.size(); ++b) {
    const int64_t first = args.query_starts[b];
    const int64_t last = args.query_starts[b + 1];
    for (int64_t t = first; t < last; ++t) {
      for (int64_t h = 0; h < args.q.shape[1]; ++h) {
        const KvHead head{args,
                          args.block_tables.data() + static_cast<int64_t>(b) * args.max_blocks,
                          h / group, has_pairs};
        head.row(args.q.as<float>() + t * args.q.strides[0] + h * args.q.strides[1],
                 args.kv_lens[b] - (last - t), args.sinks ? args.sinks.as<float>() + h : nullptr,
                 args.out.as<float>() + t * args.out.strides[0] + h * args.out.strides[1]);
      }
    }
  }
}

}  // namespace llmserve
