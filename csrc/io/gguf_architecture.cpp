// The architectures of GGUF files. Names: gguf-py 0.19, constants.py and tensor_mapping.py; what
// the converter does to tensors and numbers: llama.cpp's conversion folder.
#include "io/gguf_architecture.h"

#include <algorithm>
#include <array>
#include <sstream>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr GgufName kSharedNames[] = {
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
    {"blk.{}.attn_norm", "model.layers.{}.input_layernorm"},
    {"blk.{}.attn_q", "model.layers.{}.self_attn.q_proj"},
    {"blk.{}.attn_k", "model.layers.{}.self_attn.k_proj"},
    {"blk.{}.attn_v", "model.layers.{}.self_attn.v_proj"},
    {"blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"},
    {"blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_norm"},
    {"blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_norm"},
    {"blk.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"},
    {"blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"},
    {"blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"},
    {"blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"},
};

void configure_llama(GgufConfig& config) {
  const bool has_bias = config.has_tensor("blk.0.attn_output.bias");
  if (config.has_tensor("blk.0.attn_q.bias") != has_bias)
    throw NotSupported(concat(config.file().file()->path().string(),
                              ": biases on q, k and v without one on the output, or the other way "
                              "round, are not supported for the architecture llama"));
  config.set("attention_bias", {has_bias});
  config.set("mlp_bias", {config.has_tensor("blk.0.ffn_up.bias")});
}

void configure_qwen3(GgufConfig& config) {
  config.set("attention_bias", {config.has_tensor("blk.0.attn_q.bias")});
}

constexpr std::array kArchitectures{
    GgufArchitecture{.name = "llama",
                     .model_class = "LlamaForCausalLM",
                     .has_paired_rows = true,
                     .configure = &configure_llama},
    GgufArchitecture{.name = "qwen2", .model_class = "Qwen2ForCausalLM"},
    GgufArchitecture{
        .name = "qwen3", .model_class = "Qwen3ForCausalLM", .configure = &configure_qwen3},
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The model's stem for `stem`, or empty.
std::string match(const GgufName& row, std::string_view stem) {
  const size_t hole = row.gguf.find("{}");
  if (hole == row.gguf.npos) return stem == row.gguf ? std::string(row.model) : std::string();
  const std::string_view before = row.gguf.substr(0, hole);
  const std::string_view after = row.gguf.substr(hole + 2);
  if (!stem.starts_with(before) || !stem.ends_with(after) ||
      stem.size() <= before.size() + after.size())
    return "";
  const std::string_view layer =
      stem.substr(before.size(), stem.size() - before.size() - after.size());
  if (!std::all_of(layer.begin(), layer.end(), is_digit)) return "";
  const size_t at = row.model.find("{}");
  return concat(row.model.substr(0, at), layer, row.model.substr(at + 2));
}

}  // namespace

std::span<const GgufArchitecture> gguf_architecture_registry() { return kArchitectures; }

const GgufArchitecture& find_gguf_architecture(const GgufFile& file) {
  const GgufValue* value = file.find("general.architecture");
  if (!value) file.fail("general.architecture", "is absent; this is no model, or a part of one");
  const std::string_view name = file.string(*value);
  std::ostringstream known;
  for (const GgufArchitecture& row : kArchitectures) {
    if (row.name == name) return row;
    known << (known.tellp() > 0 ? ", " : "") << row.name;
  }
  throw NotSupported(concat(file.file()->path().string(), ": architecture \"", name.substr(0, 80),
                            "\" is not supported in GGUF files; supported are ", known.str()));
}

std::string model_tensor_name(const GgufArchitecture& architecture, std::string_view gguf_name) {
  const size_t dot = gguf_name.rfind('.');
  if (dot == gguf_name.npos) return "";
  const std::string_view stem = gguf_name.substr(0, dot);
  for (const std::span<const GgufName> table :
       {architecture.names, std::span<const GgufName>(kSharedNames)}) {
    for (const GgufName& row : table) {
      const std::string name = match(row, stem);
      if (!name.empty()) return concat(name, gguf_name.substr(dot));
    }
  }
  return "";
}

}  // namespace llmserve
