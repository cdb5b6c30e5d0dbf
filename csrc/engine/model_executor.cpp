#include "engine/model_executor.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/trace_range.h"
#include "io/checkpoint.h"
#include "io/packed_cache.h"
#include "kernels/device_steps.h"

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
  return config.defer_packing.value_or(num_bytes >= kMinDeferredBytes);
}

int64_t workspace_bytes(const Model& model, const EngineConfig& config) {
  return model.workspace_bytes(config.scheduler.max_num_batched_tokens, kMaxLogitRowsAtOnce);
}

}  // namespace

MemoryPart parse_memory_part(std::string_view name) {
  if (name == "weights") return MemoryPart::kWeights;
  if (name == "kv_cache") return MemoryPart::kKvCache;
  throw InvalidArgument(concat("tags must be of 'weights' and 'kv_cache', got '", name, "'"));
}

StepShape largest_step(const ModelConfig& model, const WeightReport& weights,
                       const EngineConfig& config) {
  const SchedulerConfig& scheduler = config.scheduler;
  const int64_t block_size = config.cache.block_size;
  const int64_t max_blocks = (scheduler.max_model_len + block_size - 1) / block_size;
  StepShape shape = step_shape(model, weights, scheduler.max_num_batched_tokens);
  shape.weight_dtype = config.dtype;
  shape.cache_dtype = config.kv_cache_dtype;
  shape.max_sequences = scheduler.max_num_seqs;
  shape.max_context = max_blocks * block_size;
  shape.max_logit_rows = kMaxLogitRowsAtOnce;
  // Each token may have logits: those of prompts are asked for, too.
  shape.block_bytes = BatchBuilder(block_size, config.cache.windows.size())
                          .num_bytes({.num_tokens = shape.max_tokens,
                                      .num_sequences = shape.max_sequences,
                                      .num_rows = shape.max_tokens,
                                      .max_blocks = max_blocks});
  return shape;
}

std::string packed_variant(const EngineConfig& config, const Backend& backend) {
  return concat(config.quantization.empty() ? "" : config.quantization + " of ", name(config.dtype),
                " in ", backend.packed_layout());
}

ModelExecutor::ModelExecutor(const EngineConfig& config)
    : config_(config),
      backend_(make_backend(config.device, {.num_threads = config.num_threads})),
      steps_(backend_->steps()),
      limits_{.max_num_seqs = config_.scheduler.max_num_seqs,
              .max_model_len = config_.scheduler.max_model_len,
              .block_size = config_.cache.block_size},
      batch_builder_(config.cache.block_size, config.cache.windows.size()),
      sampler_(*backend_),
      pooler_(backend_->memory(), kMaxLogitRowsAtOnce) {
  model_ = load();
  vocab_size_ = model_->config().vocab_size;
  hidden_size_ = model_->config().hidden_size;
  masks_ = std::make_unique<MaskFiller>(vocab_size_);
  workspace_bytes_ = workspace_bytes(*model_, config_);
  kv_layers_.assign(model_->kv_layers().begin(), model_->kv_layers().end());
  check_internal(model_->config().kv_windows == config_.cache.windows,
                 "the plan's cache groups are the model's");
  arena_ = std::make_unique<Arena>(workspace_bytes_, backend_->memory());
  restore(MemoryPart::kKvCache);
  const StepShape shape = largest_step(model_->config(), model_->weights(), config_);
  backend_->reserve_scratch(shape);
  scratch_bytes_ = backend_->scratch_bytes(shape, config_.num_threads);
}

void ModelExecutor::release(MemoryPart part) {
  if (steps_ != nullptr) steps_->forget_recorded();
  if (part == MemoryPart::kKvCache) {
    kv_storage_.reset();
    num_used_blocks_ = 0;
  } else {
    deferred_.clear();
    model_.reset();
    arena_.reset();
  }
}

void ModelExecutor::restore(MemoryPart part) {
  if (part == MemoryPart::kWeights) {
    if (!model_) load_weights();
  } else if (!kv_storage_) {
    kv_storage_ =
        std::make_unique<KvStorage>(kv_layers_, config_.cache.num_blocks, config_.cache.block_size,
                                    config_.kv_cache_dtype, *backend_);
  }
}

std::unique_ptr<Model> ModelExecutor::load() {
  const Checkpoint checkpoint = open_checkpoint(config_.model_path);
  const ModelConfig model_config =
      read_model_config(checkpoint.config(), config_.scheduler.max_model_len);
  const WeightFormat format = resolve_weight_format(config_.dtype, config_.quantization);
  if (config_.packed_cache.max_bytes == 0) {
    deferred_.clear();  // of a load that failed
    const bool is_deferred = packs_later(config_, checkpoint);
    std::unique_ptr<Model> model = load_model(checkpoint, model_config, *backend_, format, nullptr,
                                              is_deferred ? &deferred_ : nullptr);
    std::ranges::reverse(deferred_);  // in the order of their use
    return model;
  }

  const auto run = [&](int64_t count, const std::function<void(int64_t, int64_t)>& work) {
    backend_->run_on_host_threads(count, 1, work);
  };
  const PackedCache cache(config_.packed_cache.folder, config_.packed_cache.max_bytes);
  const PackedKey key = packed_key(checkpoint, packed_variant(config_, *backend_));
  warning_.clear();
  PackedWeights packed{.file = cache.find(key, run, warning_)};
  std::unique_ptr<Model> model = load_model(checkpoint, model_config, *backend_, format, &packed);
  if (!packed.is_from_file) cache.store(key, packed.tensors, run, warning_);
  return model;
}

void ModelExecutor::load_weights() {
  std::unique_ptr<Model> model = load();
  check_shapes(*model);
  arena_ = std::make_unique<Arena>(workspace_bytes_, backend_->memory());
  model_ = std::move(model);
}

// What is sized for the old model has to fit the new one: pool, workspace, vocabulary.
void ModelExecutor::check_shapes(const Model& model) const {
  const bool is_same = model.config().vocab_size == vocab_size_ &&
                       model.config().hidden_size == hidden_size_ &&
                       workspace_bytes(model, config_) == workspace_bytes_ &&
                       std::ranges::equal(model.kv_layers(), kv_layers_);
  if (is_same) return;
  throw InvalidArgument(concat(config_.model_path,
                               " holds another model than when it was first loaded: the "
                               "vocabulary, the layers or their sizes differ; put the old one "
                               "back or make a new LLM"));
}

StepBatch& ModelExecutor::build(const StepPlan& plan, const BatchShape& shape) {
  const int64_t num_bytes = batch_builder_.num_bytes(shape);
  if (steps_ != nullptr)
    return batch_builder_.build(
        plan, shape, steps_->begin(num_bytes, std::ssize(plan.logit_rows), shape.num_rows));
  if (std::ssize(block_) < num_bytes) block_.resize(static_cast<size_t>(num_bytes));
  return batch_builder_.build(plan, shape, block_);
}

void ModelExecutor::launch(const StepPlan& plan) {
  const TraceRange range(plan.num_prefill_tokens > 0 ? "Prefill" : "Decode");
  std::optional<BatchShape> recorded;
  if (steps_ != nullptr && !config_.enforce_eager) recorded = recorded_shape(plan, limits_);
  StepBatch& batch = build(plan, recorded ? *recorded : batch_builder_.shape_of(plan));
  MaskFiller::Pending masks = masks_->begin(batch.sample_tasks);
  if (steps_ != nullptr) steps_->bring_over();
  Flight& flight =
      flights_[static_cast<size_t>((oldest_flight_ + num_in_flight_) % Scheduler::kMaxInFlight)];
  flight.sampled.clear();
  flight.num_rows = batch.sample_tasks.size();
  flight.only_draws.assign(flight.num_rows, true);
  if (flight.answered.size() < flight.num_rows) {
    flight.answered.resize(flight.num_rows);
    flight.filings.resize(flight.num_rows);
  }
  kv_storage_->copy_blocks(*backend_, batch.copies);
  if (backend_->memory().is_host()) {
    int64_t end = 0;
    for (const KvGroupInput& group : batch.input.kv_groups)
      for (const int64_t slot : group.slots) end = std::max(end, slot + 1);
    const int64_t block_size = config_.cache.block_size;
    const int64_t num_blocks = (end + block_size - 1) / block_size;
    if (num_blocks > num_used_blocks_) {
      kv_storage_->touch_all(*backend_, num_blocks);
      num_used_blocks_ = num_blocks;
    }
  }
  if (recorded) {
    steps_->run_recorded({recorded->num_rows, recorded->max_blocks}, [&] { run_recorded(batch); });
  } else {
    run(plan, batch, masks, flight);
  }
  if (steps_ != nullptr) flight.step = steps_->end();
  ++num_in_flight_;
}

void ModelExecutor::run(const StepPlan& plan, const StepBatch& batch, MaskFiller::Pending& masks,
                        Flight& flight) {
  const Arena::Scope scope(*arena_);
  const ForwardContext context{*backend_, *arena_, batch.input, kv_storage_->layers()};
  if (batch.has_awaited) steps_->take_awaited(batch.input.token_ids, batch.awaited_rows);
  const Tensor hidden = model_->forward(context);
  pooler_.take(context, *model_, hidden, plan);
  masks.finish();
  sample_rows(context, hidden, batch, flight);
}

// All that a plan of recorded_shape() needs, and nothing that differs from one to the next.
void ModelExecutor::run_recorded(const StepBatch& batch) {
  const Arena::Scope scope(*arena_);
  const ForwardContext context{*backend_, *arena_, batch.input, kv_storage_->layers()};
  steps_->take_awaited(batch.input.token_ids, batch.awaited_rows);
  const Tensor hidden = model_->forward(context);
  const std::span<const int32_t> rows = batch.input.logit_rows;
  for (size_t begin = 0; begin < rows.size(); begin += kMaxLogitRowsAtOnce) {
    const size_t count = std::min<size_t>(kMaxLogitRowsAtOnce, rows.size() - begin);
    const Arena::Scope logits_scope(*arena_);
    steps_->draw(model_->compute_logits(context, hidden, rows.subspan(begin, count)),
                 batch.settings.subspan(begin, count), static_cast<int64_t>(begin));
  }
}

const SampledTokens& ModelExecutor::wait() {
  Flight& flight = flights_[static_cast<size_t>(oldest_flight_)];
  oldest_flight_ = (oldest_flight_ + 1) % Scheduler::kMaxInFlight;
  --num_in_flight_;
  std::swap(sampled_, flight.sampled);
  if (steps_ == nullptr) return sampled_;
  const std::span<const DrawnRow> drawn = steps_->wait(flight.step);
  for (size_t row = 0; row < flight.num_rows; ++row) {
    if (flight.only_draws[row]) {
      sampled_.rows.push_back(
          {.token_id = drawn[row].token_id, .is_valid = drawn[row].is_valid != 0});
    } else {
      Sampler::file(flight.answered[row], flight.filings[row], sampled_);
    }
  }
  return sampled_;
}

bool ModelExecutor::do_chore() {
  if (deferred_.empty()) return false;
  deferred_.back().pack(*backend_);
  deferred_.pop_back();
  return !deferred_.empty();
}

bool ModelExecutor::do_idle_chore() {
  if (num_used_blocks_ == 0 || kv_storage_->num_bytes() == 0) return false;
  const int64_t num_blocks = config_.cache.num_blocks;
  const int64_t block_bytes = kv_storage_->num_bytes() / num_blocks;
  const int64_t reserve = std::min(num_used_blocks_, kMaxReserveBytes / block_bytes);
  return kv_storage_->touch(*backend_, std::min(num_blocks, num_used_blocks_ + reserve));
}

void ModelExecutor::abandon() noexcept {
  num_in_flight_ = 0;
  if (steps_ != nullptr) steps_->abandon();
}

void ModelExecutor::sample_rows(const ForwardContext& context, const Tensor& hidden,
                                const StepBatch& batch, Flight& flight) {
  const std::span<const int32_t> tokens = batch.input.logit_rows;
  const std::span<const SampleTask> tasks = batch.sample_tasks;
  for (size_t begin = 0; begin < tokens.size(); begin += kMaxLogitRowsAtOnce) {
    const size_t count = std::min<size_t>(kMaxLogitRowsAtOnce, tokens.size() - begin);
    const Arena::Scope scope(*arena_);
    const Tensor logits = model_->compute_logits(context, hidden, tokens.subspan(begin, count));
    if (steps_ != nullptr) {
      draw_rows(logits, batch, begin, flight);
    } else {
      sampler_.sample(logits, tasks.subspan(begin, count), flight.sampled);
    }
  }
}

// All are drawn on the device, and nobody waits for them here, but for the logits of those that
// have logits processors.
void ModelExecutor::draw_rows(const Tensor& logits, const StepBatch& batch, size_t begin,
                              Flight& flight) {
  const size_t count = static_cast<size_t>(logits.shape[0]);
  const auto tasks = std::span(batch.sample_tasks).subspan(begin, count);
  if (std::ranges::any_of(tasks, &SampleTask::only_draws))
    steps_->draw(logits, batch.settings.subspan(begin, count), static_cast<int64_t>(begin));
  for (size_t i = 0, end = 0; i < count; i = end) {
    const bool only_draws = tasks[i].only_draws;
    while (end < count && tasks[end].only_draws == only_draws) ++end;
    if (only_draws) continue;
    const Tensor rows = logits.slice(0, static_cast<int64_t>(i), static_cast<int64_t>(end - i));
    sample_on_device(rows, batch, begin + i, flight);
  }
}

// Rows [begin, begin + S') of the step.
void ModelExecutor::sample_on_device(const Tensor& logits, const StepBatch& batch, size_t begin,
                                     Flight& flight) {
  const size_t count = static_cast<size_t>(logits.shape[0]);
  const auto tasks = std::span(batch.sample_tasks).subspan(begin, count);
  std::fill_n(flight.only_draws.begin() + static_cast<int64_t>(begin), count, false);
  late_tokens_.clear();
  for (const SampleTask& task : tasks)
    late_tokens_.push_back(task.params->has_penalties() ? task.late_token : -1);
  const SampleArgs args{
      .logits = logits,
      .rows = sampler_.ask(logits, tasks, std::span(flight.filings).subspan(begin, count)),
      .out = std::span(flight.answered).subspan(begin, count)};
  steps_->sample(args, static_cast<int64_t>(begin),
                 {.token_ids = batch.input.token_ids, .indices = late_tokens_});
}

void ModelExecutor::check_idle() const {
  check_internal(sampler_.num_slots() == 0, "the sampler keeps nothing of an ended sequence");
  check_internal(masks_->num_matchers() == 0, "no matcher is kept of an ended sequence");
}

std::string ModelExecutor::description() const {
  std::string kept;
  for (const LinearFormat* format : model_->weights().integers)
    kept += concat(format->name, " and ");
  return concat(model_->config().architecture, " ", kept, name(config_.dtype), " on ",
                backend_->description());
}

void ModelExecutor::fill_metrics(EngineMetrics& metrics) const {
  if (model_) {
    metrics.weight_read_us = model_->weights().read_us;
    metrics.weight_pack_us = model_->weights().pack_us;
  }
  if (steps_ == nullptr) return;
  const RecordCounts counts = steps_->record_counts();
  metrics.num_graph_captures = counts.num_captures;
  metrics.num_graph_replays = counts.num_replays;
}

MemoryUse ModelExecutor::memory_use() const {
  int64_t deferred_bytes = 0;
  for (const DeferredWeight& weight : deferred_) deferred_bytes += weight.num_bytes();
  const PoolUse pool = steps_ != nullptr ? steps_->pool_use() : PoolUse();
  return {.weight_bytes = model_ ? model_->weights().total_bytes() : 0,
          .mapped_bytes = (model_ ? model_->weights().mapped_bytes : 0) + deferred_bytes,
          .workspace_bytes = (arena_ ? arena_->capacity_bytes() : 0) + scratch_bytes_,
          .kv_cache_bytes = kv_storage_ ? kv_storage_->num_bytes() : 0,
          .pool_used_bytes = pool.used_bytes,
          .pool_used_high_bytes = pool.used_high_bytes,
          .pool_reserved_bytes = pool.reserved_bytes,
          .pool_reserved_high_bytes = pool.reserved_high_bytes,
          .graph_bytes = steps_ != nullptr ? steps_->record_counts().kept_bytes : 0};
}

}  // namespace llmserve
