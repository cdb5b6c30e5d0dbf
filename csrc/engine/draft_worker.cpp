#include "engine/draft_worker.h"

#include <algorithm>
#include <ranges>

#include "engine/recorded_draw.h"
#include "engine/recorded_run.h"
#include "io/checkpoint.h"
#include "kernels/device_steps.h"

namespace llmserve {

// Draws each row as the target will, from the draft model's logits.
class DraftWorker::Draw final : public StepSink {
 public:
  Draw(DraftWorker& draft, StepBatch& batch, std::span<const DraftContext> contexts)
      : draft_(draft), batch_(batch), contexts_(contexts) {}

  void take_hidden(const ConstTensor&) override {}
  void take_pooled_logits(const ConstTensor&, const PooledRows&) override {}
  void take_logits(const ConstTensor& logits, size_t begin) override {
    if (begin == 0) draft_.masks_.finish_drafts(batch_.sample_tasks);
    const auto count = static_cast<size_t>(logits.shape[0]);
    draft_.sampler_.sample(logits, std::span(batch_.sample_tasks).subspan(begin, count),
                           draft_.sampled_);
    for (size_t row = begin; row < begin + count; ++row) {
      if (contexts_[row].num_choices > 1)
        draft_.choices_.draw(logits.slice(0, static_cast<int64_t>(row - begin), 1),
                             batch_.sample_tasks[row], draft_.sampled_.rows[row],
                             contexts_[row].num_choices, row);
    }
  }

 private:
  DraftWorker& draft_;
  StepBatch& batch_;
  const std::span<const DraftContext> contexts_;
};

DraftWorker::DraftWorker(const EngineConfig& config, const Worker& target, MaskFiller& masks,
                         bool is_exact)
    : config_(config),
      target_scratch_bytes_(target.scratch_bytes()),
      worker_(config, open_checkpoint(config.model_path), /*rank=*/0, target.shared_backend()),
      builder_(config.cache.block_size, row_groups(config.cache.groups).size()),
      sampler_(worker_.backend()),
      masks_(masks),
      is_exact_(is_exact),
      choices_(sampler_, worker_.backend().memory()) {}

const SampledTokens& DraftWorker::run(const StepPlan& plan,
                                      std::span<const DraftContext> contexts) {
  const bool is_chain = std::ranges::all_of(
      contexts, [](const DraftContext& context) { return context.num_choices == 1; });
  if (worker_.steps() != nullptr && !config_.enforce_eager && is_chain)
    if (const auto recorded =
            recorded_shape(plan, {.max_num_seqs = config_.scheduler.max_num_seqs,
                                  .max_model_len = config_.scheduler.max_model_len,
                                  .block_size = config_.cache.block_size});
        recorded && recorded->draws)
      return run_recorded(plan, *recorded);
  const BatchShape shape = builder_.shape_of(plan);
  const int64_t num_bytes = builder_.num_bytes(shape);
  if (std::ssize(block_) < num_bytes) block_.resize(static_cast<size_t>(num_bytes));
  StepBatch& batch = builder_.build(plan, shape, block_);
  for (size_t i = 0; i < batch.sample_tasks.size(); ++i) {
    SampleTask& task = batch.sample_tasks[i];
    task.token_ids = contexts[i].token_ids;
    task.num_drafted_tokens = contexts[i].num_drafted;
    if (!is_exact_ && !task.params->draw.is_greedy()) task.drawn_from = &begin_guess(task);
  }
  sampled_.clear();
  choices_.begin(contexts.size());
  Draw draw(*this, batch, contexts);
  masks_.begin_drafts(batch.sample_tasks);
  worker_.prepare(batch);
  worker_.run(batch, draw);
  return sampled_;
}

// A step of the device's own, which nothing else is in flight beside.
const SampledTokens& DraftWorker::run_recorded(const StepPlan& plan, const RecordedShape& shape) {
  DeviceSteps& steps = *worker_.steps();
  StepBatch& batch = builder_.build(plan, shape.batch,
                                    steps.begin(builder_.num_bytes(shape.batch),
                                                std::ssize(plan.logit_rows), shape.batch.num_rows));
  steps.bring_over();
  worker_.prepare(batch);
  RecordedDraw draw(steps, batch);
  DeviceSteps* const ranks[] = {&steps};
  llmserve::run_recorded({.key = {.num_rows = shape.batch.num_rows,
                                  .max_blocks = shape.batch.max_blocks,
                                  .lengths = shape.lengths,
                                  .model = 1},
                          .ranks = ranks,
                          .on_ranks = [](const auto& call) { call(0); },
                          .work = [&](int) { worker_.run(batch, draw); },
                          .end = [](int) {}});
  sampled_.clear();
  for (const DrawnRow& drawn : steps.wait(steps.end()))
    sampled_.rows.push_back({.token_id = drawn.token_id, .is_valid = drawn.is_valid != 0});
  return sampled_;
}

// What the backend keeps for the target's steps serves the draft's.
MemoryUse DraftWorker::memory_use() const {
  MemoryUse use = worker_.memory_use();
  use.workspace_bytes -= std::min(worker_.scratch_bytes(), target_scratch_bytes_);
  return use;
}

std::vector<float>& DraftWorker::begin_guess(const SampleTask& task) {
  Guesses& guesses = guesses_[{task.request_id, task.sample_index}];
  if (task.num_drafted_tokens == 0) guesses = {task.position, 0, std::move(guesses.drawn_from)};
  const auto place = static_cast<size_t>(guesses.count++);
  if (guesses.drawn_from.size() <= place) guesses.drawn_from.emplace_back();
  return guesses.drawn_from[place];
}

std::span<const float> DraftWorker::drawn_from(RequestId request_id, int32_t sample_index,
                                               int64_t position) const {
  const auto found = guesses_.find({request_id, sample_index});
  if (found == guesses_.end()) return {};
  const int64_t place = position - found->second.first_position;
  if (place < 0 || place >= found->second.count) return {};
  return found->second.drawn_from[static_cast<size_t>(place)];
}

}  // namespace llmserve
