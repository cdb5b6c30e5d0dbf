#include "engine/head_worker.h"

#include <algorithm>
#include <utility>

namespace llmserve {

HeadWorker::HeadWorker(HeadKind kind, const EngineConfig& config, Target target)
    : config_(config),
      target_(std::move(target)),
      head_({.kind = kind, .config = config_}, target_.workers, target_.on_each_rank),
      sampler_(head_.backend()),
      choices_(sampler_, head_.backend().memory()) {}

void HeadWorker::check_nodes() const {
  if (has_lost_node_)
    throw DeviceError("another node was lost, and with it what its part of the head has kept");
}

void HeadWorker::keep(const Tensor& states, std::span<const int32_t> kept) {
  check_nodes();
  if (std::ranges::all_of(kept, [](int32_t place) { return place < 0; })) return;
  if (target_.tell) {
    write_kept_places(kept, wire_);
    target_.tell(RankFrameType::kKeepStates, wire_);
  }
  head_.keep(states, kept);
}

const SampledTokens& HeadWorker::run(HeadStep& step) {
  check_nodes();
  head_.lay_out(step);
  sampled_.clear();
  choices_.begin(step.samples.size());
  if (keeps_logits_) logits_.clear();
  target_.masks.begin_drafts(step.samples);
  const HeadRank::TakeLogits take = [&](const ConstTensor& logits, size_t begin) {
    if (begin == 0) target_.masks.finish_drafts(step.samples);
    draw(logits, step, begin);
  };
  if (target_.tell) write_head_step(step, config_.cache.block_size, wire_);
  target_.run_on_ranks([&](int rank) {
    if (rank == 0 && target_.tell) target_.tell(RankFrameType::kHeadStep, wire_);
    head_.run(rank, step, take);
  });
  head_.check_files();
  return sampled_;
}

// What is not of the head's vocabulary is not drawn.
void HeadWorker::draw(const ConstTensor& logits, const HeadStep& step, size_t begin) {
  if (keeps_logits_) {
    const auto size = logits_.size();
    logits_.resize(size + static_cast<size_t>(logits.num_elements()));
    head_.backend().memory().copy_to_host(logits_.data() + size, logits.data, logits.num_bytes());
  }
  const auto tasks = std::span(step.samples).subspan(begin, static_cast<size_t>(logits.shape[0]));
  const ConstTensor drawn_from =
      head_.config().target_tokens.empty() ? logits : ConstTensor(head_.first().expand(logits));
  sampler_.sample(drawn_from, tasks, sampled_);
  for (size_t i = 0; i < tasks.size() && !step.num_choices.empty(); ++i) {
    const size_t row = begin + i;
    if (step.num_choices[row] > 1)
      choices_.draw(drawn_from.slice(0, static_cast<int64_t>(i), 1), tasks[i], sampled_.rows[row],
                    step.num_choices[row], row);
  }
}

}  // namespace llmserve
