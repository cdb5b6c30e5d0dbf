#include "models/config_reader.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "models/config_fields.h"
#include "models/expert_config.h"
#include "models/layer_kinds.h"
#include "models/registry.h"
#include "models/rope_config.h"

namespace llmserve {
namespace {

// Far above any model and small enough that no product of three overflows 64 bits.
constexpr int64_t kMaxDim = int64_t{1} << 20;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

const ArchitectureRow& read_architecture(const JsonNode& json) {
  const JsonNode names = json["architectures"];
  if (!names.is_null()) {
    const std::vector<JsonNode> list = names.as_array();
    if (!list.empty()) return find_architecture(list[0].as_string(), list[0].where());
  }
  const std::string& model_type = json["model_type"].as_string();
  for (const ArchitectureRow& row : architecture_registry()) {
    if (row.model_type == model_type) return row;
  }
  return find_architecture(model_type, json["model_type"].where());
}

std::vector<int32_t> read_token_ids(const JsonNode& node) {
  std::vector<int32_t> ids;
  const auto add = [&](const JsonNode& id) {
    const int64_t value = id.as_int(-1, kMaxTokens);
    if (value >= 0) ids.push_back(static_cast<int32_t>(value));  // -1 is "none" in some configs
  };
  if (node.is_null()) return ids;
  if (!node.is_array()) {
    add(node);
    return ids;
  }
  for (const JsonNode& id : node.as_array()) add(id);
  return ids;
}

// What the weights are in says the file; the name is shown, and chosen by where there is no file.
std::string read_dtype(const JsonNode& json) {
  static constexpr std::string_view kNames[] = {
      "auto",    "float32", "float",         "float16",     "half", "bfloat16",
      "float64", "double",  "float8_e4m3fn", "float8_e5m2", "int8"};
  const JsonNode node = json["dtype"].is_null() ? json["torch_dtype"] : json["dtype"];
  if (node.is_null()) return "";
  std::string_view dtype = node.as_string();
  if (dtype.starts_with("torch.")) dtype.remove_prefix(6);
  if (std::ranges::find(kNames, dtype) == std::end(kNames))
    node.fail(concat("expected a floating-point type such as \"bfloat16\", got ", node.describe()));
  return std::string(dtype);
}

// Of a dense model's config: some families write 1 expert, or none.
void refuse_experts(const JsonNode& json, std::string_view architecture) {
  for (const std::string_view field :
       {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}) {
    const JsonNode node = json[field];
    if (node.is_null() || (!node.is_array() && node.as_int(0, kMaxDim) <= 1)) continue;
    throw NotSupported(concat(node.where(), ": got ", node.describe(), " experts, and ",
                              architecture, " is run as the dense model that it is"));
  }
}

void read_dims(const JsonNode& json, ModelConfig& config) {
  config.vocab_size = json["vocab_size"].as_int(1, kMaxTokens);
  config.hidden_size = first_of(json, {"hidden_size", "n_embd", "n_embed"}).as_int(1, kMaxDim);
  config.intermediate_size =
      first_of(json, {"intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"})
          .as_int_or(0, 1, kMaxDim);
  config.num_layers =
      first_of(json, {"num_hidden_layers", "n_layer", "num_layers"}).as_int(1, kMaxLayers);
  config.num_heads =
      first_of(json, {"num_attention_heads", "n_head", "num_heads"}).as_int(1, kMaxDim);
  config.num_kv_heads =
      first_of(json, {"num_key_value_heads", "num_kv_heads"}).as_int_or(0, 1, kMaxDim);
  config.head_dim = json["head_dim"].as_int_or(0, 1, kMaxDim);
  config.max_position_embeddings =
      first_of(json, {"max_position_embeddings", "n_positions"}).as_int_or(0, 1, kMaxTokens);
  config.layers.resize(static_cast<size_t>(config.num_layers));
}

void finish_dims(const JsonNode& json, ModelConfig& config) {
  if (config.intermediate_size == 0)  // the family has no default: this names the field
    config.intermediate_size = json["intermediate_size"].as_int(1, kMaxDim);
  if (config.max_position_embeddings == 0)
    config.max_position_embeddings = json["max_position_embeddings"].as_int(1, kMaxTokens);
  if (config.num_kv_heads == 0) config.num_kv_heads = config.num_heads;
  if (config.num_heads % config.num_kv_heads != 0)
    json["num_key_value_heads"].fail(concat("expected a divisor of num_attention_heads ",
                                            config.num_heads, ", got ", config.num_kv_heads));
  if (config.head_dim == 0) {
    if (config.hidden_size % config.num_heads != 0)
      json["hidden_size"].fail(concat("expected a multiple of num_attention_heads ",
                                      config.num_heads, " (or an explicit head_dim), got ",
                                      config.hidden_size));
    config.head_dim = config.hidden_size / config.num_heads;
  }
  if (config.num_heads * config.head_dim > kMaxDim)
    json["head_dim"].fail(concat("expected num_attention_heads x head_dim up to ", kMaxDim,
                                 ", got ", config.num_heads, " x ", config.head_dim));
}

void choose_max_model_len(const JsonNode& json, int64_t max_model_len, ModelConfig& config) {
  int64_t longest = config.max_position_embeddings;
  std::string reach = "max_position_embeddings";
  if (!config.ropes.empty()) {
    const RopeParameters& rope = config.ropes[0];
    longest = rope_max_len(rope, config.max_position_embeddings);
    if (rope.type != RopeType::kDefault)
      reach = concat("what its ", name(rope.type), " RoPE reaches");
  }
  config.max_model_len = max_model_len == 0 ? config.max_position_embeddings : max_model_len;
  if (config.max_model_len < 1 || config.max_model_len > longest)
    throw InvalidArgument(concat("max_model_len: expected 1 to ", longest, " (", reach, " of ",
                                 json.where(), "), got ", max_model_len));
}

void choose_layer_kinds(ModelConfig& config) {
  const bool has_gate = !config.names.gate.empty() || !config.names.gate_up.empty();
  for (LayerTraits& layer : config.layers) {
    if (!layer.attention) layer.attention = &kGroupedAttention;
    if (!layer.feed_forward) layer.feed_forward = has_gate ? &kGatedMlp : &kPlainMlp;
  }
}

// Layers that keep the same, and the places of those layers.
struct CacheKind {
  CacheGroupSpec spec;
  std::vector<KvPlace*> places;
};

void add_to_kind(std::vector<CacheKind>& kinds, const CacheGroupSpec& spec, KvPlace& place) {
  auto kind = std::ranges::find(kinds, spec, &CacheKind::spec);
  if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {.spec = spec, .places = {}});
  kind->places.push_back(&place);
}

// All blocks of the pool are of one size, so that a group of rows has as many layers as the rarest
// kind: the other kinds are several groups, of which the last may leave some of its room empty. A
// window that no sequence outgrows is none. Each kind of states is a group.
void assign_cache_groups(ModelConfig& config) {
  std::vector<CacheKind> rows;
  std::vector<CacheKind> states;
  config.kv_places.resize(config.layers.size());
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerTraits& layer = config.layers[i];
    for (CacheGroupSpec& spec : layer.attention->keeps(config, layer)) {
      if (spec.window >= config.max_model_len) spec.window = 0;
      add_to_kind(spec.is_state() ? states : rows, spec, config.kv_places[i]);
    }
  }
  std::ranges::stable_sort(rows, {}, [](const CacheKind& kind) { return kind.spec.window; });
  size_t num_lanes = config.layers.size();
  for (const CacheKind& kind : rows) num_lanes = std::min(num_lanes, kind.places.size());
  for (const CacheKind& kind : rows) {
    if (!kind.spec.has_rows_of(rows.front().spec))
      throw NotSupported(concat(config.architecture,
                                ": layers with keys and values of different sizes are not "
                                "supported, since all blocks of the KV pool are of one size"));
    for (size_t i = 0; i < kind.places.size(); ++i) {
      if (i % num_lanes == 0) {
        config.cache_groups.push_back(kind.spec);
        config.cache_groups.back().num_layers = 0;
      }
      kind.places[i]->group = static_cast<int32_t>(config.cache_groups.size() - 1);
      kind.places[i]->lane = config.cache_groups.back().num_layers++;
    }
  }
  for (const CacheKind& kind : states) {
    config.cache_groups.push_back(kind.spec);
    config.cache_groups.back().num_layers = 0;
    for (KvPlace* place : kind.places) {
      place->state_group = static_cast<int32_t>(config.cache_groups.size() - 1);
      place->state_lane = config.cache_groups.back().num_layers++;
    }
  }
}

// Of files (GGUF) whose converter transposed every linear weight to [out, in], put a fused qkv in
// order and laid the norms of all heads into one tensor, whatever the family does.
void expect_plain_weights(ModelConfig& config) {
  expect_stacked_experts(config.experts);
  config.names.sinks += ".weight";
  config.has_transposed_weights = config.is_qkv_by_group = false;
  for (std::string* name : {&config.names.q_norm, &config.names.k_norm})
    if (name->ends_with(".{}")) name->resize(name->size() - 3);
}

ModelConfig read_config(const JsonNode& json, const ArchitectureRow& row, int64_t max_model_len) {
  ModelConfig config;
  config.architecture = row.name;
  if (!json["text_part_of"].is_null()) config.text_part_of = json["text_part_of"].as_string();
  config.stored_dtype = read_dtype(json);
  read_dims(json, config);
  config.activation = read_activation(json["hidden_act"], Activation::kSilu);
  config.norm.numbers.eps = static_cast<float>(json["rms_norm_eps"].as_number_or(1e-6, 1e-12, 1.0));
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(false);
  config.bos_token_ids = read_token_ids(json["bos_token_id"]);
  config.eos_token_ids = read_token_ids(json["eos_token_id"]);
  row.configure(json, config);
  if (config.experts.num_experts == 0) refuse_experts(json, row.name);
  if (json["has_plain_weights"].as_bool_or(false)) expect_plain_weights(config);
  finish_dims(json, config);
  if (config.has_rope) {
    read_ropes(json, config);
  } else {
    for (LayerTraits& layer : config.layers) layer.rope = -1;
  }
  choose_max_model_len(json, max_model_len, config);
  choose_layer_kinds(config);
  assign_cache_groups(config);
  return config;
}

}  // namespace

ModelConfig read_model_config(const JsonDocument& document, int64_t max_model_len) {
  const JsonNode json(document);
  return read_config(json, read_architecture(json), max_model_len);
}

ModelConfig read_config_as(const JsonNode& json, std::string_view architecture) {
  return read_config(json, find_architecture(architecture, json.where()), 0);
}

}  // namespace llmserve
