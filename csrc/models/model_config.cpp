#include "models/model_config.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "core/error.h"
#include "models/model.h"

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

Activation read_activation(const JsonNode& node) {
  if (node.is_null()) return Activation::kSilu;
  const std::string& name = node.as_string();
  if (name == "silu" || name == "swish") return Activation::kSilu;
  if (name == "gelu_pytorch_tanh" || name == "gelu_tanh" || name == "gelu_new")
    return Activation::kGeluTanh;
  throw NotSupported(concat(node.where(), ": activation ", node.describe(),
                            " is not supported (silu, gelu_pytorch_tanh)"));
}

RopeType read_rope_type(const JsonNode& rope) {
  const JsonNode node = rope["rope_type"].is_null() ? rope["type"] : rope["rope_type"];
  if (node.is_null()) return RopeType::kDefault;
  const std::string& wanted = node.as_string();
  for (int i = 0; i <= static_cast<int>(RopeType::kLlama3); ++i) {
    if (name(static_cast<RopeType>(i)) == wanted) return static_cast<RopeType>(i);
  }
  throw NotSupported(concat(node.where(), ": RoPE type ", node.describe(),
                            " is not supported (default, linear, dynamic, yarn, llama3)"));
}

void read_yarn(const JsonNode& rope, RopeParameters& out) {
  if (!rope["attention_factor"].is_null())
    out.attention_factor = rope["attention_factor"].as_number(0.0, 1e3);
  // As in transformers, 0 means absent.
  const auto positive_or = [](const JsonNode& node, double fallback) {
    const double value = node.as_number_or(0.0, 0.0, 1e6);
    return value == 0.0 ? fallback : value;
  };
  out.beta_fast = positive_or(rope["beta_fast"], 32.0);
  out.beta_slow = positive_or(rope["beta_slow"], 1.0);
  if (out.beta_fast < out.beta_slow)
    rope["beta_fast"].fail(
        concat("expected at least beta_slow ", out.beta_slow, ", got ", out.beta_fast));
  out.mscale = rope["mscale"].as_number_or(0.0, 0.0, 1e3);
  out.mscale_all_dim = rope["mscale_all_dim"].as_number_or(0.0, 0.0, 1e3);
  out.truncate = rope["truncate"].as_bool_or(true);
}

void read_llama3(const JsonNode& rope, RopeParameters& out) {
  out.low_freq_factor = rope["low_freq_factor"].as_number(1e-6, 1e6);
  out.high_freq_factor = rope["high_freq_factor"].as_number(1e-6, 1e6);
  if (out.high_freq_factor <= out.low_freq_factor)
    rope["high_freq_factor"].fail(concat("expected more than low_freq_factor ", out.low_freq_factor,
                                         ", got ", out.high_freq_factor));
}

// transformers 5 has everything in rope_parameters; transformers 4 has rope_theta beside
// rope_scaling.
RopeParameters read_rope(const JsonNode& json, const ModelConfig& config) {
  const JsonNode rope =
      json["rope_scaling"].is_null() ? json["rope_parameters"] : json["rope_scaling"];
  RopeParameters out;
  constexpr double kMinTheta = 1.0001;  // its logarithm divides
  const double theta = json["rope_theta"].as_number_or(10000.0, kMinTheta, 1e15);
  out.theta = theta;
  JsonNode partial = json["partial_rotary_factor"];
  if (!rope.is_null()) {
    if (!rope["full_attention"].is_absent() || !rope["sliding_attention"].is_absent())
      throw NotSupported(concat(rope.where(),
                                ": RoPE parameters that differ by layer type are not supported by ",
                                config.architecture));
    out.type = read_rope_type(rope);
    out.theta = rope["rope_theta"].as_number_or(theta, kMinTheta, 1e15);
    if (!rope["partial_rotary_factor"].is_null()) partial = rope["partial_rotary_factor"];
    if (out.type == RopeType::kYarn || out.type == RopeType::kLlama3) {
      const JsonNode original = json["original_max_position_embeddings"].is_null()
                                    ? rope["original_max_position_embeddings"]
                                    : json["original_max_position_embeddings"];
      out.original_max_position_embeddings =
          original.as_int_or(config.max_position_embeddings, 1, kMaxTokens);
    }
    if (out.type == RopeType::kYarn && rope["factor"].is_null()) {
      out.factor = static_cast<double>(config.max_position_embeddings) /
                   static_cast<double>(out.original_max_position_embeddings);
    } else if (out.type != RopeType::kDefault) {
      out.factor = rope["factor"].as_number(1.0, 1e6);
    }
    if (out.type == RopeType::kYarn) read_yarn(rope, out);
    if (out.type == RopeType::kLlama3) read_llama3(rope, out);
  }
  if (partial.as_number_or(1.0, 0.0, 1.0) != 1.0)
    throw NotSupported(concat(partial.where(), ": partial rotary embeddings (", partial.describe(),
                              ") are not supported by ", config.architecture));
  return out;
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

void read_dims(const JsonNode& json, ModelConfig& config) {
  config.vocab_size = json["vocab_size"].as_int(1, kMaxTokens);
  config.hidden_size = json["hidden_size"].as_int(1, kMaxDim);
  config.intermediate_size = json["intermediate_size"].as_int(1, kMaxDim);
  config.num_layers = json["num_hidden_layers"].as_int(1, kMaxLayers);
  config.num_heads = json["num_attention_heads"].as_int(1, kMaxDim);
  config.num_kv_heads = json["num_key_value_heads"].as_int_or(config.num_heads, 1, kMaxDim);
  config.head_dim = json["head_dim"].as_int_or(0, 1, kMaxDim);
  config.windows.assign(static_cast<size_t>(config.num_layers), 0);
}

void finish_dims(const JsonNode& json, ModelConfig& config) {
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
  config.rotary_dim = config.head_dim;
  if (config.rotary_dim % 2 != 0)
    json["head_dim"].fail(concat("rotary embeddings need an even head_dim, got ", config.head_dim));
  if (config.num_heads * config.head_dim > kMaxDim)
    json["head_dim"].fail(concat("expected num_attention_heads x head_dim up to ", kMaxDim,
                                 ", got ", config.num_heads, " x ", config.head_dim));
}

void choose_max_model_len(const JsonNode& json, int64_t max_model_len, ModelConfig& config) {
  if (config.rope.type == RopeType::kDynamic && config.rotary_dim <= 2)
    json["head_dim"].fail("dynamic RoPE needs a head_dim above 2");
  const int64_t longest = rope_max_len(config.rope, config.max_position_embeddings);
  config.max_model_len = max_model_len == 0 ? config.max_position_embeddings : max_model_len;
  if (config.max_model_len < 1 || config.max_model_len > longest)
    throw InvalidArgument(concat("max_model_len: expected 1 to ", longest, " (",
                                 config.rope.type == RopeType::kDefault
                                     ? std::string("max_position_embeddings")
                                     : concat("what its ", name(config.rope.type), " RoPE reaches"),
                                 " of ", json.where(), "), got ", max_model_len));
}

}  // namespace

ModelConfig read_model_config(const JsonDocument& document, int64_t max_model_len) {
  const JsonNode json(document);
  const ArchitectureRow& row = read_architecture(json);
  if (!json["quantization_config"].is_null())
    throw NotSupported(concat(json["quantization_config"].where(),
                              ": quantised checkpoints are not supported; use the original in "
                              "bfloat16 or float32"));
  ModelConfig config;
  config.architecture = row.name;
  const JsonNode dtype = json["dtype"].is_null() ? json["torch_dtype"] : json["dtype"];
  if (!dtype.is_null()) config.stored_dtype = dtype.as_string();
  read_dims(json, config);
  config.activation = read_activation(json["hidden_act"]);
  config.rms_norm_eps = static_cast<float>(json["rms_norm_eps"].as_number_or(1e-6, 1e-12, 1.0));
  config.tie_word_embeddings = json["tie_word_embeddings"].as_bool_or(false);
  config.max_position_embeddings = json["max_position_embeddings"].as_int_or(0, 1, kMaxTokens);
  config.bos_token_ids = read_token_ids(json["bos_token_id"]);
  config.eos_token_ids = read_token_ids(json["eos_token_id"]);
  row.configure(json, config);
  finish_dims(json, config);
  if (config.max_position_embeddings == 0)
    config.max_position_embeddings = json["max_position_embeddings"].as_int(1, kMaxTokens);
  config.rope = read_rope(json, config);
  choose_max_model_len(json, max_model_len, config);
  return config;
}

}  // namespace llmserve
