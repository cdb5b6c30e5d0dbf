#include "models/rope_config.h"

#include <cmath>
#include <limits>
#include <sstream>

#include "core/error.h"
#include "models/config_fields.h"

namespace llmserve {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr double kMinTheta = 1.0001;  // its logarithm divides

RopeType read_rope_type(const JsonNode& rope) {
  const JsonNode node = rope["rope_type"].is_null() ? rope["type"] : rope["rope_type"];
  if (node.is_null()) return RopeType::kDefault;
  // In text all sections of mrope have the same positions.
  if (node.is_string() && node.as_string() == "mrope") return RopeType::kDefault;
  // "su" is what longrope was called first.
  const std::string wanted = node.as_string() == "su" ? "longrope" : node.as_string();
  std::ostringstream known;
  for (const RopeType type : kRopeTypes) {
    if (name(type) == wanted) return type;
    known << (known.tellp() > 0 ? ", " : "") << name(type);
  }
  throw NotSupported(concat(node.where(), ": RoPE type ", node.describe(), " is not supported (",
                            known.str(), ")"));
}

void read_yarn(const JsonNode& rope, bool truncates, RopeParameters& out) {
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
  out.truncate = rope["truncate"].as_bool_or(truncates);
}

void read_llama3(const JsonNode& rope, RopeParameters& out) {
  out.low_freq_factor = rope["low_freq_factor"].as_number(1e-6, 1e6);
  out.high_freq_factor = rope["high_freq_factor"].as_number(1e-6, 1e6);
  if (out.high_freq_factor <= out.low_freq_factor)
    rope["high_freq_factor"].fail(concat("expected more than low_freq_factor ", out.low_freq_factor,
                                         ", got ", out.high_freq_factor));
}

std::vector<float> read_factors(const JsonNode& node, int64_t count) {
  std::vector<float> out;
  for (const JsonNode& factor : node.as_array())
    out.push_back(static_cast<float>(factor.as_number(1e-6, 1e6)));
  if (static_cast<int64_t>(out.size()) != count)
    node.fail(concat("expected ", count, " factors, one for each rotated pair, got ", out.size()));
  return out;
}

// int(head_dim * factor), which must be even to be made of pairs.
int64_t read_rotary_dim(const JsonNode& json, const JsonNode& partial, const ModelConfig& config) {
  const double factor = partial.as_number_or(config.rope_defaults.partial_factor, 0.0, 1.0);
  if (factor != 1.0 && !config.rope_defaults.can_be_partial)
    throw NotSupported(concat(partial.where(), ": partial rotary embeddings (", partial.describe(),
                              ") are not supported by ", config.architecture));
  const auto width = static_cast<int64_t>(static_cast<double>(config.head_dim) * factor);
  if (width % 2 != 0 && width == config.head_dim)
    json["head_dim"].fail(concat("rotary embeddings need an even head_dim, got ", config.head_dim));
  if (width < 2 || width % 2 != 0)
    partial.fail(concat("expected an even number of rotated elements, at least 2, got ", width,
                        " of head_dim ", config.head_dim));
  return width;
}

bool needs_original_length(RopeType type) {
  return type == RopeType::kYarn || type == RopeType::kLlama3 || type == RopeType::kLongrope;
}

// A base that is larger by a fixed amount, under the name of the scaling that makes it grow with
// the length ("NTK-aware").
bool read_stretch(const JsonNode& rope, const ModelConfig& config, RopeParameters& out) {
  if (!config.rope_defaults.can_be_stretched || out.type != RopeType::kDynamic) return false;
  const double alpha = rope["alpha"].as_number_or(0.0, 0.0, 1e9);
  if (alpha == 0.0 || out.rotary_dim <= 2) return false;
  const double dim = static_cast<double>(out.rotary_dim);
  out.type = RopeType::kDefault;
  out.theta *= std::pow(alpha, dim / (dim - 2.0));
  return true;
}

void read_scaling(const JsonNode& json, const JsonNode& rope, const ModelConfig& config,
                  RopeParameters& out) {
  if (read_stretch(rope, config, out)) return;
  if (needs_original_length(out.type)) {
    const JsonNode original = json["original_max_position_embeddings"].is_null()
                                  ? rope["original_max_position_embeddings"]
                                  : json["original_max_position_embeddings"];
    out.original_max_position_embeddings =
        original.as_int_or(config.max_position_embeddings, 1, kMaxTokens);
  }
  const bool infers_factor = out.type == RopeType::kYarn || out.type == RopeType::kLongrope;
  if (infers_factor && rope["factor"].is_null()) {
    out.factor = static_cast<double>(config.max_position_embeddings) /
                 static_cast<double>(out.original_max_position_embeddings);
  } else if (out.type != RopeType::kDefault) {
    out.factor = rope["factor"].as_number(1.0, 1e6);
  }
  if (config.rope_defaults.scales_queries)
    out.query_growth = rope["llama_4_scaling_beta"].as_number(0.0, 1e3);
  if (infers_factor && !rope["attention_factor"].is_null())
    out.attention_factor = rope["attention_factor"].as_number(0.0, 1e3);
  if (out.type == RopeType::kYarn) read_yarn(rope, config.rope_defaults.truncates, out);
  if (out.type == RopeType::kLlama3) read_llama3(rope, out);
  if (out.type == RopeType::kLongrope) {
    out.short_factors = read_factors(rope["short_factor"], out.rotary_dim / 2);
    out.long_factors = read_factors(rope["long_factor"], out.rotary_dim / 2);
    if (config.rope_defaults.has_mscales && !rope["short_mscale"].is_null()) {
      out.attention_factor = rope["short_mscale"].as_number(0.0, 1e3);
      out.long_attention_factor = rope["long_mscale"].as_number(0.0, 1e3);
    }
  }
  if (out.type == RopeType::kDynamic && out.rotary_dim <= 2)
    json["head_dim"].fail("dynamic RoPE needs a head_dim above 2");
}

// `rope` is the object of the scaling, or none; fields that it does not have may stand beside it.
RopeParameters read_rope(const JsonNode& json, const std::optional<JsonNode>& rope, double theta,
                         const ModelConfig& config) {
  RopeParameters out;
  out.theta = theta;
  JsonNode partial = first_of(json, {"partial_rotary_factor", "rotary_pct", "rope_pct"});
  if (rope && !rope->is_null()) {
    out.type = read_rope_type(*rope);
    out.theta = (*rope)["rope_theta"].as_number_or(theta, kMinTheta, 1e15);
    if (!(*rope)["partial_rotary_factor"].is_null()) partial = (*rope)["partial_rotary_factor"];
  }
  out.rotary_dim = read_rotary_dim(json, partial, config);
  if (rope && !rope->is_null()) read_scaling(json, *rope, config, out);
  return out;
}

}  // namespace

// transformers 5 has everything in rope_parameters; transformers 4 has rope_theta beside
// rope_scaling.
void read_ropes(const JsonNode& json, ModelConfig& config) {
  const JsonNode rope =
      json["rope_scaling"].is_null() ? json["rope_parameters"] : json["rope_scaling"];
  const RopeDefaults& defaults = config.rope_defaults;
  const double theta = first_of(json, {"rope_theta", "rotary_emb_base"})
                           .as_number_or(defaults.theta, kMinTheta, 1e15);
  const bool is_by_type = !rope.is_null() && (!rope["full_attention"].is_absent() ||
                                              !rope["sliding_attention"].is_absent());
  if (is_by_type && !defaults.sliding_theta)
    throw NotSupported(concat(rope.where(),
                              ": RoPE parameters that differ by layer type are not supported by ",
                              config.architecture));
  config.ropes = {read_rope(json, is_by_type ? rope["full_attention"] : rope, theta, config)};
  if (!defaults.sliding_theta) return;
  const double sliding_theta =
      json["rope_local_base_freq"].as_number_or(*defaults.sliding_theta, kMinTheta, 1e15);
  // In the older spelling the scaling is of the full layers alone.
  std::optional<JsonNode> sliding;
  if (is_by_type) sliding = rope["sliding_attention"];
  config.ropes.push_back(read_rope(json, sliding, sliding_theta, config));
  for (LayerTraits& layer : config.layers)
    if (layer.window > 0) layer.rope = 1;
}

}  // namespace llmserve
