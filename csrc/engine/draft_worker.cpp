#include "engine/draft_worker.h"

#include "core/error.h"
#include "io/checkpoint.h"

namespace llmserve {

// Draws each row as the target will, from the draft model's logits.
class DraftWorker::Draw final : public StepSink {
 public:
  Draw(DraftWorker& draft, StepBatch& batch) : draft_(draft), batch_(batch) {}

  void take_hidden(const ConstTensor&) override {}
  void take_pooled_logits(const ConstTensor&, const PooledRows&) override {}
  void take_logits(const ConstTensor& logits, size_t begin) override {
    if (begin == 0) draft_.masks_.finish_drafts(batch_.sample_tasks);
    const auto count = static_cast<size_t>(logits.shape[0]);
    draft_.sampler_.sample(logits, std::span(batch_.sample_tasks).subspan(begin, count),
                           draft_.sampled_);
  }

 private:
  DraftWorker& draft_;
  StepBatch& batch_;
};

DraftWorker::DraftWorker(const EngineConfig& config, const std::shared_ptr<Backend>& backend,
                         MaskFiller& masks, bool is_exact)
    : config_(config),
      worker_(config, open_checkpoint(config.model_path), /*rank=*/0, backend),
      builder_(config.cache.block_size, row_groups(config.cache.groups).size()),
      sampler_(worker_.backend()),
      masks_(masks),
      is_exact_(is_exact) {
  if (worker_.steps() != nullptr)
    throw NotSupported(
        "speculative_config: a draft model runs on a CPU; use device='cpu', or method 'ngram' or "
        "'suffix'");
}

const SampledTokens& DraftWorker::run(const StepPlan& plan,
                                      std::span<const DraftContext> contexts) {
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
  Draw draw(*this, batch);
  masks_.begin_drafts(batch.sample_tasks);
  worker_.prepare(batch);
  worker_.run(batch, draw);
  return sampled_;
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
