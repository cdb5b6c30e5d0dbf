#include "engine/head_rank.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "engine/worker_plan.h"
#include "layers/weight_loader.h"
#include "models/draft_heads/registry.h"
#include "models/layer_kinds.h"
#include "models/model_loader.h"

namespace llmserve {
namespace {

constexpr auto kFloat = static_cast<int64_t>(sizeof(float));

int64_t arena_bytes(const DraftHead& head, int64_t max_rows, int rank) {
  const HeadConfig& sizes = head.config();
  const bool is_expanded = rank == 0 && !sizes.target_tokens.empty();
  return Arena::footprint_bytes(DType::kF32, {max_rows, sizes.state_size()}) +
         Arena::footprint_bytes(DType::kF32, {max_rows, sizes.hidden_size()}) +
         head.workspace_bytes(max_rows, kMaxLogitRowsAtOnce) +
         (is_expanded
              ? Arena::footprint_bytes(DType::kF32, {kMaxLogitRowsAtOnce, sizes.target_vocab_size})
              : 0);
}

// Of a run: each path of a tree has one.
int64_t max_logit_rows(const EngineConfig& config) {
  const auto num_paths =
      int64_t{config.scheduler.max_num_seqs} * config.speculation.max_tree_paths();
  return std::min<int64_t>(num_paths, config.scheduler.max_num_batched_tokens);
}

int64_t output_bytes(const HeadConfig& head, const EngineConfig& config) {
  return num_head_outputs(head, config) * head.hidden_size() * kFloat;
}

}  // namespace

int64_t num_head_outputs(const HeadConfig& head, const EngineConfig& config) {
  return head.num_layers() > 1 ? config.scheduler.max_num_batched_tokens : max_logit_rows(config);
}

int64_t head_workspace_bytes(const DraftHead& head, const EngineConfig& config, int rank) {
  return arena_bytes(head, config.scheduler.max_num_batched_tokens, rank) +
         output_bytes(head.config(), config);
}

std::vector<CacheGroupSpec> head_cache_groups(const HeadConfig& head, const TensorRank& rank) {
  if (!head.has_cache()) return {};
  return rank_cache_groups(head.layer, rank);
}

HeadRank::HeadRank(const EngineConfig& config, const Worker& target, int rank)
    : config_(config), target_(target), rank_(rank), backend_(target.backend()) {}

void HeadRank::load(const HeadConfig& head, const Checkpoint& checkpoint) {
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
                       resolve_weight_format(config_.dtype, config_.quantization), {.load = true},
                       tensor_rank(config_, rank_));
  std::unique_ptr<DraftHead> loaded = make_draft_head(head, weights);
  // What it computes with was made for the old one.
  if (head_ != nullptr)
    check_same(head_workspace_bytes(*loaded, config_, rank_) == workspace_bytes_);
  auto arena = std::make_unique<Arena>(
      arena_bytes(*loaded, config_.scheduler.max_num_batched_tokens, rank_), backend_.memory());
  if (head_ == nullptr) {
    outputs_ = Buffer(output_bytes(head, config_), backend_.memory());
    workspace_bytes_ = head_workspace_bytes(*loaded, config_, rank_);
    const StepShape shape = largest_step(head.layer, loaded->weights(), config_);
    backend_.reserve_scratch(shape);
    scratch_bytes_ = std::max<int64_t>(
        0, backend_.scratch_bytes(shape, thread_share(target_.config(), rank_).count) -
               target_.scratch_bytes());
  }
  head_ = std::move(loaded);
  arena_ = std::move(arena);
  has_weights_ = true;
}

void HeadRank::release_weights(const Checkpoint& checkpoint) {
  if (!has_weights_) return;
  WeightLoader weights(checkpoint, backend_,
                       resolve_weight_format(config_.dtype, config_.quantization), {},
                       tensor_rank(config_, rank_));
  head_ = make_draft_head(head_->config(), weights);
  has_weights_ = false;
  arena_.reset();
}

void HeadRank::restore_cache() {
  if (kv_storage_ || !head_->config().has_cache()) return;
  std::vector<KvPlace> places;
  for (int32_t i = 0; i < head_->config().num_layers(); ++i)
    places.push_back({.group = 0, .lane = i});
  kv_storage_ = std::make_unique<KvStorage>(
      head_cache_groups(head_->config(), tensor_rank(config_, rank_)), places,
      KvStorage::Shape{.num_blocks = config_.cache.num_blocks,
                       .block_size = config_.cache.block_size,
                       .dtype = config_.kv_cache_dtype},
      backend_);
}

// Of kept states, or of what the run before gave.
void HeadRank::read_features(const ForwardContext& context, const HeadStep& step,
                             const ConstTensor& kept, const Tensor& features) {
  const HeadConfig& sizes = head_->config();
  if (step.place > 0) {
    const ConstTensor outputs(outputs_.data(), DType::kF32,
                              {num_head_outputs(sizes, config_), sizes.hidden_size()});
    return backend_.gather_rows({.x = outputs, .rows = step.sources, .out = features});
  }
  if (!sizes.has_state_layer())
    return backend_.gather_rows({.x = kept, .rows = step.sources, .out = features});
  const Arena::Scope scope(*arena_);
  const Tensor states = arena_->allocate(DType::kF32, {features.shape[0], sizes.state_size()});
  backend_.gather_rows({.x = kept, .rows = step.sources, .out = states});
  head_->read_states(context, states, features);
}

void HeadRank::run(const HeadStep& step, const ModelInput& input,
                   std::span<const std::pair<int32_t, int32_t>> copies, const ConstTensor& kept,
                   const TakeLogits& take) {
  if (kv_storage_) kv_storage_->copy_blocks(backend_, copies);
  const Arena::Scope scope(*arena_);
  const ParallelGroups groups{
      .tp = target_.tensor_ranks(), .pp = alone_, .ep = alone_, .cp = alone_};
  const ForwardContext context{
      .backend = backend_,
      .arena = *arena_,
      .input = input,
      .kv_caches = kv_storage_ ? kv_storage_->layers() : std::span<const PagedKvCache>(),
      .groups = groups,
      .layer_states = {}};
  const int64_t size = head_->config().hidden_size();
  const Tensor features = arena_->allocate(DType::kF32, {input.num_tokens(), size});
  read_features(context, step, kept, features);
  head_->forward(context, target_.model(), features, step.place);
  const std::span<const int32_t> rows = step.logit_rows;
  if (head_->config().num_layers() > 1) {
    all_rows_.resize(step.token_ids.size());
    std::iota(all_rows_.begin(), all_rows_.end(), 0);
  }
  const std::span<const int32_t> kept_rows =
      head_->config().num_layers() > 1 ? std::span<const int32_t>(all_rows_) : rows;
  if (kept_rows.empty()) return;
  backend_.gather_rows(
      {.x = features,
       .rows = kept_rows,
       .out = Tensor(outputs_.data(), DType::kF32, {std::ssize(kept_rows), size})});
  for (size_t begin = 0; begin < rows.size(); begin += kMaxLogitRowsAtOnce) {
    const size_t count = std::min<size_t>(kMaxLogitRowsAtOnce, rows.size() - begin);
    const Arena::Scope logits_scope(*arena_);
    const Tensor logits = head_->compute_logits(context, target_.model(), features,
                                                rows.subspan(begin, count), step.place);
    if (rank_ == 0) take(logits, begin);
  }
}

Tensor HeadRank::expand(const ConstTensor& logits) {
  const HeadConfig& sizes = head_->config();
  Memory& memory = backend_.memory();
  const int64_t num_rows = logits.shape[0];
  const Tensor expanded = arena_->allocate(DType::kF32, {num_rows, sizes.target_vocab_size});
  const float* from = logits.as<float>();
  float* to = expanded.as<float>();
  if (!memory.is_host()) {
    host_logits_.resize(static_cast<size_t>(logits.num_elements()));
    host_expanded_.resize(static_cast<size_t>(expanded.num_elements()));
    memory.copy_to_host(host_logits_.data(), from, logits.num_bytes());
    from = host_logits_.data();
    to = host_expanded_.data();
  }
  std::fill_n(to, expanded.num_elements(), -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < num_rows; ++i)
    for (size_t d = 0; d < sizes.target_tokens.size(); ++d)
      to[i * sizes.target_vocab_size + sizes.target_tokens[d]] =
          from[i * sizes.vocab_size + static_cast<int64_t>(d)];
  if (!memory.is_host()) memory.copy_from_host(expanded.data, to, expanded.num_bytes());
  return expanded;
}

MemoryUse HeadRank::memory_use() const {
  return {.weight_bytes = has_weights_ ? head_->weights().total_bytes() : 0,
          .mapped_bytes = has_weights_ ? head_->weights().mapped_bytes : 0,
          .workspace_bytes = workspace_bytes_ + scratch_bytes_,
          .kv_cache_bytes = kv_storage_ ? kv_storage_->num_bytes() : 0};
}

}  // namespace llmserve
