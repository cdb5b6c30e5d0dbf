#include "engine/worker.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "engine/expert_moves.h"
#include "engine/rank_devices.h"
#include "io/checkpoint.h"
#include "io/packed_cache.h"
#include "kernels/cuda_loader.h"
#include "kernels/device_steps.h"
#include "layers/rank_cut.h"
#include "models/config_reader.h"
#include "models/model_loader.h"

namespace llmserve {
namespace {

// Less than this is packed in a tenth of a second.
constexpr int64_t kMinDeferredBytes = 512 << 20;
// Of the KV cache, had at hand beyond what was ever used: as much again, and no more than this, ten
// prompts of a model whose tokens take 0.1 MiB.
constexpr int64_t kMaxReserveBytes = 512 << 20;

bool packs_later(const EngineConfig& config, const Checkpoint& checkpoint) {
  int64_t num_bytes = 0;
  for (const TensorEntry& entry : checkpoint.tensors()) num_bytes += entry.num_bytes;
  // While steps are in flight in several stages, nobody has time between two of them.
  return config.parallel.pipeline == 1 &&
         config.defer_packing.value_or(num_bytes >= kMinDeferredBytes);
}

int64_t step_workspace_bytes(const Model& model, const EngineConfig& config) {
  return model.workspace_bytes(config.scheduler.max_num_batched_tokens, kMaxLogitRowsAtOnce);
}

}  // namespace

Worker::Worker(const EngineConfig& config, const Checkpoint& checkpoint, int rank,
               std::shared_ptr<Backend> backend, std::shared_ptr<SharedModels> shared,
               std::shared_ptr<SharedKvRows> kv_rows)
    : config_(config),
      rank_(rank),
      backend_(backend ? std::move(backend) : make_rank_backend(config, rank)),
      shared_(std::move(shared)),
      kv_rows_(std::move(kv_rows)),
      steps_(backend_->steps()) {
  loaded_ = load(checkpoint);
  vocab_size_ = model().config().vocab_size;
  hidden_size_ = model().config().hidden_size;
  workspace_bytes_ = step_workspace_bytes(model(), config_);
  expert_loads_ = make_expert_loads(model().config());
  if (expert_loads_ && steps_ != nullptr) expert_loads_->join_device(steps_, layers_);
  kv_places_.assign(model().kv_places().begin(), model().kv_places().end());
  check_internal(std::ranges::equal(model().cache_groups(), config_.cache.groups),
                 "the plan's cache groups are the model's");
  cache_ = rank_cache(model().config(), tensor_rank(config_, rank_), layers_);
  if (row_groups(cache_.groups).size() > 0 &&
      cache_.groups.front().num_kv_heads < model().config().cache_groups.front().num_kv_heads)
    first_kv_head_ = HeadCut(tensor_rank(config_, rank_), model().config().num_heads,
                             model().config().num_kv_heads)
                         .first_kv_head;
  if (const int64_t num_bytes = layer_state_bytes(model().config(), config_); num_bytes > 0)
    layer_state_buffer_ = Buffer(num_bytes, backend_->memory());
  make_workspace();
  restore(MemoryPart::kKvCache);
  const StepShape shape = largest_step(model().config(), model().weights(), config_);
  backend_->reserve_scratch(shape);
  scratch_bytes_ = backend_->scratch_bytes(shape, thread_share(config_, rank_).count);
  staging_bytes_ = gathered_bytes(config_, shape);
}

// Others may still read what was counted.
Worker::~Worker() {
  if (expert_loads_) expert_loads_->leave_device(steps_);
}

void Worker::share_expert_loads(const Worker& other) {
  if (expert_loads_ == other.expert_loads_) return;
  if (steps_ != nullptr) expert_loads_->leave_device(steps_);
  expert_loads_ = other.expert_loads_;
  if (steps_ != nullptr) expert_loads_->join_device(steps_, layers_);
}

void Worker::release(MemoryPart part) {
  if (steps_ != nullptr) steps_->forget_recorded();
  if (part == MemoryPart::kKvCache) {
    kv_storage_.reset();
    num_used_blocks_ = 0;
  } else {
    deferred_.clear();
    loaded_.reset();
    arena_.reset();
    halves_.reset();
  }
}

void Worker::restore(MemoryPart part) {
  if (part == MemoryPart::kWeights) {
    if (!loaded_) load_weights();
  } else if (!kv_storage_) {
    kv_storage_ = std::make_unique<KvStorage>(
        cache_.groups, cache_.places,
        KvStorage::Shape{.num_blocks = config_.cache.num_blocks,
                         .block_size = config_.cache.block_size,
                         .dtype = config_.kv_cache_dtype,
                         .num_state_slots = config_.cache.num_state_slots},
        *backend_, KvSharing{.rows = kv_rows_, .rank = context_rank(config_, rank_)});
  }
}

std::shared_ptr<const LoadedModel> Worker::load(const Checkpoint& checkpoint) {
  config_text_ = checkpoint.config_text();
  if (config_.parallel.pipeline > 1) {
    const ModelConfig model_config =
        read_model_config(checkpoint.config(), config_.scheduler.max_model_len);
    layers_ = split_layers(config_, checkpoint, model_config,
                           *backend_)[static_cast<size_t>(stage_of(config_, rank_))];
  }
  return shared_ ? shared_->get(rank_, [&] { return read(checkpoint); }) : read(checkpoint);
}

// What several replicas compute with is not packed later, under the eyes of the others.
std::shared_ptr<const LoadedModel> Worker::read(const Checkpoint& checkpoint) {
  const ModelConfig model_config =
      read_model_config(checkpoint.config(), config_.scheduler.max_model_len);
  const WeightFormat format = resolve_weight_format(config_.dtype, config_.quantization);
  const TensorRank rank = tensor_rank(config_, rank_);
  auto loaded = std::make_shared<LoadedModel>();
  loaded->replica = config_.parallel.replica;
  for (const auto& file : checkpoint.files()) loaded->files.push_back(file->read_state());
  if (config_.packed_cache.max_bytes == 0) {
    deferred_.clear();  // of a load that failed
    const bool is_deferred = !shared_ && packs_later(config_, checkpoint);
    loaded->model = load_model(checkpoint, model_config, *backend_, format, nullptr,
                               is_deferred ? &deferred_ : nullptr, rank, layers_);
    std::ranges::reverse(deferred_);  // in the order of their use
    loaded->warning = describe_unused(checkpoint, loaded->model->weights());
  } else {
    const auto run = [&](int64_t count, const std::function<void(int64_t, int64_t)>& work) {
      backend_->run_on_host_threads(count, 1, work);
    };
    const PackedCache cache(config_.packed_cache.folder, config_.packed_cache.max_bytes);
    const PackedKey key =
        packed_key(checkpoint, packed_variant(config_, *backend_, checkpoint, rank_, layers_));
    PackedWeights packed{.file = cache.find(key, run, loaded->warning)};
    if (packed.file) loaded->files.push_back(packed.file->file()->read_state());
    loaded->model =
        load_model(checkpoint, model_config, *backend_, format, &packed, nullptr, rank, layers_);
    if (!packed.is_from_file) cache.store(key, packed.tensors, run, loaded->warning);
  }
  for (const std::string& note : loaded->model->weights().notes)
    loaded->warning += concat(loaded->warning.empty() ? "" : "; ", note);
  return loaded;
}

void Worker::load_weights() {
  std::shared_ptr<const LoadedModel> loaded =
      load(open_checkpoint(config_.model_path, config_text_));
  check_shapes(*loaded->model);
  loaded_ = std::move(loaded);
  make_workspace();
}

// What is sized for the old model has to fit the new one: pool, workspace, vocabulary.
void Worker::check_shapes(const Model& model) const {
  const bool is_same = model.config().vocab_size == vocab_size_ &&
                       model.config().hidden_size == hidden_size_ &&
                       step_workspace_bytes(model, config_) == workspace_bytes_ &&
                       std::ranges::equal(model.cache_groups(), config_.cache.groups) &&
                       std::ranges::equal(model.kv_places(), kv_places_);
  if (is_same) return;
  throw InvalidArgument(concat(config_.model_path,
                               " holds another model than when it was first loaded: the "
                               "vocabulary, the layers or their sizes differ; put the old one "
                               "back or make a new LLM"));
}

void Worker::prepare(const StepBatch& batch) {
  lay_out_layer_states(batch.input);  // for a step that was recorded, too
  if (!kv_rows_ || context_rank(config_, rank_) == 0)
    kv_storage_->copy_blocks(*backend_, batch.copies);
  if (kv_rows_ && !batch.copies.empty()) ends_.tensor_ranks->barrier();
  if (!backend_->memory().is_host()) return;
  int64_t end = 0;
  for (const KvGroupInput& group : batch.input.kv_groups)
    for (const int64_t slot : group.slots) end = std::max(end, slot + 1);
  const int64_t block_size = config_.cache.block_size;
  const int64_t num_blocks = (end + block_size - 1) / block_size;
  if (num_blocks <= num_used_blocks_) return;
  kv_storage_->touch_all(*backend_, num_blocks);
  num_used_blocks_ = num_blocks;
}

void Worker::lay_out_layer_states(const ModelInput& input) {
  const int64_t num_layers = std::ssize(input.wanted_layers);
  if (num_layers > config_.max_wanted_layers)
    throw InvalidArgument(concat(
        "a step wants the states of ", num_layers,
        " layers, and memory was planned for max_wanted_layers=", config_.max_wanted_layers));
  layer_states_ = Tensor(layer_state_buffer_.data(), DType::kF32,
                         {num_layers, std::ssize(input.wanted_tokens), hidden_size_});
}

void Worker::make_workspace() {
  arena_ = std::make_unique<Arena>(workspace_bytes_, backend_->memory());
  if (!config_.parallel.has_halves()) return;
  const int64_t most = first_half_of(config_.scheduler.max_num_batched_tokens);
  halves_ = std::make_unique<HalfBatches>(model().workspace_bytes(most, 1),
                                          thread_share(config_, rank_).first, backend_->memory());
}

void Worker::abort_exchanges() noexcept {
  for (const auto& end : {&ends_.tensor_ranks, &ends_.stages, &ends_.second_half})
    if (*end) (*end)->abort();
}

Tensor Worker::forward(const ForwardContext& context, int64_t second_half) {
  if (second_half == 0) return model().forward(context);
  check_internal(halves_ && ends_.second_half, "a step in halves has been planned for");
  return halves_->forward(model(), context, second_half, *ends_.tensor_ranks, *ends_.second_half,
                          log_);
}

void Worker::move_experts(std::span<const ExpertBalancer::Moves> moves, int64_t staging_bytes) {
  llmserve::move_experts(moves, model(), *ends_.tensor_ranks, rank_place(*backend_, 0).queue,
                         *arena_, staging_bytes);
  ends_.tensor_ranks->wait();
  find_experts();
}

void Worker::take_own_slots(ModelInput& input) {
  const int64_t count = input.num_tokens();
  const int64_t rank = context_rank(config_, rank_);
  const int64_t begin = count * rank / kv_rows_->num_ranks();
  const int64_t end = count * (rank + 1) / kv_rows_->num_ranks();
  own_slots_.assign(input.kv_groups.size() * static_cast<size_t>(count), -1);
  own_groups_.assign(input.kv_groups.begin(), input.kv_groups.end());
  for (size_t g = 0; g < own_groups_.size(); ++g) {
    const std::span<int64_t> slots =
        std::span(own_slots_).subspan(g * static_cast<size_t>(count), static_cast<size_t>(count));
    std::copy(own_groups_[g].slots.begin() + begin, own_groups_[g].slots.begin() + end,
              slots.begin() + begin);
    own_groups_[g].slots = slots;
  }
  input.kv_groups = own_groups_;
}

// Calls work(context) for the batch.
template <class Work>
void Worker::run_in_context(const StepBatch& batch, const Work& work) {
  ModelInput input = batch.input;
  if (kv_rows_) take_own_slots(input);
  const Arena::Scope scope(*arena_);
  LoggedExchanges logged(log_);
  WatchedCommunicator watched(*ends_.tensor_ranks, logged);
  WatchedCommunicator watched_stages(*ends_.stages, logged);
  // Others exchange in memory, too often to say so.
  const bool is_watched =
      log_ != nullptr || (steps_ != nullptr && config_.parallel.num_ranks() > 1);
  const ParallelGroups groups{
      .tp = is_watched ? static_cast<Communicator&>(watched) : *ends_.tensor_ranks,
      .pp = is_watched ? static_cast<Communicator&>(watched_stages) : *ends_.stages,
      .ep = alone_,
      .cp = alone_};
  RouteObserver* routes =
      expert_loads_ && expert_loads_->is_counting() ? expert_loads_.get() : nullptr;
  if (routes_) {
    routes_->show_to(routes);
    routes = routes_.get();
  }
  const ForwardContext context{.backend = *backend_,
                               .arena = *arena_,
                               .input = input,
                               .kv_caches = kv_storage_->layers(),
                               .groups = groups,
                               .layer_states = layer_states_,
                               .routes = routes};
  work(context);
}

void Worker::run(const StepBatch& batch, StepSink& sink) {
  run_in_context(batch, [&](const ForwardContext& context) {
    compute_outputs(context, batch, run_layers(context, batch), batch.input.logit_rows, sink);
  });
}

Tensor Worker::run_layers(const StepBatch& batch) {
  Tensor hidden;
  run_in_context(batch,
                 [&](const ForwardContext& context) { hidden = run_layers(context, batch); });
  return hidden;
}

void Worker::run_behind(const StepBatch& batch, const Tensor& hidden, StepSink& sink) {
  if (!layers_.is_last()) return;
  run_in_context(batch, [&](const ForwardContext& context) {
    // The states, and what lies before them, keep their place in the arena.
    const auto* begin = arena_->allocate(DType::kF32, {0}).as<std::byte>();
    const std::byte* end = hidden.as<std::byte>() + hidden.num_bytes();
    arena_->allocate(DType::kF32, {(end - begin) / size_bytes(DType::kF32)});
    compute_outputs(context, batch, hidden, batch.input.logit_rows.first(batch.sample_tasks.size()),
                    sink);
  });
}

Tensor Worker::run_layers(const ForwardContext& context, const StepBatch& batch) {
  if (batch.has_awaited) {
    if (rank_ == 0) steps_->take_awaited(batch.input.token_ids, batch.awaited_rows);
    if (ends_.tensor_ranks->world_size() > 1)
      context.groups.tp.broadcast(steps_->brought(batch.input.token_ids), 0);
  }
  const Tensor hidden = forward(context, batch.second_half);
  check_files();
  return hidden;
}

void Worker::compute_outputs(const ForwardContext& context, const StepBatch& batch,
                             const Tensor& hidden, std::span<const int32_t> rows, StepSink& sink) {
  if (!layers_.is_last()) return;
  if (rank_ == 0) sink.take_hidden(hidden);
  for (const PooledRows& pooled : batch.pooled_rows)
    compute_pooled_logits(context, hidden, pooled, sink);
  for (size_t begin = 0; begin < rows.size(); begin += kMaxLogitRowsAtOnce) {
    const size_t count = std::min<size_t>(kMaxLogitRowsAtOnce, rows.size() - begin);
    const Arena::Scope logits_scope(*arena_);
    const Tensor logits = model().compute_logits(context, hidden, rows.subspan(begin, count));
    check_files();
    if (rank_ == 0) sink.take_logits(logits, begin);
  }
}

void Worker::check_files() const {
  for (const auto& file : loaded_->files) file->check();
}

void Worker::compute_pooled_logits(const ForwardContext& context, const ConstTensor& hidden,
                                   const PooledRows& pooled, StepSink& sink) {
  for (int64_t done = 0; done < pooled.count; done += kMaxLogitRowsAtOnce) {
    const PooledRows part{.output = pooled.output,
                          .begin = pooled.begin + done,
                          .count = std::min(kMaxLogitRowsAtOnce, pooled.count - done),
                          .position = pooled.position + done};
    pooled_tokens_.resize(static_cast<size_t>(part.count));
    std::iota(pooled_tokens_.begin(), pooled_tokens_.end(), static_cast<int32_t>(part.begin));
    const Arena::Scope scope(*arena_);
    const Tensor logits = model().compute_logits(context, hidden, pooled_tokens_);
    check_files();
    if (rank_ == 0) sink.take_pooled_logits(logits, part);
  }
}

void Worker::open_copies() {
  if (copies_ || backend_->memory().is_host()) return;
  const int64_t block_bytes = config_.cache.block_size * num_lanes(cache_.groups) *
                              row_bytes(cache_.groups.front(), config_.kv_cache_dtype);
  copies_ = make_cuda_copies(*backend_, block_bytes);
}

bool Worker::pack_weight() {
  if (deferred_.empty()) return false;
  deferred_.back().pack(*backend_);
  deferred_.pop_back();
  return !deferred_.empty();
}

bool Worker::reserve_blocks() {
  if (num_used_blocks_ == 0 || kv_storage_->block_bytes() == 0) return false;
  const int64_t num_blocks = config_.cache.num_blocks;
  const int64_t reserve = std::min(num_used_blocks_, kMaxReserveBytes / kv_storage_->block_bytes());
  return kv_storage_->touch(*backend_, std::min(num_blocks, num_used_blocks_ + reserve));
}

std::string Worker::description() const {
  std::string kept;
  for (const LinearFormat* format : model().weights().integers)
    kept += concat(format->name, " and ");
  std::string quantized;
  for (const QuantizedUse& use : model().weights().quantized)
    quantized += concat("; ", use.num_weights, " weights of ", use.stored, " run ", use.runs);
  return concat(model().config().architecture, " ", kept, name(config_.dtype), " on ",
                backend_->description(), quantized);
}

void Worker::fill_metrics(EngineMetrics& metrics) const {
  if (loaded_ && counts_weights()) {
    metrics.weight_read_us = model().weights().read_us;
    metrics.weight_pack_us = model().weights().pack_us;
  }
  if (steps_ == nullptr) return;
  const RecordCounts counts = steps_->record_counts();
  metrics.num_graph_captures = counts.num_captures;
  metrics.num_graph_replays = counts.num_replays;
}

MemoryUse Worker::memory_use() const {
  int64_t deferred_bytes = 0;
  for (const DeferredWeight& weight : deferred_) deferred_bytes += weight.num_bytes();
  const PoolUse pool = steps_ != nullptr ? steps_->pool_use() : PoolUse();
  const WeightReport* const weights =
      loaded_ && counts_weights() ? &loaded_->model->weights() : nullptr;
  const int64_t half_bytes = halves_ ? halves_->num_bytes() : 0;
  return {.weight_bytes = weights != nullptr ? weights->total_bytes() : 0,
          .mapped_bytes = (weights != nullptr ? weights->mapped_bytes : 0) + deferred_bytes,
          .workspace_bytes = (arena_ ? arena_->capacity_bytes() : 0) + half_bytes + scratch_bytes_ +
                             staging_bytes_ + layer_state_buffer_.num_bytes(),
          .kv_cache_bytes = kv_storage_ ? kv_storage_->num_bytes() : 0,
          .pool_used_bytes = pool.used_bytes,
          .pool_used_high_bytes = pool.used_high_bytes,
          .pool_reserved_bytes = pool.reserved_bytes,
          .pool_reserved_high_bytes = pool.reserved_high_bytes,
          .graph_bytes = steps_ != nullptr ? steps_->record_counts().kept_bytes : 0};
}

}  // namespace llmserve
