// What a family says of its experts: plain fields, which ModelConfig has.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/op_numbers.h"

namespace llmserve {

// Below the prefix of a layer. With "{}", which stands for the number of an expert, the name of a
// module of each expert, without ".weight". Without, the whole name of a tensor of all, [X, N, K].
struct ExpertNames {
  std::string router = "mlp.gate";  // without ".weight" and ".bias"
  std::string choice_bias;          // a tensor [X]; empty: none
  std::string gate_up;              // in place of the next two
  std::string gate = "mlp.experts.{}.gate_proj";
  std::string up = "mlp.experts.{}.up_proj";
  std::string down = "mlp.experts.{}.down_proj";
  // Biases, each a tensor of all experts [X, N]; empty: none.
  std::string gate_up_bias;  // in place of the next two
  std::string gate_bias;
  std::string up_bias;
  std::string down_bias;
  // Of the expert that all tokens have, without ".weight".
  std::string shared_gate_up;  // in place of the next two
  std::string shared_gate = "mlp.shared_experts.gate_proj";
  std::string shared_up = "mlp.shared_experts.up_proj";
  std::string shared_down = "mlp.shared_experts.down_proj";
  std::string
      shared_weight;  // of a linear layer to one number, whose sigmoid weighs it; empty: none

  bool operator==(const ExpertNames&) const = default;
};

struct ExpertSpec {
  int64_t num_experts = 0;        // X; 0: a dense model
  int64_t top_k = 0;              // experts a token
  int64_t intermediate_size = 0;  // F of each
  int64_t shared_size = 0;        // F of the expert that all tokens have; 0: none
  ExpertNames names;
  RouterNumbers router;
  bool has_router_bias = false;
  bool is_choice_bias_row = false;       // stored as [1, X]
  bool is_shared_weight_vector = false;  // stored as [E], not [1, E]
  bool is_transposed = false;            // tensors of all experts are [X, K, N]
  bool is_interleaved = false;  // rows of gate_up are of the gate and of the other by turns
  bool scales_input = false;  // the weight multiplies what the one expert reads, not what it gives

  bool operator==(const ExpertSpec&) const = default;
};

}  // namespace llmserve
