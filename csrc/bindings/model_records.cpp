#include "bindings/model_records.h"

#include <pybind11/stl.h>

#include "models/layer_kinds.h"

namespace py = pybind11;

namespace llmserve {
namespace {

py::dict to_dict(const RopeParameters& rope) {
  py::dict out;
  out["type"] = name(rope.type);
  out["theta"] = rope.theta;
  out["rotary_dim"] = rope.rotary_dim;
  out["factor"] = rope.factor;
  out["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  out["attention_factor"] = rope.attention_factor;
  out["beta_fast"] = rope.beta_fast;
  out["beta_slow"] = rope.beta_slow;
  out["mscale"] = rope.mscale;
  out["mscale_all_dim"] = rope.mscale_all_dim;
  out["truncate"] = rope.truncate;
  out["low_freq_factor"] = rope.low_freq_factor;
  out["high_freq_factor"] = rope.high_freq_factor;
  out["query_growth"] = rope.query_growth;
  out["short_factors"] = rope.short_factors;
  out["long_factors"] = rope.long_factors;
  return out;
}

py::dict to_dict(const LatentDims& dims) {
  py::dict out;
  out["query_rank"] = dims.query_rank;
  out["rank"] = dims.rank;
  out["plain_dim"] = dims.plain_dim;
  out["rotary_dim"] = dims.rotary_dim;
  out["value_dim"] = dims.value_dim;
  return out;
}

}  // namespace

py::dict to_dict(const ModelConfig& config) {
  py::dict out;
  out["architecture"] = config.architecture;
  out["text_part_of"] = config.text_part_of;
  out["stored_dtype"] = config.stored_dtype;
  out["vocab_size"] = config.vocab_size;
  out["hidden_size"] = config.hidden_size;
  out["intermediate_size"] = config.intermediate_size;
  out["num_layers"] = config.num_layers;
  out["num_heads"] = config.num_heads;
  out["num_kv_heads"] = config.num_kv_heads;
  out["head_dim"] = config.head_dim;
  out["latent"] = config.latent.rank == 0 ? py::object(py::none()) : to_dict(config.latent);
  out["activation"] = name(config.activation);
  out["norm"] = config.norm.kind == NormKind::kRms ? "rms" : "layer";
  out["norm_eps"] = config.norm.numbers.eps;
  out["attention_bias"] = config.attention_bias;
  out["output_bias"] = config.output_bias;
  out["mlp_bias"] = config.mlp_bias;
  out["tie_word_embeddings"] = config.tie_word_embeddings;
  py::list windows;
  py::list rope_of_layer;
  py::list feed_forward_of_layer;
  py::list kv_group_of_layer;
  py::list kv_lane_of_layer;
  for (const LayerTraits& layer : config.layers) {
    windows.append(layer.window);
    rope_of_layer.append(layer.rope);
    feed_forward_of_layer.append(layer.feed_forward->name);
  }
  py::list kv_windows;
  for (const CacheGroupSpec& group : row_groups(config.cache_groups))
    kv_windows.append(group.window);
  for (const KvPlace& place : config.kv_places) {
    kv_group_of_layer.append(place.group);
    kv_lane_of_layer.append(place.lane);
  }
  out["windows"] = windows;
  out["feed_forward_of_layer"] = feed_forward_of_layer;
  out["kv_windows"] = kv_windows;
  out["kv_group_of_layer"] = kv_group_of_layer;
  out["kv_lane_of_layer"] = kv_lane_of_layer;
  out["rope_of_layer"] = rope_of_layer;
  py::list ropes;
  for (const RopeParameters& rope : config.ropes) ropes.append(to_dict(rope));
  out["ropes"] = ropes;
  out["max_position_embeddings"] = config.max_position_embeddings;
  out["max_model_len"] = config.max_model_len;
  out["bos_token_ids"] = config.bos_token_ids;
  out["eos_token_ids"] = config.eos_token_ids;
  return out;
}

// With "{}" for the number of an expert; without, the whole names of tensors of all experts.
static py::dict expert_names(const ExpertSpec& experts, const std::string& prefix) {
  const ExpertNames& names = experts.names;
  const bool is_whole = names.gate_up.empty();
  const bool is_shared_whole = names.shared_gate_up.empty();
  const bool has_shared = experts.shared_size > 0;
  py::dict out;
  const auto put = [&](const char* key, const std::string& name, bool exists) {
    out[key] = name.empty() || !exists ? py::object(py::none()) : py::str(prefix + name);
  };
  put("gate_up", names.gate_up, true);
  put("gate", names.gate, is_whole);
  put("up", names.up, is_whole);
  put("down", names.down, true);
  put("shared_gate_up", names.shared_gate_up, has_shared);
  put("shared_gate", names.shared_gate, has_shared && is_shared_whole);
  put("shared_up", names.shared_up, has_shared && is_shared_whole);
  put("shared_down", names.shared_down, has_shared);
  put("router", names.router, true);
  put("shared_weight", names.shared_weight, has_shared);
  out["num_experts"] = experts.num_experts;
  out["top_k"] = experts.top_k;
  out["intermediate_size"] = experts.intermediate_size;
  out["shared_size"] = experts.shared_size;
  out["is_transposed"] = experts.is_transposed;
  out["is_interleaved"] = experts.is_interleaved;
  return out;
}

py::dict layer_names(const ModelConfig& config, int64_t layer_idx) {
  const TensorNames& names = config.names;
  const std::string prefix = layer_prefix(config, layer_idx);
  py::dict out;
  const auto put = [&](const char* key, const std::string& name) {
    out[key] = name.empty() ? py::object(py::none()) : py::str(prefix + name);
  };
  out["prefix"] = prefix;
  put("attention_norm", names.attention_norm);
  put("attention_post_norm", names.attention_post_norm);
  put("mlp_norm", names.mlp_norm);
  put("mlp_post_norm", names.mlp_post_norm);
  put("qkv", names.qkv);
  put("q", names.qkv.empty() ? names.q : "");
  put("k", names.qkv.empty() ? names.k : "");
  put("v", names.qkv.empty() ? names.v : "");
  put("attention_output", names.attention_output);
  put("gate_up", names.gate_up);
  put("gate", names.gate_up.empty() ? names.gate : "");
  put("up", names.gate_up.empty() ? names.up : "");
  put("down", names.down);
  const LayerTraits& layer = config.layers[static_cast<size_t>(layer_idx)];
  out["attention"] = layer.attention->name;
  out["feed_forward"] = layer.feed_forward->name;
  out["experts"] = layer.feed_forward == &kExperts
                       ? py::object(expert_names(config.experts, prefix))
                       : py::object(py::none());
  out["norm_has_weight"] = config.norm.has_weight;
  out["norm_has_bias"] = config.norm.kind == NormKind::kLayer && config.norm.has_bias;
  out["norm_weight_offset"] = config.norm.numbers.weight_offset;
  out["is_parallel"] = config.is_parallel;
  out["is_transposed"] = config.has_transposed_weights;
  out["num_heads"] = config.num_heads;
  out["num_kv_heads"] = config.num_kv_heads;
  out["head_dim"] = config.head_dim;
  out["has_gated_activation"] = !names.gate.empty() || !names.gate_up.empty();
  return out;
}

py::dict to_dict(const WeightReport& weights) {
  py::dict groups;
  for (int i = 0; i < kNumWeightGroups; ++i)
    groups[py::str(std::string(name(static_cast<WeightGroup>(i))))] =
        weights.group_bytes[static_cast<size_t>(i)];
  py::dict out;
  out["group_bytes"] = groups;
  out["total_bytes"] = weights.total_bytes();
  out["mapped_bytes"] = weights.mapped_bytes;
  out["num_experts"] = weights.num_experts;
  out["experts_per_token"] = weights.experts_per_token;
  py::list integers;
  for (const LinearFormat* format : weights.integers) integers.append(std::string(format->name));
  out["integers"] = integers;
  py::list quantized;
  for (const QuantizedUse& use : weights.quantized) {
    py::dict row;
    row["stored"] = use.stored;
    row["runs"] = use.runs;
    row["num_weights"] = use.num_weights;
    quantized.append(row);
  }
  out["quantized"] = quantized;
  out["notes"] = weights.notes;
  out["unused_tensors"] = weights.unused_tensors;
  return out;
}

py::list tensor_list(const Checkpoint& checkpoint) {
  py::list out;
  for (const TensorEntry& entry : checkpoint.tensors()) {
    py::dict tensor;
    tensor["name"] = entry.name;
    tensor["dtype"] = checkpoint.storage_name(entry);
    tensor["shape"] = std::vector<int64_t>(entry.shape.begin(), entry.shape.end());
    tensor["file"] = checkpoint.file(entry)->name();
    tensor["offset"] = entry.offset;
    tensor["num_bytes"] = entry.num_bytes;
    out.append(tensor);
  }
  return out;
}

}  // namespace llmserve
