// What a layer needs to run, passed explicitly: no globals.
#pragma once

#include <span>
#include <string>

#include "comm/communicator.h"
#include "core/arena.h"
#include "kernels/backend.h"
#include "layers/model_input.h"

namespace llmserve {

// The ranks that a model is cut among, a group for each way to cut it. A model that is not cut has
// groups of one rank. They are the worker's, and so is the thread that calls them.
struct ParallelGroups {
  Communicator& tp;  // tensors: columns of linear layers, heads
  Communicator& pp;  // pipeline: layers
  Communicator& ep;  // experts
  Communicator& cp;  // context: positions
};

// Throws NotSupported where a group that no layer uses has several ranks.
void check_groups(const ParallelGroups& groups);

// Throws NotSupported, for a model that has neither adapters nor states of fixed size, where a
// sequence comes with one.
void check_plain(const ModelInput& input);

// Sees what linear layers read: calibration learns from it which activations a weight meets.
class LinearObserver {
 public:
  virtual ~LinearObserver() = default;
  // x [M, K] f32 is about to be multiplied by the tensors named `weights`, each once. Valid during
  // the call; the same layer may come several times in a step, each time with other rows.
  virtual void see(std::span<const std::string> weights, const ConstTensor& x) = 0;
};

// Sees which experts the tokens of a step are given.
class RouteObserver {
 public:
  virtual ~RouteObserver() = default;
  // ids [T, k] i32 of some tokens, contiguous, in the backend's memory; valid during the call.
  virtual void see(int64_t layer_idx, const ConstTensor& ids) = 0;
};

// References to what the worker owns; made anew every step.
struct ForwardContext {
  Backend& backend;
  Arena& arena;
  const ModelInput& input;
  std::span<const PagedKvCache> kv_caches;  // [layers]
  const ParallelGroups& groups;
  // [L, W, E] f32, contiguous: where the hidden states of input.wanted_layers go. None: none are
  // wanted.
  Tensor layer_states;
  // Whoever sees the inputs of linear layers, or null. With it ops run one by one instead of fused,
  // with the same bits.
  LinearObserver* observer = nullptr;
  RouteObserver* routes = nullptr;  // of layers of experts; null: nobody looks
};

}  // namespace llmserve
