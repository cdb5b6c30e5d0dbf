// The architectures of GGUF files. Names: gguf-py 0.19, constants.py and tensor_mapping.py; what
// the converter does to tensors and numbers: llama.cpp's conversion folder.
#include "io/gguf_architecture.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/near_names.h"
#include "io/refused_families.h"

namespace llmserve {
namespace {

constexpr RenamingRow kSharedNames[] = {
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
    {"blk.{}.attn_sinks", "model.layers.{}.self_attn.sinks"},
    {"blk.{}.ffn_gate_inp", "model.layers.{}.mlp.gate"},
    {"blk.{}.exp_probs_b", "model.layers.{}.mlp.gate.choice"},
    {"blk.{}.ffn_gate_exps", "model.layers.{}.mlp.experts.gate_proj"},
    {"blk.{}.ffn_up_exps", "model.layers.{}.mlp.experts.up_proj"},
    {"blk.{}.ffn_down_exps", "model.layers.{}.mlp.experts.down_proj"},
    {"blk.{}.ffn_gate_shexp", "model.layers.{}.mlp.shared_experts.gate_proj"},
    {"blk.{}.ffn_up_shexp", "model.layers.{}.mlp.shared_experts.up_proj"},
    {"blk.{}.ffn_down_shexp", "model.layers.{}.mlp.shared_experts.down_proj"},
    {"blk.{}.ffn_gate_inp_shexp", "model.layers.{}.mlp.shared_expert_gate"},
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

void set_attention_bias(GgufConfig& config) {
  config.set("attention_bias", {config.has_tensor("blk.0.attn_q.bias")});
}

// A word for each layer takes far more than its byte in the file.
constexpr int64_t kMaxLayers = 4096;

// Which layers have the window, where the file says so; otherwise the family's pattern stands.
void copy_windows(GgufConfig& config) {
  config.copy_integer("attention.sliding_window", "sliding_window");
  const GgufValue* pattern = config.find("attention.sliding_window_pattern");
  if (!pattern) return;
  if (!pattern->is_array)
    return config.copy_integer("attention.sliding_window_pattern", "sliding_window_pattern");
  const int64_t num_layers = config.integer("num_hidden_layers");
  if (pattern->count != num_layers || num_layers > kMaxLayers)
    config.file().fail(pattern->key, concat("expected an entry for each of ", num_layers,
                                            " layers, of which there may be ", kMaxLayers, ", got ",
                                            pattern->count));
  JsonValue::Array types;
  for (int64_t i = 0; i < num_layers; ++i)
    types.push_back(
        {std::string(config.file().boolean(*pattern, i) ? "sliding_attention" : "full_attention")});
  config.set("layer_types", {std::move(types)});
}

// As llama.cpp has it: the files do not say by what the queries of the largest model are scaled.
void set_query_scalar(GgufConfig& config, int64_t largest_num_layers) {
  const bool is_largest = config.integer("num_hidden_layers") == largest_num_layers;
  config.set("query_pre_attn_scalar",
             {is_largest ? config.integer("hidden_size") / config.integer("num_attention_heads")
                         : config.integer("head_dim")});
}

void configure_gemma(GgufConfig& config) {
  config.set("hidden_activation", {std::string("gelu_pytorch_tanh")});
}

void configure_gemma2(GgufConfig& config) {
  configure_gemma(config);
  set_query_scalar(config, 46);
  config.copy_number("attn_logit_softcapping", "attn_logit_softcapping");
  config.copy_number("final_logit_softcapping", "final_logit_softcapping");
  copy_windows(config);
}

void configure_gemma3(GgufConfig& config) {
  configure_gemma2(config);
  set_query_scalar(config, 62);
  config.copy_number("rope.freq_base_swa", "rope_local_base_freq");
}

void configure_granite(GgufConfig& config) {
  configure_llama(config);
  config.copy_number("attention.scale", "attention_multiplier");
  config.copy_number("embedding_scale", "embedding_multiplier");
  config.copy_number("residual_scale", "residual_multiplier");
  config.copy_number("logit_scale", "logits_scaling");
}

void configure_granite_moe(GgufConfig& config) {
  configure_granite(config);
  if (config.find("expert_shared_feed_forward_length"))
    config.set("architectures", {JsonValue::Array{{std::string("GraniteMoeSharedForCausalLM")}}});
}

void configure_mixtral(GgufConfig& config) {
  if (config.has_tensor("blk.0.attn_q.bias"))
    throw NotSupported(concat(config.file().file()->path().string(),
                              ": biases on q, k and v beside experts are not supported for the "
                              "architecture llama"));
}

// As llama.cpp has it: the files do not say that weights are divided by their sum.
void configure_qwen3_moe(GgufConfig& config) {
  set_attention_bias(config);
  if (!config.find("expert_weights_norm")) config.set("norm_topk_prob", {true});
}

void configure_qwen2_moe(GgufConfig& config) {
  config.set("qkv_bias", {config.has_tensor("blk.0.attn_q.bias")});
}

void configure_gpt_oss(GgufConfig& config) {
  set_attention_bias(config);
  copy_windows(config);
}

void configure_glm4_moe(GgufConfig& config) {
  set_attention_bias(config);
  config.set("use_qk_norm", {config.has_tensor("blk.0.attn_q_norm.weight")});
  // Solar Open's files, whose name is GLM's, too.
  if (!config.find("leading_dense_block_count")) config.set("first_k_dense_replace", {int64_t{0}});
}

// By what experts are scored, in the converter's numbers.
constexpr int64_t kGatingSoftmax = 1;
constexpr int64_t kGatingSigmoid = 2;

// One name for all that have these latents: the layers say which family it is.
void configure_deepseek2(GgufConfig& config) {
  const auto set_class = [&](std::string_view name) {
    config.set("architectures", {JsonValue::Array{{std::string(name)}}});
  };
  const GgufValue* experts = config.find("expert_count");
  if (!experts || config.uniform_integer(*experts) == 0) return set_class("YoutuForCausalLM");
  const GgufValue* gating = config.find("expert_gating_func");
  const int64_t score = gating ? config.uniform_integer(*gating) : kGatingSoftmax;
  if (score == kGatingSigmoid) return set_class("DeepseekV3ForCausalLM");
  if (score != kGatingSoftmax)
    throw NotSupported(concat(config.file().file()->path().string(), ": metadata ", gating->key,
                              ": ", score, " is not supported (", kGatingSoftmax, ": softmax, ",
                              kGatingSigmoid, ": sigmoid)"));
  const GgufValue* norm = config.find("expert_weights_norm");
  if (norm && config.file().boolean(*norm))
    throw NotSupported(concat(config.file().file()->path().string(), ": metadata ", norm->key,
                              ": true beside a softmax over the experts is not supported in files "
                              "of the architecture deepseek2"));
  const GgufValue* groups = config.find("expert_group_count");
  if (groups && config.uniform_integer(*groups) > 1)
    config.set("topk_method", {std::string("group_limited_greedy")});
}

void configure_phimoe(GgufConfig& config) {
  config.set("attention_bias", {config.has_tensor("blk.0.attn_q.bias")});
  config.set("lm_head_bias", {config.has_tensor("output.bias")});
  const GgufValue* eps = config.find("attention.layer_norm_epsilon");
  if (eps) config.set("rms_norm_eps", {config.file().number(*eps)});
}

void configure_cohere(GgufConfig& config) {
  config.copy_number("logit_scale", "logit_scale");
  config.set("use_qk_norm", {config.has_tensor("blk.0.attn_q_norm.weight")});
}

void configure_cohere2(GgufConfig& config) {
  configure_cohere(config);
  copy_windows(config);
}

// Its newer form is what the older ones are cases of, once the qkv is in order: see
// has_plain_weights.
void configure_falcon(GgufConfig& config) {
  config.set("new_decoder_architecture", {true});
  config.set("num_ln_in_parallel_attn", {int64_t{1}});
  config.set("bias", {config.has_tensor("blk.0.attn_qkv.bias")});
}

void configure_falcon_of_two_norms(GgufConfig& config) {
  configure_falcon(config);
  config.set("num_ln_in_parallel_attn", {int64_t{2}});
}

void set_use_bias(GgufConfig& config) {
  config.set("use_bias", {config.has_tensor("blk.0.attn_q.bias")});
}

void configure_gpt_neox(GgufConfig& config) {
  if (const GgufValue* value = config.find("use_parallel_residual"))
    config.set("use_parallel_residual", {config.file().boolean(*value)});
}

void configure_stablelm(GgufConfig& config) {
  config.set("use_qkv_bias", {config.has_tensor("blk.0.attn_q.bias")});
  config.set("use_parallel_residual", {!config.has_tensor("blk.0.ffn_norm.weight")});
  config.set("qk_layernorm", {config.has_tensor("blk.0.attn_q_norm.weight")});
}

void configure_seed_oss(GgufConfig& config) {
  set_attention_bias(config);
  config.set("attention_out_bias", {config.has_tensor("blk.0.attn_output.bias")});
}

// The name of both; the windows are OLMo 3's.
void configure_olmo2(GgufConfig& config) {
  if (!config.find("attention.sliding_window")) return;
  config.set("architectures", {JsonValue::Array{{std::string("Olmo3ForCausalLM")}}});
  copy_windows(config);
  config.copy_number("rope.freq_base", "rope_local_base_freq");
  config.copy_number("rope.freq_base_swa", "rope_local_base_freq");
}

// Where there is no key there is no window; where config.json has no field there is one.
void configure_exaone4(GgufConfig& config) {
  config.set("sliding_window", {});
  copy_windows(config);
}

// Phi-4 says 0 for no window.
void configure_phi3(GgufConfig& config) {
  const GgufValue* window = config.find("attention.sliding_window");
  if (window && config.uniform_integer(*window) > 0)
    config.copy_integer("attention.sliding_window", "sliding_window");
}

constexpr RenamingRow kFalconNames[] = {
    {"token_embd", "transformer.word_embeddings"},
    {"output_norm", "transformer.ln_f"},
    {"blk.{}.attn_norm", "transformer.h.{}.input_layernorm"},
    {"blk.{}.attn_qkv", "transformer.h.{}.self_attention.query_key_value"},
    {"blk.{}.attn_output", "transformer.h.{}.self_attention.dense"},
    {"blk.{}.ffn_up", "transformer.h.{}.mlp.dense_h_to_4h"},
    {"blk.{}.ffn_down", "transformer.h.{}.mlp.dense_4h_to_h"},
};
constexpr RenamingRow kFalconOfTwoNormsNames[] = {
    {"token_embd", "transformer.word_embeddings"},
    {"output_norm", "transformer.ln_f"},
    {"blk.{}.attn_norm", "transformer.h.{}.ln_mlp"},
    {"blk.{}.attn_norm_2", "transformer.h.{}.ln_attn"},
    {"blk.{}.attn_qkv", "transformer.h.{}.self_attention.query_key_value"},
    {"blk.{}.attn_output", "transformer.h.{}.self_attention.dense"},
    {"blk.{}.ffn_up", "transformer.h.{}.mlp.dense_h_to_4h"},
    {"blk.{}.ffn_down", "transformer.h.{}.mlp.dense_4h_to_h"},
};
constexpr RenamingRow kGlmNames[] = {
    {"blk.{}.ffn_up", "model.layers.{}.mlp.gate_up_proj"},
};
constexpr RenamingRow kGlm4Names[] = {
    {"blk.{}.post_attention_norm", "model.layers.{}.post_self_attn_layernorm"},
    {"blk.{}.post_ffw_norm", "model.layers.{}.post_mlp_layernorm"},
    {"blk.{}.ffn_up", "model.layers.{}.mlp.gate_up_proj"},
};
constexpr RenamingRow kHunyuanNames[] = {
    {"blk.{}.attn_q_norm", "model.layers.{}.self_attn.query_layernorm"},
    {"blk.{}.attn_k_norm", "model.layers.{}.self_attn.key_layernorm"},
};
constexpr RenamingRow kLatentNames[] = {
    {"blk.{}.attn_q_a", "model.layers.{}.self_attn.q_a_proj"},
    {"blk.{}.attn_q_a_norm", "model.layers.{}.self_attn.q_a_layernorm"},
    {"blk.{}.attn_q_b", "model.layers.{}.self_attn.q_b_proj"},
    {"blk.{}.attn_kv_a_mqa", "model.layers.{}.self_attn.kv_a_proj_with_mqa"},
    {"blk.{}.attn_kv_a_norm", "model.layers.{}.self_attn.kv_a_layernorm"},
    {"blk.{}.attn_kv_b", "model.layers.{}.self_attn.kv_b_proj"},
    {"blk.{}.attn_k_b", "model.layers.{}.self_attn.k_b_proj"},
    {"blk.{}.attn_v_b", "model.layers.{}.self_attn.v_b_proj"},
};
constexpr RenamingRow kStarcoder2Names[] = {
    {"blk.{}.ffn_up", "model.layers.{}.mlp.c_fc"},
    {"blk.{}.ffn_down", "model.layers.{}.mlp.c_proj"},
};
constexpr RenamingRow kGpt2Names[] = {
    {"token_embd", "transformer.wte"},
    {"position_embd", "transformer.wpe"},
    {"output_norm", "transformer.ln_f"},
    {"blk.{}.attn_norm", "transformer.h.{}.ln_1"},
    {"blk.{}.attn_qkv", "transformer.h.{}.attn.c_attn"},
    {"blk.{}.attn_output", "transformer.h.{}.attn.c_proj"},
    {"blk.{}.ffn_norm", "transformer.h.{}.ln_2"},
    {"blk.{}.ffn_up", "transformer.h.{}.mlp.c_fc"},
    {"blk.{}.ffn_down", "transformer.h.{}.mlp.c_proj"},
};
constexpr RenamingRow kGptNeoxNames[] = {
    {"token_embd", "gpt_neox.embed_in"},
    {"output_norm", "gpt_neox.final_layer_norm"},
    {"output", "embed_out"},
    {"blk.{}.attn_norm", "gpt_neox.layers.{}.input_layernorm"},
    {"blk.{}.attn_qkv", "gpt_neox.layers.{}.attention.query_key_value"},
    {"blk.{}.attn_output", "gpt_neox.layers.{}.attention.dense"},
    {"blk.{}.ffn_norm", "gpt_neox.layers.{}.post_attention_layernorm"},
    {"blk.{}.ffn_up", "gpt_neox.layers.{}.mlp.dense_h_to_4h"},
    {"blk.{}.ffn_down", "gpt_neox.layers.{}.mlp.dense_4h_to_h"},
};
constexpr RenamingRow kStableLmNames[] = {
    {"blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_layernorm.norms"},
    {"blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_layernorm.norms"},
};
constexpr RenamingRow kGemma2Names[] = {
    {"blk.{}.post_attention_norm", "model.layers.{}.post_attention_layernorm"},
    {"blk.{}.ffn_norm", "model.layers.{}.pre_feedforward_layernorm"},
    {"blk.{}.post_ffw_norm", "model.layers.{}.post_feedforward_layernorm"},
};
constexpr RenamingRow kOlmo2Names[] = {
    {"blk.{}.post_attention_norm", "model.layers.{}.post_attention_layernorm"},
    {"blk.{}.post_ffw_norm", "model.layers.{}.post_feedforward_layernorm"},
};
constexpr RenamingRow kPhi2Names[] = {
    {"output_norm", "model.final_layernorm"},
    {"blk.{}.attn_output", "model.layers.{}.self_attn.dense"},
    {"blk.{}.ffn_up", "model.layers.{}.mlp.fc1"},
    {"blk.{}.ffn_down", "model.layers.{}.mlp.fc2"},
};
constexpr RenamingRow kPhi3Names[] = {
    {"blk.{}.attn_qkv", "model.layers.{}.self_attn.qkv_proj"},
    {"blk.{}.ffn_up", "model.layers.{}.mlp.gate_up_proj"},
};

constexpr RenamingRow kPostAttentionNormNames[] = {
    {"blk.{}.post_attention_norm", "model.layers.{}.post_attention_layernorm"},
};

constexpr std::array kArchitectures{
    GgufArchitecture{.name = "llama",
                     .if_tensor = "blk.0.ffn_gate_inp.weight",
                     .model_class = "MixtralForCausalLM",
                     .has_paired_rows = true,
                     .has_experts = true,
                     .configure = &configure_mixtral},
    GgufArchitecture{.name = "llama",
                     .model_class = "LlamaForCausalLM",
                     .has_paired_rows = true,
                     .configure = &configure_llama},
    GgufArchitecture{.name = "arcee",
                     .model_class = "ArceeForCausalLM",
                     .has_paired_rows = true,
                     .configure = &configure_llama},
    GgufArchitecture{.name = "qwen2", .model_class = "Qwen2ForCausalLM"},
    GgufArchitecture{
        .name = "qwen3", .model_class = "Qwen3ForCausalLM", .configure = &set_attention_bias},
    GgufArchitecture{.name = "gemma",
                     .model_class = "GemmaForCausalLM",
                     .norm_added = 1.0f,
                     .configure = &configure_gemma},
    GgufArchitecture{.name = "gemma2",
                     .model_class = "Gemma2ForCausalLM",
                     .names = kGemma2Names,
                     .norm_added = 1.0f,
                     .configure = &configure_gemma2},
    GgufArchitecture{.name = "gemma3",
                     .model_class = "Gemma3ForCausalLM",
                     .names = kGemma2Names,
                     .norm_added = 1.0f,
                     .configure = &configure_gemma3},
    GgufArchitecture{.name = "nemotron",
                     .model_class = "NemotronForCausalLM",
                     .norm_added = 1.0f,
                     .configure = &configure_llama},
    GgufArchitecture{.name = "granite",
                     .model_class = "GraniteForCausalLM",
                     .has_paired_rows = true,
                     .configure = &configure_granite},
    GgufArchitecture{.name = "olmo2",
                     .model_class = "Olmo2ForCausalLM",
                     .names = kOlmo2Names,
                     .configure = &configure_olmo2},
    GgufArchitecture{.name = "exaone4",
                     .model_class = "Exaone4ForCausalLM",
                     .names = kOlmo2Names,
                     .configure = &configure_exaone4},
    GgufArchitecture{
        .name = "minicpm3", .model_class = "MiniCPM3ForCausalLM", .names = kLatentNames},
    GgufArchitecture{
        .name = "mistral3", .model_class = "Ministral3ForCausalLM", .has_paired_rows = true},
    GgufArchitecture{
        .name = "ernie4_5", .model_class = "Ernie4_5ForCausalLM", .configure = &set_use_bias},
    GgufArchitecture{.name = "chatglm",
                     .model_class = "GlmForCausalLM",
                     .names = kGlmNames,
                     .configure = &set_attention_bias},
    GgufArchitecture{.name = "glm4",
                     .model_class = "Glm4ForCausalLM",
                     .names = kGlm4Names,
                     .configure = &set_attention_bias},
    GgufArchitecture{.name = "hunyuan-dense",
                     .model_class = "HunYuanDenseV1ForCausalLM",
                     .names = kHunyuanNames,
                     .configure = &set_attention_bias},
    GgufArchitecture{.name = "seed_oss",
                     .model_class = "SeedOssForCausalLM",
                     .names = kPostAttentionNormNames,
                     .configure = &configure_seed_oss},
    GgufArchitecture{.name = "starcoder2",
                     .model_class = "Starcoder2ForCausalLM",
                     .names = kStarcoder2Names,
                     .configure = &set_use_bias},
    GgufArchitecture{.name = "phi2", .model_class = "PhiForCausalLM", .names = kPhi2Names},
    GgufArchitecture{.name = "phi3",
                     .model_class = "Phi3ForCausalLM",
                     .names = kPhi3Names,
                     .configure = &configure_phi3},
    GgufArchitecture{.name = "smollm3",
                     .model_class = "SmolLM3ForCausalLM",
                     .has_paired_rows = true,
                     .configure = &configure_llama},
    GgufArchitecture{
        .name = "command-r", .model_class = "CohereForCausalLM", .configure = &configure_cohere},
    GgufArchitecture{
        .name = "cohere2", .model_class = "Cohere2ForCausalLM", .configure = &configure_cohere2},
    GgufArchitecture{.name = "falcon",
                     .if_tensor = "blk.0.attn_norm_2.weight",
                     .model_class = "FalconForCausalLM",
                     .names = kFalconOfTwoNormsNames,
                     .configure = &configure_falcon_of_two_norms},
    GgufArchitecture{.name = "falcon",
                     .model_class = "FalconForCausalLM",
                     .names = kFalconNames,
                     .configure = &configure_falcon},
    GgufArchitecture{.name = "gpt2", .model_class = "GPT2LMHeadModel", .names = kGpt2Names},
    GgufArchitecture{
        .name = "starcoder", .model_class = "GPTBigCodeForCausalLM", .names = kGpt2Names},
    GgufArchitecture{.name = "gptneox",
                     .model_class = "GPTNeoXForCausalLM",
                     .names = kGptNeoxNames,
                     .configure = &configure_gpt_neox},
    GgufArchitecture{.name = "stablelm",
                     .model_class = "StableLmForCausalLM",
                     .names = kStableLmNames,
                     .configure = &configure_stablelm},
    GgufArchitecture{.name = "qwen2moe",
                     .model_class = "Qwen2MoeForCausalLM",
                     .has_experts = true,
                     .configure = &configure_qwen2_moe},
    GgufArchitecture{.name = "qwen3moe",
                     .model_class = "Qwen3MoeForCausalLM",
                     .has_experts = true,
                     .configure = &configure_qwen3_moe},
    GgufArchitecture{.name = "olmoe", .model_class = "OlmoeForCausalLM", .has_experts = true},
    GgufArchitecture{.name = "granitemoe",
                     .model_class = "GraniteMoeForCausalLM",
                     .has_paired_rows = true,
                     .has_experts = true,
                     .configure = &configure_granite_moe},
    GgufArchitecture{.name = "phimoe",
                     .model_class = "PhimoeForCausalLM",
                     .has_experts = true,
                     .configure = &configure_phimoe},
    GgufArchitecture{.name = "glm4moe",
                     .model_class = "Glm4MoeForCausalLM",
                     .names = kPostAttentionNormNames,
                     .has_experts = true,
                     .configure = &configure_glm4_moe},
    GgufArchitecture{
        .name = "minimax-m2", .model_class = "MiniMaxM2ForCausalLM", .has_experts = true},
    GgufArchitecture{.name = "ernie4_5-moe",
                     .model_class = "Ernie4_5_MoeForCausalLM",
                     .has_experts = true,
                     .configure = &set_use_bias},
    GgufArchitecture{.name = "hunyuan-moe",
                     .model_class = "HunYuanMoEV1ForCausalLM",
                     .names = kHunyuanNames,
                     .has_experts = true,
                     .configure = &set_attention_bias},
    GgufArchitecture{.name = "gpt-oss",
                     .model_class = "GptOssForCausalLM",
                     .names = kPostAttentionNormNames,
                     .has_experts = true,
                     .configure = &configure_gpt_oss},
    GgufArchitecture{.name = "deepseek2",
                     .model_class = "DeepseekV2ForCausalLM",
                     .names = kLatentNames,
                     .has_experts = true,
                     .yarn_multiplier = 0.1f,
                     .configure = &configure_deepseek2},
    GgufArchitecture{.name = "exaone-moe",
                     .model_class = "ExaoneMoeForCausalLM",
                     .has_experts = true,
                     .configure = &configure_exaone4},
    GgufArchitecture{.name = "dots1",
                     .model_class = "Dots1ForCausalLM",
                     .has_experts = true,
                     .configure = &set_attention_bias},
};

}  // namespace

std::span<const GgufArchitecture> gguf_architecture_registry() { return kArchitectures; }

const GgufArchitecture& find_gguf_architecture(const GgufFile& file) {
  const GgufValue* value = file.find("general.architecture");
  if (!value) file.fail("general.architecture", "is absent; this is no model, or a part of one");
  const std::string_view name = file.string(*value);
  std::vector<std::string_view> known;
  for (const GgufArchitecture& row : kArchitectures) {
    const bool has_other_tensors = !row.if_tensor.empty() && !file.find_tensor(row.if_tensor);
    if (row.name == name && !has_other_tensors) return row;
    if (row.if_tensor.empty()) known.push_back(row.name);
  }
  if (const std::string_view reason = refused_family(name); !reason.empty())
    throw NotSupported(concat(file.file()->path().string(), ": architecture \"", name,
                              "\" is not supported: ", reason));
  const std::string near = near_names(name, known);
  throw NotSupported(concat(file.file()->path().string(), ": architecture \"", name.substr(0, 80),
                            "\" is not supported in GGUF files; ",
                            near.empty() ? "" : "near it are " + near + "; ",
                            "docs/support-matrix.md has all ", known.size(), " that are"));
}

std::string model_tensor_name(const GgufArchitecture& architecture, std::string_view gguf_name) {
  const std::string own = rename_tensor(architecture.names, gguf_name);
  return own.empty() ? rename_tensor(kSharedNames, gguf_name) : own;
}

}  // namespace llmserve
