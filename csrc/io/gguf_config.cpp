// From a GGUF file's metadata to the fields of Hugging Face's config.json.
#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "core/error.h"
#include "io/gguf_architecture.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxSmallTensor = 4096;  // factors of rotary frequencies: half a head

JsonValue text(std::string_view value) { return {std::string(value)}; }

[[noreturn]] void refuse(const GgufConfig& config, const GgufValue& value,
                         std::string_view reason) {
  throw NotSupported(
      concat(config.file().file()->path().string(), ": metadata ", value.key, ": ", reason));
}

// What would change every token, and no layer here knows.
void refuse_unknown_layers(const GgufConfig& config) {
  const GgufValue* causal = config.find("attention.causal");
  if (causal && !config.file().boolean(*causal))
    refuse(config, *causal, "attention to later tokens is not supported");
}

// Nobody would notice a default in their place.
void check_given(const GgufConfig& config, std::initializer_list<std::string_view> any_of) {
  const auto is_given = [&](std::string_view key) { return config.find(key) != nullptr; };
  if (std::ranges::none_of(any_of, is_given))
    config.file().fail(concat(config.prefix(), *any_of.begin()), "is absent");
}

void add_dims(GgufConfig& config) {
  const GgufTensor* table = config.file().find_tensor("token_embd.weight");
  if (!table || table->rank != 2)
    throw CorruptFile(concat(config.file().file()->path().string(),
                             ": expected a tensor \"token_embd.weight\" of 2 dimensions, got ",
                             table ? "another number of them" : "none"));
  refuse_unknown_layers(config);
  const GgufValue* said = config.find("vocab_size");
  if (said && config.file().integer(*said) != table->shape[0])
    config.file().fail(concat(config.prefix(), "vocab_size"),
                       concat("expected the ", table->shape[0], " rows of token_embd.weight, got ",
                              config.file().integer(*said)));
  config.set("vocab_size", {table->shape[0]});
  config.set("tie_word_embeddings", {!config.has_tensor("output.weight")});
  config.copy_integer("embedding_length", "hidden_size");
  config.copy_integer("feed_forward_length", "intermediate_size");
  config.copy_integer("block_count", "num_hidden_layers");
  config.copy_integer("attention.head_count", "num_attention_heads");
  config.copy_integer("attention.head_count_kv", "num_key_value_heads");
  if (!config.find("attention.head_count_kv"))
    config.set("num_key_value_heads", {config.integer("num_attention_heads")});
  config.copy_integer("context_length", "max_position_embeddings");
  config.copy_number("attention.layer_norm_rms_epsilon", "rms_norm_eps");
  // Families spell it differently.
  for (const char* field : {"layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"})
    config.copy_number("attention.layer_norm_epsilon", field);
  check_given(config, {"context_length"});
  check_given(config, {"attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"});
}

// Of multi-head latent attention. Where keys and values are absorbed, the lengths are those of the
// latents, and the heads' own have names of their own.
void add_latent(GgufConfig& config) {
  const auto length = [&](std::string_view own, std::string_view plain) {
    const GgufValue* value = config.find(own);
    if (!value) value = config.find(plain);
    return value ? config.uniform_integer(*value) : 0;
  };
  config.copy_integer("attention.kv_lora_rank", "kv_lora_rank");
  config.set("q_lora_rank", {});
  config.copy_integer("attention.q_lora_rank", "q_lora_rank");
  check_given(config, {"rope.dimension_count"});
  check_given(config, {"attention.key_length_mla", "attention.key_length"});
  config.copy_integer("rope.dimension_count", "qk_rope_head_dim");
  const int64_t key = length("attention.key_length_mla", "attention.key_length");
  config.set("qk_nope_head_dim", {key - config.integer("qk_rope_head_dim")});
  const int64_t value = length("attention.value_length_mla", "attention.value_length");
  if (value != 0) config.set("v_head_dim", {value});
  config.set("has_split_kv_b", {!config.has_tensor("blk.0.attn_kv_b.weight")});
}

void add_head_dim(GgufConfig& config) {
  if (config.find("attention.kv_lora_rank")) return add_latent(config);
  const int64_t heads = config.integer("num_attention_heads");
  const GgufValue* key = config.find("attention.key_length");
  const GgufValue* value = config.find("attention.value_length");
  if (key && value && config.uniform_integer(*key) != config.uniform_integer(*value))
    throw NotSupported(concat(config.file().file()->path().string(),
                              ": keys and values of different lengths are not supported"));
  const int64_t head_dim = key         ? config.uniform_integer(*key)
                           : heads > 0 ? config.integer("hidden_size") / heads
                                       : 0;
  config.set("head_dim", {head_dim});
  const GgufValue* rotary = config.find("rope.dimension_count");
  if (!rotary || head_dim <= 0) return;
  // A quarter more than the count, which the product is truncated to.
  const int64_t count = config.uniform_integer(*rotary);
  config.set("partial_rotary_factor", {count == head_dim ? 1.0
                                                         : (static_cast<double>(count) + 0.25) /
                                                               static_cast<double>(head_dim)});
}

// Llama 3.1's frequencies, and those of long contexts, come as one factor for each.
JsonValue::Object rope_of_factors(const GgufConfig& config, std::string_view short_name,
                                  std::string_view long_name) {
  JsonValue::Object rope{{"rope_type", text("longrope")},
                         {"short_factor", {config.small_tensor(short_name)}},
                         {"long_factor", {config.small_tensor(long_name)}}};
  const GgufValue* attention = config.find("rope.scaling.attn_factor");
  rope.push_back({"attention_factor", {attention ? config.file().number(*attention) : 1.0}});
  return rope;
}

void add_number(const GgufConfig& config, std::string_view key, std::string_view field,
                JsonValue::Object& rope) {
  if (const GgufValue* value = config.find(key))
    rope.push_back({std::string(field), {config.file().number(*value)}});
}

// YaRN's two factors of the length. Of both the files keep one, by a rule of the architecture.
void add_mscales(const GgufConfig& config, float multiplier, JsonValue::Object& rope) {
  const GgufValue* value = config.find("rope.scaling.yarn_log_multiplier");
  const double stored = value ? config.file().number(*value) : 0.0;
  const bool is_scaled = value && multiplier != 0.0f;
  // In float, as the converter's product is kept.
  const double all = is_scaled ? static_cast<float>(stored) / multiplier : stored;
  if (value) rope.push_back({"mscale_all_dim", {all}});
  rope.push_back({"mscale", {is_scaled ? all : 1.0}});  // which counts where the other one is there
}

JsonValue::Object rope_by_type(const GgufConfig& config, float yarn_multiplier) {
  JsonValue::Object rope;
  const GgufValue* type = config.find("rope.scaling.type");
  const GgufValue* factor = config.find("rope.scaling.factor");
  if (!factor) factor = config.find("rope.scale_linear");  // before there were types
  const bool is_scaled = factor && config.file().number(*factor) != 0;
  const std::string_view name = type        ? config.file().string(*type)
                                : is_scaled ? std::string_view("linear")
                                            : std::string_view("none");
  if (config.has_tensor("rope_factors_long.weight"))
    return rope_of_factors(config, "rope_factors_short.weight", "rope_factors_long.weight");
  if (config.has_tensor("rope_freqs.weight")) {
    if (is_scaled && name != "none" && config.file().number(*factor) != 1)
      refuse(config, *factor, "a factor beside the tensor \"rope_freqs.weight\" is not supported");
    return rope_of_factors(config, "rope_freqs.weight", "rope_freqs.weight");
  }
  if (name == "linear" || name == "yarn") {
    if (!is_scaled && name == "linear") return rope;
    rope.push_back({"rope_type", text(name)});
    if (is_scaled) rope.push_back({"factor", {config.file().number(*factor)}});
  } else if (name != "none") {
    config.file().fail(type->key, concat("expected none, linear, yarn or longrope with its "
                                         "tensors, got \"",
                                         name.substr(0, 80), "\""));
  }
  if (name == "yarn") {
    add_number(config, "rope.scaling.attn_factor", "attention_factor", rope);
    add_number(config, "rope.scaling.yarn_beta_fast", "beta_fast", rope);
    add_number(config, "rope.scaling.yarn_beta_slow", "beta_slow", rope);
    add_mscales(config, yarn_multiplier, rope);
    add_number(config, "attention.temperature_scale", "llama_4_scaling_beta", rope);
  }
  return rope;
}

void add_rope(GgufConfig& config, float yarn_multiplier) {
  config.copy_number("rope.freq_base", "rope_theta");
  JsonValue::Object rope = rope_by_type(config, yarn_multiplier);
  if (rope.empty()) return;
  if (const GgufValue* original = config.find("rope.scaling.original_context_length"))
    rope.push_back({"original_max_position_embeddings", {config.file().integer(*original)}});
  config.set("rope_scaling", {std::move(rope)});
}

void add_token_ids(GgufConfig& config) {
  const GgufFile& file = config.file();
  if (const GgufValue* bos = file.find("tokenizer.ggml.bos_token_id"))
    config.set("bos_token_id", {file.integer(*bos)});
  JsonValue::Array ends;
  for (const std::string_view key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                     "tokenizer.ggml.eom_token_id"}) {
    if (const GgufValue* end = file.find(key)) ends.emplace_back().data = file.integer(*end);
  }
  if (!ends.empty()) config.set("eos_token_id", {std::move(ends)});
}

}  // namespace

GgufConfig::GgufConfig(const GgufFile& file, std::string_view architecture)
    : file_(file), prefix_(concat(architecture, ".")) {}

const GgufValue* GgufConfig::find(std::string_view key) const {
  return file_.find(concat(prefix_, key));
}

int64_t GgufConfig::uniform_integer(const GgufValue& value) const {
  const int64_t first = file_.integer(value);
  for (int64_t i = 1; i < value.count; ++i) {
    if (file_.integer(value, i) != first)
      refuse(*this, value,
             concat("layers that differ (", first, " and ", file_.integer(value, i),
                    ") are not supported"));
  }
  const GgufValue* layers = find("block_count");
  if (value.is_array && layers && value.count != file_.integer(*layers))
    file_.fail(value.key, concat("expected an entry for each of ", file_.integer(*layers),
                                 " layers, got ", value.count));
  return first;
}

void GgufConfig::copy_integer(std::string_view key, std::string_view field) {
  if (const GgufValue* value = find(key)) set(field, {uniform_integer(*value)});
}

void GgufConfig::copy_number(std::string_view key, std::string_view field) {
  if (const GgufValue* value = find(key)) set(field, {file_.number(*value)});
}

JsonValue::Array GgufConfig::small_tensor(std::string_view name) const {
  const GgufTensor* tensor = file_.find_tensor(name);
  if (!tensor || tensor->rank != 1 || tensor->dtype != DType::kF32 ||
      tensor->shape[0] > kMaxSmallTensor)
    throw CorruptFile(concat(file_.file()->path().string(), ": tensor \"", name,
                             "\": expected up to ", kMaxSmallTensor, " elements of F32"));
  JsonValue::Array out;
  for (int64_t i = 0; i < tensor->shape[0]; ++i) {
    float value = 0;
    std::memcpy(&value, file_.file()->bytes().data() + tensor->offset + i * 4, sizeof(value));
    out.emplace_back().data = static_cast<double>(value);
  }
  return out;
}

void GgufConfig::set(std::string_view field, JsonValue value) {
  const auto it = std::find_if(fields_.begin(), fields_.end(),
                               [&](const JsonMember& member) { return member.key == field; });
  if (it == fields_.end())
    fields_.push_back({std::string(field), std::move(value)});
  else
    it->value = std::move(value);
}

int64_t GgufConfig::integer(std::string_view field) const {
  for (const JsonMember& member : fields_) {
    if (member.key != field) continue;
    if (const auto* value = std::get_if<int64_t>(&member.value.data)) return *value;
  }
  file_.fail(concat(prefix_, "*"), concat("what becomes ", field, " is absent"));
}

JsonDocument GgufConfig::finish() && {
  return JsonDocument::make(file_.file()->path().string(), {std::move(fields_)});
}

JsonDocument make_config(const GgufFile& file, const GgufArchitecture& architecture) {
  GgufConfig config(file, architecture.name);
  config.set("architectures", {JsonValue::Array{text(architecture.model_class)}});
  config.set("has_plain_weights", {true});
  add_dims(config);
  add_head_dim(config);
  add_rope(config, architecture.yarn_multiplier);
  add_token_ids(config);
  add_experts(config, architecture);
  if (architecture.configure) architecture.configure(config);
  return std::move(config).finish();
}

}  // namespace llmserve
