// The plain part of ops' arguments: choices and numbers that reach the kernels of every backend as
// they are. A field that is added here is there in Args, in kernels and in CUDA launches at once.
//
// Enums and structs alone, without functions: files of cpu/isa include it, and an inline function
// compiled for AVX-512 could be merged into everybody's.
#pragma once

#include <stdint.h>

namespace llmserve {

// In the order of the table, which is the only place that lists them.
enum class Activation : uint8_t {
#define LLMSERVE_ACTIVATION(enumerator, name, spellings) enumerator,
#include "kernels/activations.inc"
};

// A norm makes of each element x of a row, or of its deviation from the row's mean,
//   x / sqrt(mean of the squares + eps) * (weight + weight_offset) * scale
// by the definition in norm.inc.
struct NormNumbers {
  float eps = 1e-6f;
  float weight_offset = 0.0f;  // 1 for families that store the weight minus one
  // D^-1/2 makes an RMS norm with eps / D the L2 norm (queries and keys of Gated DeltaNet), E^-1/2
  // is of Gemma 4's router.
  float scale = 1.0f;

  bool operator==(const NormNumbers&) const = default;
};

// What a router's scores are, and what of a chosen expert's becomes its weight.
enum class RouterScore : uint8_t {
  kSoftmax,          // over all experts
  kSigmoid,          // of each
  kSoftmaxOfChosen,  // the logit; the weights are a softmax over the chosen
  kSigmoidOfChosen,  // the logit; the weight is its sigmoid
  kSparsemixer,      // see RouteExpertsArgs
};

// How experts are chosen and weighed: RouteExpertsArgs (ops.h), router.inc.
struct RouterNumbers {
  RouterScore score = RouterScore::kSoftmax;
  // Experts are chosen within the best `top_groups` of `num_groups` groups of equal size, by the
  // sum of a group's `group_top` best.
  int32_t num_groups = 1;
  int32_t top_groups = 1;
  int32_t group_top = 1;  // 1 or 2
  // Weights are divided by max(their sum, sum_floor) + sum_eps.
  bool normalises = false;
  float sum_floor = 0.0f;
  float sum_eps = 0.0f;
  float scale = 1.0f;   // of the weights
  float jitter = 0.0f;  // kSparsemixer: how far below the best, of it, an expert still counts

  bool operator==(const RouterNumbers&) const = default;
};

}  // namespace llmserve
