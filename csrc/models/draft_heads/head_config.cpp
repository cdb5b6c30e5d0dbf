// What a head's files say of it: as EAGLE's and Medusa's authors publish theirs, as `speculators`
// folders, and as layers behind those of a target.
#include <algorithm>
#include <cstring>
#include <set>
#include <string>

#include "core/error.h"
#include "models/config_reader.h"
#include "models/draft_heads/draft_head.h"
#include "models/layer_kinds.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxHeads = 32;   // of Medusa
constexpr int64_t kMaxBlocks = 16;  // of each
constexpr int64_t kMaxTokens = int64_t{1} << 30;

// A tensor of a head, whose name may begin with "model.".
const TensorEntry* find(const Checkpoint& checkpoint, const std::string& name) {
  const TensorEntry* entry = checkpoint.find(name);
  return entry != nullptr ? entry : checkpoint.find("model." + name);
}

bool has(const Checkpoint& checkpoint, const std::string& name) {
  return find(checkpoint, name) != nullptr;
}

void check_equal(const JsonNode& node, int64_t wanted, const char* what) {
  if (node.is_null() || node.as_int(1, kMaxTokens) == wanted) return;
  throw InvalidArgument(concat("speculative_config: ", node.where(), ": got ", node.describe(),
                               ", and the target's ", what, " is ", wanted,
                               "; the head is of another model"));
}

std::vector<int64_t> read_ids(const Checkpoint& checkpoint, const TensorEntry& entry) {
  if (entry.shape.size() != 1 || (entry.dtype != DType::kI64 && entry.dtype != DType::kI32))
    throw CorruptFile(concat(checkpoint.path(), ": tensor \"", entry.name,
                             "\": expected int64 [draft vocabulary], got ", describe(entry)));
  std::vector<int64_t> ids(static_cast<size_t>(entry.shape[0]));
  const auto* bytes = static_cast<const std::byte*>(checkpoint.view(entry).data);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (entry.dtype == DType::kI64) {
      std::memcpy(&ids[i], bytes + 8 * i, 8);
    } else {
      int32_t id = 0;
      std::memcpy(&id, bytes + 4 * i, 4);
      ids[i] = id;
    }
  }
  return ids;
}

// Each of the head's tokens as the target's: by differences (d2t), or as they are (token_map).
void read_target_tokens(const Checkpoint& checkpoint, const char* name, bool are_differences,
                        HeadConfig& config) {
  const TensorEntry* entry = find(checkpoint, name);
  if (entry == nullptr) {
    if (config.vocab_size == config.target_vocab_size || !checkpoint.has_tensors()) return;
    throw CorruptFile(concat(checkpoint.path(), ": tensor \"", name,
                             "\" is missing, and the head guesses ", config.vocab_size, " of the ",
                             config.target_vocab_size, " tokens of the target"));
  }
  const std::vector<int64_t> ids = read_ids(checkpoint, *entry);
  if (std::ssize(ids) != config.vocab_size)
    throw CorruptFile(concat(checkpoint.path(), ": tensor \"", entry->name, "\": expected ",
                             config.vocab_size, " ids, one a token of the draft vocabulary, got ",
                             ids.size()));
  std::set<int64_t> seen;
  for (size_t i = 0; i < ids.size(); ++i) {
    // Unsigned: a file may have any number there.
    const auto id = static_cast<int64_t>(static_cast<uint64_t>(ids[i]) + (are_differences ? i : 0));
    if (id < 0 || id >= config.target_vocab_size || !seen.insert(id).second)
      throw CorruptFile(concat(
          checkpoint.path(), ": tensor \"", entry->name, "\": entry ", i, " stands for token ", id,
          ", which is ",
          id < 0 || id >= config.target_vocab_size ? "outside the target's " : "there twice; its ",
          "vocabulary of ", config.target_vocab_size));
    config.target_tokens.push_back(static_cast<int32_t>(id));
  }
}

// The layer, as a decoder of one layer like Llama's.
ModelConfig read_layer(const JsonNode& json, const ModelConfig& target) {
  check_equal(json["vocab_size"], target.vocab_size, "vocab_size");
  ModelConfig layer = read_config_as(json, "LlamaForCausalLM");
  if (layer.num_layers != 1)
    throw NotSupported(concat(json["num_hidden_layers"].where(), ": got ", layer.num_layers,
                              " layers; heads of one layer are run"));
  return layer;
}

void read_target_layers(const JsonNode& json, const ModelConfig& target, HeadConfig& config) {
  JsonNode ids = json["eagle_aux_hidden_state_layer_ids"];
  const JsonNode eagle = json["eagle_config"];
  if (ids.is_null() && eagle.is_object()) {
    ids = eagle["eagle_aux_hidden_state_layer_ids"];
    if (!eagle["use_aux_hidden_state"].as_bool_or(true))
      throw NotSupported(
          concat(eagle["use_aux_hidden_state"].where(), ": false is not supported, only true"));
  }
  const int64_t n = target.num_layers;
  if (ids.is_null()) {
    for (const int64_t id : {int64_t{2}, n / 2, n - 3}) {
      if (id < 0 || id > n)
        throw InvalidArgument(concat("speculative_config: ", ids.where(),
                                     " is missing, and layers 2, n/2 and n-3 are not there in a ",
                                     "target of ", n, " layers"));
      config.target_layers.push_back(static_cast<int32_t>(id));
    }
    return;
  }
  for (const JsonNode& id : ids.as_array()) {
    const int64_t value = id.as_int(0, kMaxTokens);
    if (value > n)
      throw InvalidArgument(concat("speculative_config: ", id.where(), ": got layer ", value,
                                   ", and the target has ", n, "; the head is of another model"));
    config.target_layers.push_back(static_cast<int32_t>(value));
  }
  if (config.target_layers.empty()) ids.fail("expected at least one layer");
}

void read_eagle3(const Checkpoint& checkpoint, const ModelConfig& target, HeadConfig& config) {
  const JsonNode json(checkpoint.config());
  const bool is_speculators = !json["speculators_model_type"].is_null();
  config.architecture = "EAGLE-3";
  config.layer = read_layer(is_speculators ? json["transformer_layer_config"] : json, target);
  check_equal(json["target_hidden_size"], target.hidden_size, "hidden_size");
  config.vocab_size = json["draft_vocab_size"].as_int_or(target.vocab_size, 1, kMaxTokens);
  read_target_layers(json, target, config);
  config.prefix =
      has(checkpoint, "layers.0.hidden_norm.weight") ? "model.layers.0." : "model.midlayer.";
  config.has_embedding = has(checkpoint, "embed_tokens.weight");
  config.has_lm_head = !checkpoint.has_tensors() || has(checkpoint, "lm_head.weight");
  config.has_fc_bias = has(checkpoint, "fc.bias");
  config.has_normed_residual = json["norm_before_residual"].as_bool_or(is_speculators);
  config.has_input_norm = json["norm_before_fc"].as_bool_or(false);
  config.has_fc_norms = json["fc_norm"].as_bool_or(has(checkpoint, "fc_norm.0.weight"));
  config.has_normed_output = json["norm_output"].as_bool_or(false);
  if (config.has_input_norm && config.has_fc_norms)
    throw NotSupported(concat(json["norm_before_fc"].where(),
                              ": true is not supported together with norms fc_norm"));
  if (!config.has_embedding && config.layer.hidden_size != target.hidden_size)
    throw InvalidArgument(concat("speculative_config: ", json["hidden_size"].where(), ": got ",
                                 config.layer.hidden_size, ", and the head has no embed_tokens of ",
                                 "its own, where the target's are of ", target.hidden_size));
  if (!config.has_lm_head &&
      (config.vocab_size != target.vocab_size || config.layer.hidden_size != target.hidden_size))
    throw CorruptFile(concat(checkpoint.path(), ": tensor \"lm_head.weight\" is missing, and the ",
                             "target's, [", target.vocab_size, ", ", target.hidden_size,
                             "], cannot stand in for one of [", config.vocab_size, ", ",
                             config.layer.hidden_size, "]"));
  read_target_tokens(checkpoint, "d2t", /*are_differences=*/true, config);
}

void check_speculators_eagle(const JsonNode& json) {
  const JsonNode layer = json["transformer_layer_architecture"];
  if (!layer.is_null() && layer.as_string() != "LlamaDecoderLayer")
    throw NotSupported(
        concat(layer.where(), ": ", layer.describe(), " is not supported, only LlamaDecoderLayer"));
  if (json["layernorms"].as_bool_or(false))
    throw NotSupported(concat(json["layernorms"].where(), ": true is not supported, only false"));
}

void read_eagle(const Checkpoint& checkpoint, const ModelConfig& target, HeadConfig& config) {
  const JsonNode whole(checkpoint.config());
  const bool is_speculators = !whole["speculators_model_type"].is_null();
  if (is_speculators) check_speculators_eagle(whole);
  const JsonNode json = is_speculators ? whole["transformer_layer_config"] : whole;
  config.architecture = "EAGLE";
  config.layer = read_layer(json, target);
  check_equal(json["hidden_size"], target.hidden_size, "hidden_size");
  config.vocab_size = target.vocab_size;
  config.target_layers = {static_cast<int32_t>(target.num_layers + 1)};
  if (!has(checkpoint, "layers.0.input_layernorm.weight")) config.layer.names.attention_norm = "";
  config.has_embedding = has(checkpoint, "embed_tokens.weight");
  config.has_fc_bias = has(checkpoint, "fc.bias");
}

void read_medusa(const Checkpoint& checkpoint, const ModelConfig& target, HeadConfig& config) {
  const JsonNode json(checkpoint.config());
  config.architecture = "Medusa";
  check_equal(json["vocab_size"], target.vocab_size, "vocab_size");
  check_equal(json["hidden_size"], target.hidden_size, "hidden_size");
  const auto count = [&](const char* name, const char* other, int64_t most) {
    const JsonNode node = json[name].is_null() ? json[other] : json[name];
    return static_cast<int32_t>(node.is_null() ? json[name].as_int(1, most) : node.as_int(0, most));
  };
  config.num_heads = std::max(1, count("medusa_num_heads", "num_heads", kMaxHeads));
  config.num_blocks = count("medusa_num_layers", "num_layers", kMaxBlocks);
  config.is_converted = has(checkpoint, "lm_heads.0.weight");
  config.layer.hidden_size = target.hidden_size;
  config.layer.max_model_len = target.max_model_len;
  config.vocab_size =
      json["truncated_vocab_size"].as_int_or(target.vocab_size, 1, target.vocab_size);
  config.layer.vocab_size = config.vocab_size;
  config.layer.num_heads = target.num_heads;  // as a step's: it has none
  config.layer.cache_groups = target.cache_groups;
  config.target_layers = {static_cast<int32_t>(target.num_layers + 1)};
  read_target_tokens(checkpoint, "token_map", /*are_differences=*/false, config);
}

// A layer behind the target's own, the first for 0: DeepSeek's layout, and GLM's.
void name_next_layer(const Checkpoint& checkpoint, const ModelConfig& target, int64_t idx,
                     HeadConfig& config) {
  const int64_t n = target.num_layers + idx;
  config.layer_idx = n;
  config.layer.num_layers = n + 1;
  config.layer.layers.resize(static_cast<size_t>(n + 1), target.layers.back());
  config.prefix = layer_prefix(target, n);
  config.names = {.fc = config.prefix + "eh_proj",
                  .embedding_norm = config.prefix + "enorm",
                  .feature_norm = config.prefix + "hnorm",
                  .final_norm = config.prefix + "shared_head.norm",
                  .embedding = config.prefix + "embed_tokens",
                  .lm_head = config.prefix + "shared_head.head"};
  config.has_embedding = has(checkpoint, config.names.embedding + ".weight");
  config.has_lm_head = has(checkpoint, config.names.lm_head + ".weight");
}

// ERNIE 4.5's: a layer without experts by names of its own, and the target's head without a norm.
void name_mtp_block(const Checkpoint& checkpoint, const ModelConfig& target, int64_t idx,
                    HeadConfig& config) {
  LayerTraits traits = target.layers.front();
  traits.feed_forward = &kGatedMlp;
  config.layer_idx = idx;
  config.layer.num_layers = idx + 1;
  config.layer.layers.assign(static_cast<size_t>(idx + 1), traits);
  config.layer.names.layers = "model.mtp_block.";
  config.prefix = layer_prefix(config.layer, idx);
  config.names = {.fc = concat("model.mtp_linear_proj.", idx),
                  .embedding_norm = concat("model.mtp_emb_norm.", idx),
                  .feature_norm = concat("model.mtp_hidden_norm.", idx),
                  .final_norm = "",
                  .embedding = "",
                  .lm_head = ""};
  config.has_fc_bias = has(checkpoint, config.names.fc + ".bias");
}

// One of them guesses all places in turn; of several each has its own.
// False: the file has no such one.
bool read_mtp(const Checkpoint& checkpoint, const ModelConfig& target, int64_t idx,
              HeadConfig& config) {
  config.architecture = "multi-token prediction";
  config.layer = target;
  if (has(checkpoint, "model.mtp_linear_proj.0.weight")) {
    name_mtp_block(checkpoint, target, idx, config);
  } else {
    name_next_layer(checkpoint, target, idx, config);
  }
  const bool is_there = !checkpoint.has_tensors() || has(checkpoint, config.names.fc + ".weight");
  if (idx > 0 && !is_there) return false;
  if (target.num_draft_layers < 1 || !is_there)
    throw InvalidArgument(concat(
        "speculative_config: method \"mtp\" guesses with a layer of the model's own file, and ",
        checkpoint.path(), " has no ", config.names.fc, "; use another method"));
  const LayerTraits& traits = config.layer.layers.back();
  config.layer.cache_groups = traits.attention->keeps(config.layer, traits);
  for (CacheGroupSpec& group : config.layer.cache_groups) {
    if (group.is_state())
      throw NotSupported(
          "speculative_config: method \"mtp\": layers with a state of fixed size "
          "are not run");
    if (group.window >= config.layer.max_model_len) group.window = 0;
  }
  config.layer.kv_places.assign(static_cast<size_t>(config.layer.num_layers),
                                KvPlace{.group = 0, .lane = 0});
  config.vocab_size = target.vocab_size;
  config.target_layers = {static_cast<int32_t>(target.num_layers + 1)};
  return true;
}

}  // namespace

HeadConfig read_head_config(HeadKind kind, const Checkpoint& checkpoint,
                            const ModelConfig& target) {
  HeadConfig config{.kind = kind,
                    .target_vocab_size = target.vocab_size,
                    .target_hidden_size = target.hidden_size};
  switch (kind) {
    case HeadKind::kEagle3:
      read_eagle3(checkpoint, target, config);
      break;
    case HeadKind::kEagle:
      read_eagle(checkpoint, target, config);
      break;
    case HeadKind::kMedusa:
      read_medusa(checkpoint, target, config);
      break;
    case HeadKind::kMtp: {
      const HeadConfig common = config;
      read_mtp(checkpoint, target, 0, config);
      for (int64_t i = 1; i < target.num_draft_layers; ++i) {
        HeadConfig next = common;
        if (!read_mtp(checkpoint, target, i, next)) break;
        config.later.push_back(std::move(next));
      }
      for (CacheGroupSpec& group : config.layer.cache_groups)
        group.num_layers = static_cast<int32_t>(config.num_layers());
      break;
    }
  }
  return config;
}

}  // namespace llmserve
