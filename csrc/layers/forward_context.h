// What a layer needs to run, passed explicitly: no globals.
#pragma once

#include <span>

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

// Throws NotSupported, for a model that runs whole, where a group has several ranks.
void check_whole(const ParallelGroups& groups);

// Throws NotSupported, for a model that has neither adapters nor states of fixed size, where a
// sequence comes with one.
void check_plain(const ModelInput& input);

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
};

}  // namespace llmserve
