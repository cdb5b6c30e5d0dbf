// One rank of a model: what computes. StepRunner says what, and draws from the logits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "api/engine_config.h"
#include "api/engine_metrics.h"
#include "comm/single_communicator.h"
#include "core/arena.h"
#include "engine/batch_builder.h"
#include "engine/executor.h"
#include "engine/expert_loads.h"
#include "engine/half_batches.h"
#include "engine/kv_storage.h"
#include "engine/loaded_model.h"
#include "engine/worker_plan.h"
#include "kernels/device_copies.h"
#include "layers/expert_balancer.h"
#include "models/model.h"

namespace llmserve {

// Where a step's outputs go. The calls come in this order, on the worker's thread. The tensors are
// the worker's, in the memory of its backend, and are valid during the call. What a call throws
// ends the step.
class StepSink {
 public:
  virtual ~StepSink() = default;

  // hidden [T, E] f32: the final-normed hidden states of all tokens. Once.
  virtual void take_hidden(const ConstTensor& hidden) = 0;
  // logits [rows.count, V] f32 of a prompt's tokens: batch.pooled_rows in order, each in parts.
  virtual void take_pooled_logits(const ConstTensor& logits, const PooledRows& rows) = 0;
  // logits [n, V] f32 of the rows [begin, begin + n) of input.logit_rows, in order.
  virtual void take_logits(const ConstTensor& logits, size_t begin) = 0;
};

// What a worker exchanges through.
struct RankEnds {
  std::unique_ptr<Communicator> tensor_ranks;  // the ranks of its stage
  std::unique_ptr<Communicator> stages;        // those of other stages that have its place there
  // The ranks of its stage again, for the second halves of steps; null: steps have none.
  std::unique_ptr<Communicator> second_half;

  // Nobody else.
  static RankEnds alone() {
    return {std::make_unique<SingleCommunicator>(), std::make_unique<SingleCommunicator>(), {}};
  }
};

// A worker owns a backend with its threads, the rank's weights, its part of the KV cache and the
// arena of a step's activations. All calls come from one thread, which is the rank's. Each may
// throw; the worker can then be used for other steps, and what the failed one stored is undefined.
class Worker {
 public:
  // Loads the share of rank `rank` of the weights of `checkpoint`, which is config.model_path,
  // opened. restore() opens it anew. It computes on `backend`, which another worker of the same
  // thread may use, too; null: its own. shared: where other replicas find the same weights; null:
  // there is one. kv_rows: what ranks that keep one KV cache keep it in; null: it has its own.
  // Throws what read_model_config and load_model throw, and ResourceExhausted.
  Worker(const EngineConfig& config, const Checkpoint& checkpoint, int rank = 0,
         std::shared_ptr<Backend> backend = nullptr, std::shared_ptr<SharedModels> shared = nullptr,
         std::shared_ptr<SharedKvRows> kv_rows = nullptr);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Before the first run() among several ranks: what it exchanges through from now on.
  void join(RankEnds ends) { ends_ = std::move(ends); }
  // Its exchanges are logged from now on, while the log is there.
  void log_exchanges(ExchangeLog& log) { log_ = &log; }
  // Ends what the ranks are exchanging. Any thread may call it while run() is under way.
  void abort_exchanges() noexcept;
  // Throws DeviceError once they have failed. Any thread, likewise.
  void check_exchanges() const {
    ends_.tensor_ranks->check();
    ends_.stages->check();
  }
  // Of the largest tensor that it gathers with others.
  int64_t staging_bytes() const { return staging_bytes_; }
  // Counts with another worker, of another stage.
  void share_expert_loads(const Worker& other);

  // Its experts run as the balancer of its stage's ranks says, from now on.
  void balance_by(std::shared_ptr<ExpertBalancer> balancer) {
    routes_ = std::make_unique<RankRoutes>(std::move(balancer), tensor_rank(config_, rank_).rank);
  }
  // Of a device: where the balancer has them. Nothing is under way there.
  void find_experts() { routes_->bring_homes(backend_->memory()); }
  // Likewise, after all ranks of the stage have moved these, which it waits for (expert_moves.h).
  void move_experts(std::span<const ExpertBalancer::Moves> moves, int64_t staging_bytes);

  // Before run(): copies the batch's blocks, and has the pages at hand that the step writes to.
  // Ranks that keep one KV cache wait until all copies are done.
  void prepare(const StepBatch& batch);
  // Runs the layers and computes the logits that are wanted. Among several ranks each of the last
  // stage has the hidden states, and rank 0 the logits; the sink is called on rank 0 alone. It asks
  // the device for the same work whenever two batches differ in numbers alone, so that a device may
  // record it. Throws CorruptFile once a file that weights are read from in place was cut short.
  void run(const StepBatch& batch, StepSink& sink);
  // The same in two parts, of which a device may record the first: it returns the final-normed
  // states. They are where they were when it was asked for, until the next step. The second is for
  // rows that have a sample task, and not for those that fill the batch up.
  Tensor run_layers(const StepBatch& batch);
  void run_behind(const StepBatch& batch, const Tensor& hidden, StepSink& sink);

  // [L, T, E] f32 in the backend's memory: the states of the last run's input.wanted_layers, at
  // most config.max_wanted_layers; before the last stage, of those up to its own. Valid until the
  // next one.
  const Tensor& layer_states() const { return layer_states_; }

  // Background work, as Executor has it: packs a weight; has the next blocks' pages at hand.
  bool pack_weight();
  bool reserve_blocks();
  // As Executor has them.
  void release(MemoryPart part);
  void restore(MemoryPart part);

  // Precondition: its KV cache is not given back.
  const KvStorage& kv_storage() const { return *kv_storage_; }
  int64_t first_kv_head() const { return first_kv_head_; }  // of those that it keeps
  // [layers of the model] where one rank of one stage would keep the layer's rows; and where this
  // one does, of another stage's layer nowhere.
  std::span<const KvPlace> kv_places() const { return kv_places_; }
  std::span<const KvPlace> own_kv_places() const { return cache_.places; }

  // Before copies(), where it computes on a device: for others who read and write its KV cache
  // beside the steps. Throws DeviceError, ResourceExhausted.
  void open_copies();
  // Of what its backend's memory has of the KV cache; null: that is the host's.
  DeviceCopies* copies() const { return copies_.get(); }
  // With open copies, after each run(), on its thread: `step` as DeviceCopies::mark has it.
  void end_step(int64_t step) const {
    if (copies_) copies_->mark(step);
  }

  Backend& backend() const { return *backend_; }
  // Precondition: its weights are not given back.
  const Model& model() const { return *loaded_->model; }
  const std::shared_ptr<Backend>& shared_backend() const { return backend_; }
  const EngineConfig& config() const { return config_; }
  // That its backend keeps for its largest step, and that others on it use, too.
  int64_t scratch_bytes() const { return scratch_bytes_; }
  DeviceSteps* steps() const { return steps_; }  // the backend's, or null
  // What it exchanges through; valid until the next join().
  Communicator& tensor_ranks() const { return *ends_.tensor_ranks; }
  // What stood in for config.json when the weights were last loaded; empty: nothing did.
  const std::string& config_text() const { return config_text_; }
  int64_t vocab_size() const { return vocab_size_; }
  int64_t hidden_size() const { return hidden_size_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }
  // "LlamaForCausalLM float32 on cpu/avx2, 2 threads"
  std::string description() const;
  // Of the last load: what was not as it should be, and did no harm.
  std::string warning() const { return loaded_ ? loaded_->warning : std::string(); }
  MemoryUse memory_use() const;
  // As Executor has it.
  const std::shared_ptr<ExpertLoads>& expert_loads() const { return expert_loads_; }
  // Of the load and of recorded steps.
  void fill_metrics(EngineMetrics& metrics) const;

 private:
  std::shared_ptr<const LoadedModel> load(const Checkpoint& checkpoint);
  std::shared_ptr<const LoadedModel> read(const Checkpoint& checkpoint);
  void load_weights();
  void check_shapes(const Model& model) const;
  void lay_out_layer_states(const ModelInput& input);
  void make_workspace();
  Tensor forward(const ForwardContext& context, int64_t second_half);
  template <class Work>
  void run_in_context(const StepBatch& batch, const Work& work);
  Tensor run_layers(const ForwardContext& context, const StepBatch& batch);
  void compute_outputs(const ForwardContext& context, const StepBatch& batch, const Tensor& hidden,
                       std::span<const int32_t> rows, StepSink& sink);
  // Of ranks that keep one KV cache each stores its share of the step's tokens.
  void take_own_slots(ModelInput& input);
  void check_files() const;
  // Of several replicas, the one that has loaded them.
  bool counts_weights() const { return loaded_->replica == config_.parallel.replica; }
  void compute_pooled_logits(const ForwardContext& context, const ConstTensor& hidden,
                             const PooledRows& pooled, StepSink& sink);

  const EngineConfig config_;
  const int rank_;
  const std::shared_ptr<Backend> backend_;
  const std::shared_ptr<SharedModels> shared_;   // null: no other replica has its weights
  const std::shared_ptr<SharedKvRows> kv_rows_;  // null: it keeps its own
  std::shared_ptr<const LoadedModel> loaded_;    // null while the weights are given back
  std::vector<DeferredWeight> deferred_;         // of the model, the next to be packed at the back
  std::string config_text_;                      // of the last load: what stands in for config.json
  std::unique_ptr<Arena> arena_;                 // likewise
  std::unique_ptr<KvStorage> kv_storage_;        // null while the KV cache is
  std::unique_ptr<DeviceCopies> copies_;         // of any KV cache that it has, or null
  LayerRange layers_;                            // of its stage
  RankCache cache_;                              // as this rank keeps it
  int64_t first_kv_head_ = 0;                    // of those that it keeps
  int64_t num_used_blocks_ = 0;                  // of it: behind them none was ever written to
  // Of the model as it was first loaded.
  int64_t vocab_size_ = 0;
  int64_t hidden_size_ = 0;
  int64_t workspace_bytes_ = 0;
  int64_t scratch_bytes_ = 0;  // that the backend reserved for it, and keeps
  int64_t staging_bytes_ = 0;  // that its communicator keeps
  std::vector<KvPlace> kv_places_;
  DeviceSteps* const steps_;
  SingleCommunicator alone_;
  RankEnds ends_ = RankEnds::alone();
  ExchangeLog* log_ = nullptr;
  std::unique_ptr<HalfBatches> halves_;  // null: no step runs in halves, or the weights are gone
  std::shared_ptr<ExpertLoads> expert_loads_;  // or null
  std::unique_ptr<RankRoutes> routes_;         // null: experts run where their weights are
  Buffer layer_state_buffer_;                  // of as many as the config allows
  Tensor layer_states_;
  std::vector<int32_t> pooled_tokens_;  // whose logits are computed
  std::vector<int64_t> own_slots_;      // [groups, T] -1: another rank stores the token
  std::vector<KvGroupInput> own_groups_;
};

}  // namespace llmserve
