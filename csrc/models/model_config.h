// The one normalised description of a decoder, made from config.json in the spellings of
// transformers 4 and 5.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"
#include "kernels/ops.h"
#include "models/rope.h"

namespace llmserve {

struct ModelConfig {
  std::string architecture;  // Hugging Face's name: a row of the registry
  std::string stored_dtype;  // as the config says ("bfloat16"), or empty

  int64_t vocab_size = 0;         // V
  int64_t hidden_size = 0;        // E
  int64_t intermediate_size = 0;  // F
  int64_t num_layers = 0;
  int64_t num_heads = 0;     // H
  int64_t num_kv_heads = 0;  // K, divides H
  int64_t head_dim = 0;      // D
  int64_t rotary_dim = 0;    // even, at most D

  Activation activation = Activation::kSilu;
  float rms_norm_eps = 1e-6f;
  bool attention_bias = false;  // of q, k, v
  bool output_bias = false;     // of the projection after attention
  bool mlp_bias = false;
  bool has_qk_norm = false;
  bool tie_word_embeddings = false;
  std::vector<int32_t> windows;  // [num_layers] tokens that a layer sees; 0: all

  RopeParameters rope;
  int64_t max_position_embeddings = 0;
  int64_t max_model_len = 0;  // what this process serves; fixes the frequencies of `dynamic`

  std::vector<int32_t> bos_token_ids;
  std::vector<int32_t> eos_token_ids;

  bool operator==(const ModelConfig&) const = default;
};

// Reads and validates. `max_model_len` 0 takes max_position_embeddings. Throws CorruptFile (a field
// that is absent or out of range, by name), NotSupported (architecture, activation, RoPE type,
// quantised weights: names what is), InvalidArgument (max_model_len too long, with the longest).
ModelConfig read_model_config(const JsonDocument& document, int64_t max_model_len = 0);

}  // namespace llmserve
