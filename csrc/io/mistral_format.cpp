#include "io/mistral_format.h"

#include <utility>

#include "core/error.h"
#include "io/safetensors.h"
#include "io/tensor_renaming.h"

namespace llmserve {
namespace {

constexpr std::string_view kWeights = "consolidated.safetensors";
constexpr std::string_view kParams = "params.json";
constexpr int64_t kMax = int64_t{1} << 31;

constexpr RenamingRow kNames[] = {
    {"tok_embeddings", "model.embed_tokens"},
    {"norm", "model.norm"},
    {"output", "lm_head"},
    {"layers.{}.attention_norm", "model.layers.{}.input_layernorm"},
    {"layers.{}.attention.wq", "model.layers.{}.self_attn.q_proj"},
    {"layers.{}.attention.wk", "model.layers.{}.self_attn.k_proj"},
    {"layers.{}.attention.wv", "model.layers.{}.self_attn.v_proj"},
    {"layers.{}.attention.wo", "model.layers.{}.self_attn.o_proj"},
    {"layers.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"},
    {"layers.{}.feed_forward.w1", "model.layers.{}.mlp.gate_proj"},
    {"layers.{}.feed_forward.w2", "model.layers.{}.mlp.down_proj"},
    {"layers.{}.feed_forward.w3", "model.layers.{}.mlp.up_proj"},
};

// Fields of params.json that mean another kind of model.
constexpr std::string_view kRefused[] = {
    "moe", "quantization", "vision_encoder", "multimodal", "yarn", "llama_4_scaling", "lora"};

struct Heads {
  int64_t query = 0;
  int64_t kv = 0;
};

JsonDocument make_config(const JsonNode& params, const std::string& path, const Heads& heads) {
  JsonValue::Object fields;
  const auto set = [&](const char* field, auto value) {
    fields.emplace_back().key = field;
    fields.back().value.data = std::move(value);
  };
  JsonValue::Array names;
  names.emplace_back().data = std::string("MistralForCausalLM");
  set("architectures", std::move(names));
  set("vocab_size", params["vocab_size"].as_int(1, kMax));
  set("hidden_size", params["dim"].as_int(1, kMax));
  set("intermediate_size", params["hidden_dim"].as_int(1, kMax));
  set("num_hidden_layers", params["n_layers"].as_int(1, kMax));
  set("num_attention_heads", heads.query);
  set("num_key_value_heads", heads.kv);
  if (!params["head_dim"].is_null()) set("head_dim", params["head_dim"].as_int(1, kMax));
  set("rms_norm_eps", params["norm_eps"].as_number_or(1e-5, 1e-12, 1.0));
  set("rope_theta", params["rope_theta"].as_number_or(10000.0, 1.0, 1e15));
  set("tie_word_embeddings", params["tied_embeddings"].as_bool_or(false));
  const int64_t longest = params["max_position_embeddings"].as_int_or(32768, 1, kMax);
  set("max_position_embeddings", params["max_seq_len"].as_int_or(longest, 1, kMax));
  const JsonNode window = params["sliding_window"];
  if (window.is_null())
    set("sliding_window", std::monostate());
  else
    set("sliding_window", window.as_int(1, kMax));
  set("bos_token_id", int64_t{1});  // of every Mistral tokenizer
  set("eos_token_id", int64_t{2});
  JsonValue root;
  root.data = std::move(fields);
  return JsonDocument::make(path, std::move(root));
}

Heads read_heads(const JsonNode& params) {
  Heads heads;
  heads.query = params["n_heads"].as_int(1, kMax);
  heads.kv = params["n_kv_heads"].as_int_or(heads.query, 1, kMax);
  return heads;
}

void rename(TensorEntry& entry) {
  std::string renamed = rename_tensor(kNames, entry.name);
  if (!renamed.empty()) entry.name = std::move(renamed);
  if (entry.name.find(".q_proj.") != entry.name.npos) entry.storage_idx = 1;
  if (entry.name.find(".k_proj.") != entry.name.npos) entry.storage_idx = 2;
}

}  // namespace

bool is_mistral_format(const CheckpointDirectory& directory) {
  return directory.weights_file().empty() && directory.contains(kWeights) &&
         directory.contains(kParams);
}

Checkpoint open_mistral_format(const CheckpointDirectory& directory) {
  const auto file = directory.map(kParams);
  const std::string path = file->path().string();
  const JsonDocument document = JsonDocument::parse(path, file->text());
  const JsonNode params(document);
  for (const std::string_view field : kRefused) {
    if (!params[field].is_null())
      throw NotSupported(concat(path, ": ", field, ": models with it are not supported"));
  }
  const Heads heads = read_heads(params);
  std::vector<std::shared_ptr<const MappedFile>> files{directory.map(kWeights)};
  std::vector<TensorEntry> entries = read_safetensors_headers(files);
  for (TensorEntry& entry : entries) rename(entry);
  return Checkpoint("mistral", directory.path().string(), make_config(params, path, heads),
                    std::move(files), std::move(entries),
                    {{}, {.paired_heads = heads.query}, {.paired_heads = heads.kv}});
}

}  // namespace llmserve
