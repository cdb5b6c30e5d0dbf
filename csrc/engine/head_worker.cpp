#include "engine/head_worker.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/worker_plan.h"
#include "io/checkpoint.h"
#include "io/head_checkpoint.h"

namespace llmserve {

int64_t num_kept_states(const EngineConfig& config) {
  return int64_t{config.scheduler.max_num_batched_tokens} + config.scheduler.max_num_seqs;
}

int64_t kept_state_bytes(const HeadConfig& head, const EngineConfig& config) {
  return num_kept_states(config) * head.state_size() * static_cast<int64_t>(sizeof(float));
}

HeadWorker::HeadWorker(HeadKind kind, const EngineConfig& config, Target target)
    : kind_(kind),
      config_(config),
      target_(std::move(target)),
      sampler_(backend()),
      choices_(sampler_, backend().memory()) {
  for (size_t rank = 0; rank < target_.workers.size(); ++rank)
    ranks_.push_back(
        std::make_unique<HeadRank>(config_, *target_.workers[rank], static_cast<int>(rank)));
  load();
  wanted_layers_ = head().target_layers;
  std::ranges::sort(wanted_layers_);
  wanted_layers_.erase(std::ranges::unique(wanted_layers_).begin(), wanted_layers_.end());
  for (const int32_t layer : head().target_layers)
    state_places_.push_back(std::ranges::find(wanted_layers_, layer) - wanted_layers_.begin());
  std::vector<int64_t> in_order(wanted_layers_.size());
  std::iota(in_order.begin(), in_order.end(), 0);
  is_in_order_ = state_places_ == in_order;
  kept_ = Buffer(kept_state_bytes(head(), config_), backend().memory());
  if (kind_ == HeadKind::kMtp) no_embedding_.resize(static_cast<size_t>(head().hidden_size()));
  restore(MemoryPart::kKvCache);
}

// A layer of the target's own file is read by the config that the target was.
Checkpoint HeadWorker::open() const {
  return kind_ == HeadKind::kMtp
             ? open_checkpoint(config_.model_path, target_.workers[0]->config_text())
             : open_head_checkpoint(config_.model_path);
}

void HeadWorker::load() {
  const Checkpoint checkpoint = open();
  const HeadConfig found =
      read_head_config(kind_, checkpoint, target_.workers[0]->model().config());
  std::vector<std::shared_ptr<const ReadState>> files;
  for (const auto& file : checkpoint.files()) files.push_back(file->read_state());
  target_.run_on_ranks(
      [&](int rank) { ranks_[static_cast<size_t>(rank)]->load(found, checkpoint); });
  files_ = std::move(files);
  check_files();
}

void HeadWorker::check_files() const {
  for (const auto& file : files_) file->check();
}

void HeadWorker::release(MemoryPart part) {
  if (part == MemoryPart::kKvCache) {
    target_.run_on_ranks([this](int rank) { ranks_[static_cast<size_t>(rank)]->release_cache(); });
    return;
  }
  const Checkpoint checkpoint = open();
  target_.run_on_ranks(
      [&](int rank) { ranks_[static_cast<size_t>(rank)]->release_weights(checkpoint); });
}

void HeadWorker::restore(MemoryPart part) {
  if (part == MemoryPart::kKvCache) {
    target_.run_on_ranks([this](int rank) { ranks_[static_cast<size_t>(rank)]->restore_cache(); });
  } else if (!std::ranges::all_of(ranks_, [](const auto& rank) { return rank->has_weights(); })) {
    load();
  }
}

// A layer's states of a token are a row of a cache of one head, whose block is the token's place.
// Those of all layers are stored at once where the head reads each once, in order.
void HeadWorker::keep(const Tensor& states, std::span<const int32_t> kept) {
  const int64_t num_tokens = std::ssize(kept);
  if (std::ranges::all_of(kept, [](int32_t place) { return place < 0; })) return;
  const int64_t num_layers = std::ssize(state_places_);
  const Tensor rows(kept_.data(), DType::kF32,
                    {num_kept(), 1, num_layers, head().target_hidden_size});
  kept_slots_.clear();
  for (int64_t i = 0; i < num_layers; ++i)
    for (const int32_t place : kept)
      kept_slots_.push_back(place < 0 ? int64_t{-1} : place * num_layers + i);
  const auto store = [&](int64_t first, int64_t count, int64_t place) {
    const Tensor layers(states.as<float>() + place * states.strides[0], DType::kF32,
                        {count * num_tokens, 1, states.shape[2]});
    backend().store_kv({.keys = layers,
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

const SampledTokens& HeadWorker::run(HeadStep& step) {
  lay_out(step);
  sampled_.clear();
  choices_.begin(step.samples.size());
  if (keeps_logits_) logits_.clear();
  target_.masks.begin_drafts(step.samples);
  const ConstTensor kept(kept_.data(), DType::kF32, {num_kept(), head().state_size()});
  const HeadRank::TakeLogits take = [&](const ConstTensor& logits, size_t begin) {
    if (begin == 0) target_.masks.finish_drafts(step.samples);
    draw(logits, step, begin);
  };
  target_.run_on_ranks(
      [&](int rank) { ranks_[static_cast<size_t>(rank)]->run(step, input_, copies_, kept, take); });
  check_files();
  return sampled_;
}

// What is not of the head's vocabulary is not drawn.
void HeadWorker::draw(const ConstTensor& logits, const HeadStep& step, size_t begin) {
  if (keeps_logits_) {
    const auto size = logits_.size();
    logits_.resize(size + static_cast<size_t>(logits.num_elements()));
    backend().memory().copy_to_host(logits_.data() + size, logits.data, logits.num_bytes());
  }
  const auto tasks = std::span(step.samples).subspan(begin, static_cast<size_t>(logits.shape[0]));
  const ConstTensor drawn_from =
      head().target_tokens.empty() ? logits : ConstTensor(first().expand(logits));
  sampler_.sample(drawn_from, tasks, sampled_);
  for (size_t i = 0; i < tasks.size() && !step.num_choices.empty(); ++i) {
    const size_t row = begin + i;
    if (step.num_choices[row] > 1)
      choices_.draw(drawn_from.slice(0, static_cast<int64_t>(i), 1), tasks[i], sampled_.rows[row],
                    step.num_choices[row], row);
  }
}

MemoryUse HeadWorker::memory_use() const {
  MemoryUse sum{.workspace_bytes = kept_.num_bytes()};
  for (const auto& rank : ranks_) sum += rank->memory_use();
  return sum;
}

}  // namespace llmserve
