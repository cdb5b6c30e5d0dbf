// The ranks of a head that this process has, and the target's states that they still need.
// HeadWorker draws from what rank 0 gives. Nodes without rank 0 compute beside it (NodeFollower).
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "api/engine_config.h"
#include "engine/head_rank.h"
#include "io/bus_errors.h"
#include "speculation/head_model.h"

namespace llmserve {

// Tokens whose states are kept at most: of the largest step, and the newest of each sequence.
int64_t num_kept_states(const EngineConfig& config);
// Of those states.
int64_t kept_state_bytes(const HeadConfig& head, const EngineConfig& config);

// What config.draft of an engine says of a head: where it is read from, and its kind.
struct HeadSource {
  HeadKind kind;
  const EngineConfig& config;  // outlives the head
};

class LocalHead {
 public:
  // work(rank) on each of this process's ranks' threads; nothing is exchanged.
  using OnEachRank = std::function<void(const std::function<void(int rank)>& work)>;

  // Loads this process's share of the head for the workers of its target, which outlive it, in
  // their order. Of several stages the last one has it, of which one rank or more is here. Throws
  // what read_head_config and loading throw.
  LocalHead(const HeadSource& source, std::vector<const Worker*> workers, OnEachRank on_each_rank);

  const HeadConfig& config() const { return ranks_[0]->head().config(); }
  Backend& backend() const { return workers_[0]->backend(); }
  HeadRank& first() const { return *ranks_[0]; }
  // Of the target, increasing, each once.
  const std::vector<int32_t>& wanted_layers() const { return wanted_layers_; }
  int64_t num_kept() const { return num_kept_states(config_); }
  // As HeadModel has it.
  void keep(const Tensor& states, std::span<const int32_t> kept);

  // A step is laid out once, and run on each rank's thread; other stages' do nothing. take: called
  // on rank 0 of the target.
  void lay_out(const HeadStep& step);
  void run(int rank, const HeadStep& step, const HeadRank::TakeLogits& take);
  // Throws CorruptFile once a file that weights are read from in place was cut short.
  void check_files() const;

  MemoryUse memory_use() const;
  void release(MemoryPart part);
  void restore(MemoryPart part);

 private:
  Checkpoint open() const;
  void load();
  void on_each_head(const std::function<void(HeadRank& rank)>& work);
  void keep_on(size_t rank, const Tensor& states, int64_t num_tokens);

  const HeadKind kind_;
  const EngineConfig& config_;
  const std::vector<const Worker*> workers_;  // of the last stage
  const OnEachRank on_each_rank_;
  std::vector<std::unique_ptr<HeadRank>> ranks_;
  // Of the files that its weights came from, of which some are read in place.
  std::vector<std::shared_ptr<const ReadState>> files_;
  std::vector<int32_t> wanted_layers_;
  std::vector<int64_t> state_places_;  // of the head's layers among them
  // [num_kept, head's layers, E of the target] f32: one that a host's ranks read, or one on each
  // rank's device.
  std::vector<Buffer> kept_;
  bool is_in_order_ = false;         // they are 0, 1, 2 …
  std::vector<int64_t> kept_slots_;  // [head's layers, T] of rows in it
  // A step's arrays.
  std::vector<int32_t> query_starts_;
  std::vector<int32_t> kv_lens_;
  std::vector<int32_t> block_tables_;
  std::vector<int64_t> slots_;
  std::vector<KvGroupInput> kv_groups_;
  std::vector<std::pair<int32_t, int32_t>> copies_;
  std::vector<float> no_embedding_;  // [H] zeros, or none
  std::vector<GivenRows> given_;
  ModelInput input_;
};

}  // namespace llmserve
