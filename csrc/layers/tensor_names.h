// What a family calls the tensors of a decoder, without ".weight" and ".bias". An empty name: the
// model has no such part.
#pragma once

#include <string>

namespace llmserve {

struct TensorNames {
  std::string embedding = "model.embed_tokens";
  std::string positions;  // learned position embeddings
  std::string final_norm = "model.norm";
  std::string lm_head = "lm_head";

  // Of layer i, below "<layers><i>.".
  std::string layers = "model.layers.";
  std::string attention_norm = "input_layernorm";
  std::string attention_post_norm;  // of what attention gives, before it is added
  std::string mlp_norm = "post_attention_layernorm";
  std::string mlp_post_norm;

  std::string qkv;  // one tensor, in place of the next three
  std::string q = "self_attn.q_proj";
  std::string k = "self_attn.k_proj";
  std::string v = "self_attn.v_proj";
  std::string q_norm = "self_attn.q_norm";  // where the config has such norms
  std::string k_norm = "self_attn.k_norm";
  std::string attention_output = "self_attn.o_proj";
  std::string sinks = "self_attn.sinks";  // where the config has such

  // Of multi-head latent attention.
  std::string q_a = "self_attn.q_a_proj";  // in place of q, with the next two
  std::string q_a_norm = "self_attn.q_a_layernorm";
  std::string q_b = "self_attn.q_b_proj";
  std::string kv_a = "self_attn.kv_a_proj_with_mqa";
  std::string kv_a_norm = "self_attn.kv_a_layernorm";
  std::string kv_b = "self_attn.kv_b_proj";  // each head's keys and values
  std::string k_b;                           // or each by itself, keys transposed
  std::string v_b;

  std::string gate_up;                 // one tensor, in place of the next two
  std::string gate = "mlp.gate_proj";  // empty, and no gate_up: an MLP without a gate
  std::string up = "mlp.up_proj";
  std::string down = "mlp.down_proj";

  bool operator==(const TensorNames&) const = default;
};

}  // namespace llmserve
