#include "engine/local_head.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "io/checkpoint.h"
#include "io/head_checkpoint.h"

namespace llmserve {

int64_t num_kept_states(const EngineConfig& config) {
  return int64_t{config.scheduler.max_num_batched_tokens} + config.scheduler.max_num_seqs;
}

int64_t kept_state_bytes(const HeadConfig& head, const EngineConfig& config) {
  return num_kept_states(config) * head.state_size() * static_cast<int64_t>(sizeof(float));
}

namespace {

std::vector<const Worker*> of_last_stage(std::vector<const Worker*> workers) {
  const auto count = static_cast<size_t>(workers[0]->config().parallel.num_local_last_ranks());
  check_internal(count > 0, "a head is where the last stage is");
  workers.resize(count);
  return workers;
}

}  // namespace

LocalHead::LocalHead(const HeadSource& source, std::vector<const Worker*> workers,
                     OnEachRank on_each_rank)
    : kind_(source.kind),
      config_(source.config),
      workers_(of_last_stage(std::move(workers))),
      on_each_rank_(std::move(on_each_rank)) {
  const int first_rank = workers_[0]->config().parallel.first_rank();
  for (size_t rank = 0; rank < workers_.size(); ++rank)
    ranks_.push_back(
        std::make_unique<HeadRank>(config_, *workers_[rank], first_rank + static_cast<int>(rank)));
  load();
  wanted_layers_ = config().target_layers;
  std::ranges::sort(wanted_layers_);
  wanted_layers_.erase(std::ranges::unique(wanted_layers_).begin(), wanted_layers_.end());
  for (const int32_t layer : config().target_layers)
    state_places_.push_back(std::ranges::find(wanted_layers_, layer) - wanted_layers_.begin());
  std::vector<int64_t> in_order(wanted_layers_.size());
  std::iota(in_order.begin(), in_order.end(), 0);
  is_in_order_ = state_places_ == in_order;
  for (const Worker* const worker : workers_)
    if (kept_.empty() || !backend().memory().is_host())
      kept_.emplace_back(kept_state_bytes(config(), config_), worker->backend().memory());
  if (kind_ == HeadKind::kMtp) no_embedding_.resize(static_cast<size_t>(config().hidden_size()));
  restore(MemoryPart::kKvCache);
}

// A layer of the target's own file is read by the config that the target was.
Checkpoint LocalHead::open() const {
  return kind_ == HeadKind::kMtp ? open_checkpoint(config_.model_path, workers_[0]->config_text())
                                 : open_head_checkpoint(config_.model_path);
}

void LocalHead::load() {
  const Checkpoint checkpoint = open();
  const HeadConfig found = read_head_config(kind_, checkpoint, workers_[0]->model().config());
  std::vector<std::shared_ptr<const ReadState>> files;
  for (const auto& file : checkpoint.files()) files.push_back(file->read_state());
  on_each_head([&](HeadRank& rank) { rank.load(found, checkpoint); });
  files_ = std::move(files);
  check_files();
}

void LocalHead::on_each_head(const std::function<void(HeadRank& rank)>& work) {
  on_each_rank_([&](int rank) {
    if (rank < std::ssize(ranks_)) work(*ranks_[static_cast<size_t>(rank)]);
  });
}

void LocalHead::check_files() const {
  for (const auto& file : files_) file->check();
}

void LocalHead::release(MemoryPart part) {
  if (part == MemoryPart::kKvCache) {
    on_each_head([](HeadRank& rank) { rank.release_cache(); });
    return;
  }
  const Checkpoint checkpoint = open();
  on_each_head([&](HeadRank& rank) { rank.release_weights(checkpoint); });
}

void LocalHead::restore(MemoryPart part) {
  if (part == MemoryPart::kKvCache) {
    on_each_head([](HeadRank& rank) { rank.restore_cache(); });
  } else if (!std::ranges::all_of(ranks_, [](const auto& rank) { return rank->has_weights(); })) {
    load();
  }
}

// Each rank of the last stage has the states whole. Devices do not read each other's.
void LocalHead::keep(const Tensor& states, std::span<const int32_t> kept) {
  if (std::ranges::all_of(kept, [](int32_t place) { return place < 0; })) return;
  const int64_t num_layers = std::ssize(state_places_);
  kept_slots_.clear();
  for (int64_t i = 0; i < num_layers; ++i)
    for (const int32_t place : kept)
      kept_slots_.push_back(place < 0 ? int64_t{-1} : place * num_layers + i);
  const int64_t num_tokens = std::ssize(kept);
  if (kept_.size() == 1) return keep_on(0, states, num_tokens);
  on_each_rank_([&](int rank) {
    const auto i = static_cast<size_t>(rank);
    if (i < kept_.size()) keep_on(i, workers_[i]->layer_states(), num_tokens);
  });
}

// A layer's states of a token are a row of a cache of one head, whose block is the token's place.
// Those of all layers are stored at once where the head reads each once, in order.
void LocalHead::keep_on(size_t rank, const Tensor& states, int64_t num_tokens) {
  const int64_t num_layers = std::ssize(state_places_);
  const Tensor rows(kept_[rank].data(), DType::kF32,
                    {num_kept(), 1, num_layers, config().target_hidden_size});
  const auto store = [&](int64_t first, int64_t count, int64_t place) {
    const Tensor layers(states.as<float>() + place * states.strides[0], DType::kF32,
                        {count * num_tokens, 1, states.shape[2]});
    workers_[rank]->backend().store_kv(
        {.keys = layers,
         .values = {},
         .slots = std::span(kept_slots_)
                      .subspan(static_cast<size_t>(first * num_tokens),
                               static_cast<size_t>(count * num_tokens)),
         .cache = {.keys = rows, .values = rows}});
  };
  if (is_in_order_ && states.strides[0] == num_tokens * states.shape[2]) {
    store(0, num_layers, 0);
    return;
  }
  for (int64_t i = 0; i < num_layers; ++i) store(i, 1, state_places_[static_cast<size_t>(i)]);
}

void LocalHead::lay_out(const HeadStep& step) {
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
  // A token at the sequence's beginning reads no embedding: layers of a model's own were trained
  // so.
  given_.clear();
  for (size_t t = 0; t < step.positions.size() && !no_embedding_.empty(); ++t)
    if (step.positions[t] == 0)
      given_.push_back(
          {.begin = static_cast<int64_t>(t), .count = 1, .rows = no_embedding_.data()});
  input_ = {.token_ids = step.token_ids,
            .given_embeddings = given_,
            .positions = step.positions,
            .query_starts = query_starts_,
            .kv_lens = kv_lens_,
            .max_blocks = max_blocks,
            .kv_groups = kv_groups_,
            .logit_rows = step.logit_rows};
}

void LocalHead::run(int rank, const HeadStep& step, const HeadRank::TakeLogits& take) {
  if (rank >= std::ssize(ranks_)) return;
  const auto own = static_cast<size_t>(rank);
  const ConstTensor kept(kept_[kept_.size() == 1 ? 0 : own].data(), DType::kF32,
                         {num_kept(), config().state_size()});
  ranks_[own]->run(step, input_, copies_, kept, take);
}

MemoryUse LocalHead::memory_use() const {
  MemoryUse sum;
  for (const Buffer& kept : kept_) sum.workspace_bytes += kept.num_bytes();
  for (const auto& rank : ranks_) sum += rank->memory_use();
  return sum;
}

}  // namespace llmserve
