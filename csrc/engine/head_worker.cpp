#include "engine/head_worker.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "engine/worker_plan.h"
#include "io/checkpoint.h"
#include "layers/weight_loader.h"
#include "models/draft_heads/registry.h"
#include "models/model_loader.h"

namespace llmserve {
namespace {

// Of a step of `max_rows`.
int64_t arena_bytes(const DraftHead& head, int64_t max_rows) {
  const HeadConfig& sizes = head.config();
  return Arena::footprint_bytes(DType::kF32, {max_rows, sizes.state_size()}) +
         Arena::footprint_bytes(DType::kF32, {max_rows, sizes.hidden_size()}) +
         head.workspace_bytes(max_rows, kMaxLogitRowsAtOnce);
}

}  // namespace

int64_t num_kept_states(const EngineConfig& config) {
  return int64_t{config.scheduler.max_num_batched_tokens} + config.scheduler.max_num_seqs;
}

int64_t head_workspace_bytes(const DraftHead& head, const EngineConfig& config) {
  const HeadConfig& sizes = head.config();
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  return arena_bytes(head, config.scheduler.max_num_batched_tokens) +
         num_kept_states(config) * sizes.state_size() * kFloat +
         config.scheduler.max_num_seqs * sizes.hidden_size() * kFloat +
         (sizes.target_tokens.empty() ? 0 : kMaxLogitRowsAtOnce * sizes.target_vocab_size * kFloat);
}

HeadWorker::HeadWorker(HeadKind kind, const EngineConfig& config, const Worker& target)
    : kind_(kind),
      config_(config),
      target_(target),
      backend_(target.backend()),
      sampler_(target.backend()) {
  if (target.steps() != nullptr)
    throw NotSupported(
        "speculative_config: heads run on a CPU; use device='cpu', or method 'ngram' or 'suffix'");
  load();
  const HeadConfig& head = head_->config();
  wanted_layers_ = head.target_layers;
  std::ranges::sort(wanted_layers_);
  wanted_layers_.erase(std::ranges::unique(wanted_layers_).begin(), wanted_layers_.end());
  for (const int32_t layer : head.target_layers)
    state_places_.push_back(std::ranges::find(wanted_layers_, layer) - wanted_layers_.begin());
  kept_ = Buffer(num_kept() * head.state_size() * static_cast<int64_t>(sizeof(float)),
                 backend_.memory());
  outputs_.resize(static_cast<size_t>(config_.scheduler.max_num_seqs * head.hidden_size()));
  if (!head.target_tokens.empty())
    expanded_.resize(static_cast<size_t>(kMaxLogitRowsAtOnce * head.target_vocab_size));
  restore(MemoryPart::kKvCache);
  const StepShape shape = largest_step(head.layer, head_->weights(), config_);
  backend_.reserve_scratch(shape);
  scratch_bytes_ = backend_.scratch_bytes(shape, config_.num_threads);
}

void HeadWorker::load() {
  const Checkpoint checkpoint = open_checkpoint(config_.model_path);
  HeadConfig head = read_head_config(kind_, checkpoint, target_.model().config());
  const auto check_same = [&](bool is_same) {
    if (!is_same)
      throw InvalidArgument(concat(config_.model_path, " holds another head than when it was ",
                                   "first loaded; put the old one back or make a new LLM"));
  };
  if (head_ != nullptr)
    check_same(head.state_size() == head_->config().state_size() &&
               head.hidden_size() == head_->config().hidden_size() &&
               head.target_layers == head_->config().target_layers &&
               head.layer.cache_groups == head_->config().layer.cache_groups);
  WeightLoader weights(checkpoint, backend_,
                       resolve_weight_format(config_.dtype, config_.quantization), {.load = true});
  std::unique_ptr<DraftHead> loaded = make_draft_head(std::move(head), weights);
  // What it computes with was made for the old one.
  if (head_ != nullptr) check_same(head_workspace_bytes(*loaded, config_) == workspace_bytes_);
  files_.clear();
  for (const auto& file : checkpoint.files()) files_.push_back(file->read_state());
  check_files();
  head_ = std::move(loaded);
  has_weights_ = true;
  workspace_bytes_ = head_workspace_bytes(*head_, config_);
  arena_ = std::make_unique<Arena>(arena_bytes(*head_, max_step_rows()), backend_.memory());
}

void HeadWorker::release(MemoryPart part) {
  if (part == MemoryPart::kKvCache) {
    kv_storage_.reset();
  } else if (has_weights_) {
    // A head of the same config without weights: who asks for its sizes finds them.
    const Checkpoint checkpoint = open_checkpoint(config_.model_path);
    WeightLoader weights(checkpoint, backend_,
                         resolve_weight_format(config_.dtype, config_.quantization), {});
    head_ = make_draft_head(head_->config(), weights);
    has_weights_ = false;
    arena_.reset();
  }
}

void HeadWorker::restore(MemoryPart part) {
  if (part == MemoryPart::kWeights) {
    if (!has_weights_) load();
  } else if (!kv_storage_ && head_->config().has_cache()) {
    const KvPlace place{.group = 0, .lane = 0};
    kv_storage_ =
        std::make_unique<KvStorage>(config_.cache.groups, std::span(&place, 1),
                                    KvStorage::Shape{.num_blocks = config_.cache.num_blocks,
                                                     .block_size = config_.cache.block_size,
                                                     .dtype = config_.kv_cache_dtype},
                                    backend_);
  }
}

void HeadWorker::keep(const Tensor& states, int64_t token, int32_t kept) {
  const int64_t size = target_.hidden_size();
  float* to = reinterpret_cast<float*>(kept_.data()) + kept * head_->config().state_size();
  for (const int64_t place : state_places_) {
    const float* from = states.as<float>() + place * states.strides[0] + token * states.strides[1];
    to = std::copy_n(from, size, to);
  }
}

void HeadWorker::lay_out(const HeadStep& step) {
  const int64_t block_size = config_.cache.block_size;
  query_starts_.assign(1, 0);
  kv_lens_.clear();
  slots_.clear();
  int64_t max_blocks = 1;
  for (const HeadSequence& sequence : step.sequences) {
    query_starts_.push_back(query_starts_.back() + sequence.num_rows);
    const int64_t end = sequence.first_row + sequence.num_rows;
    kv_lens_.push_back(static_cast<int32_t>(end));
    max_blocks = std::max(max_blocks, (end + block_size - 1) / block_size);
    if (sequence.block_tables.empty()) continue;
    for (int64_t row = sequence.first_row; row < end; ++row)
      slots_.push_back(sequence.block_tables[0][static_cast<size_t>(row / block_size)] *
                           block_size +
                       row % block_size);
  }
  block_tables_.assign(step.sequences.size() * static_cast<size_t>(max_blocks), 0);
  for (size_t i = 0; i < step.sequences.size(); ++i) {
    if (step.sequences[i].block_tables.empty()) continue;
    const std::vector<int32_t>& blocks = step.sequences[i].block_tables[0];
    const auto used = (kv_lens_[i] + block_size - 1) / block_size;
    std::ranges::transform(blocks.begin(), blocks.begin() + used,
                           block_tables_.begin() + static_cast<int64_t>(i) * max_blocks,
                           [](int32_t block) { return std::max(block, 0); });
  }
  kv_groups_.assign(1, {.slots = slots_, .block_tables = block_tables_});
  copies_.clear();
  for (const BlockCopy& copy : step.copies) copies_.emplace_back(copy.source, copy.destination);
  input_ = {.token_ids = step.token_ids,
            .positions = step.positions,
            .query_starts = query_starts_,
            .kv_lens = kv_lens_,
            .max_blocks = max_blocks,
            .kv_groups = kv_groups_,
            .logit_rows = step.logit_rows};
}

// Of kept states, or of what the run before gave.
void HeadWorker::read_features(const ForwardContext& context, const HeadStep& step,
                               const Tensor& features) {
  const HeadConfig& head = head_->config();
  if (step.place > 0) {
    for (size_t t = 0; t < step.sources.size(); ++t)
      std::copy_n(outputs_.data() + step.sources[t] * head.hidden_size(), head.hidden_size(),
                  features.as<float>() + static_cast<int64_t>(t) * head.hidden_size());
    return;
  }
  const Arena::Scope scope(*arena_);
  const Tensor states = arena_->allocate(DType::kF32, {features.shape[0], head.state_size()});
  const auto* kept = reinterpret_cast<const float*>(kept_.data());
  for (size_t t = 0; t < step.sources.size(); ++t)
    std::copy_n(kept + step.sources[t] * head.state_size(), head.state_size(),
                states.as<float>() + static_cast<int64_t>(t) * head.state_size());
  head_->read_states(context, states, features);
}

const SampledTokens& HeadWorker::run(const HeadStep& step) {
  lay_out(step);
  sampled_.clear();
  if (keeps_logits_) logits_.clear();
  if (kv_storage_) kv_storage_->copy_blocks(backend_, copies_);
  const Arena::Scope scope(*arena_);
  const ForwardContext context{
      .backend = backend_,
      .arena = *arena_,
      .input = input_,
      .kv_caches = kv_storage_ ? kv_storage_->layers() : std::span<const PagedKvCache>(),
      .groups = groups_,
      .layer_states = {}};
  const int64_t size = head_->config().hidden_size();
  const Tensor features = arena_->allocate(DType::kF32, {input_.num_tokens(), size});
  read_features(context, step, features);
  head_->forward(context, target_.model(), features);
  for (size_t i = 0; i < step.logit_rows.size(); ++i)
    std::copy_n(features.as<float>() + step.logit_rows[i] * size, size,
                outputs_.data() + static_cast<int64_t>(i) * size);
  const std::span<const int32_t> rows = step.logit_rows;
  for (size_t begin = 0; begin < rows.size(); begin += kMaxLogitRowsAtOnce) {
    const size_t count = std::min<size_t>(kMaxLogitRowsAtOnce, rows.size() - begin);
    const Arena::Scope logits_scope(*arena_);
    const Tensor logits = head_->compute_logits(context, target_.model(), features,
                                                rows.subspan(begin, count), step.place);
    if (keeps_logits_)
      logits_.insert(logits_.end(), logits.as<float>(), logits.as<float>() + logits.num_elements());
    draw(logits, std::span(step.samples).subspan(begin, count));
  }
  check_files();
  return sampled_;
}

void HeadWorker::check_files() const {
  for (const auto& file : files_) file->check();
}

// What is not of the head's vocabulary is not drawn.
void HeadWorker::draw(const ConstTensor& logits, std::span<const SampleTask> tasks) {
  const HeadConfig& head = head_->config();
  if (head.target_tokens.empty()) return sampler_.sample(logits, tasks, sampled_);
  const int64_t num_rows = logits.shape[0];
  std::fill_n(expanded_.begin(), num_rows * head.target_vocab_size,
              -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < num_rows; ++i) {
    const float* from = logits.as<float>() + i * head.vocab_size;
    float* to = expanded_.data() + i * head.target_vocab_size;
    for (size_t d = 0; d < head.target_tokens.size(); ++d) to[head.target_tokens[d]] = from[d];
  }
  sampler_.sample(ConstTensor(expanded_.data(), DType::kF32, {num_rows, head.target_vocab_size}),
                  tasks, sampled_);
}

MemoryUse HeadWorker::memory_use() const {
  return {.weight_bytes = has_weights_ ? head_->weights().total_bytes() : 0,
          .mapped_bytes = has_weights_ ? head_->weights().mapped_bytes : 0,
          .workspace_bytes = workspace_bytes_ + scratch_bytes_,
          .kv_cache_bytes = kv_storage_ ? kv_storage_->num_bytes() : 0};
}

}  // namespace llmserve
