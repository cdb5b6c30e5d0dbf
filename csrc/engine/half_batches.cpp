#include "engine/half_batches.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/pin_thread.h"
#include "core/thread_beat.h"
#include "layers/attention_order.h"

namespace llmserve {
namespace {

// Rows that kernels of matrix products take at once, in steps of many.
constexpr int64_t kRowsTogether = 16;
constexpr int64_t kManyRows = 128;

}  // namespace

int64_t first_half_of(int64_t num_tokens) {
  const int64_t unit = num_tokens < kManyRows ? 1 : kRowsTogether;
  const int64_t half = (num_tokens + 1) / 2;
  return (half + unit - 1) / unit * unit;
}

int64_t second_half_of(const ModelInput& input, int64_t num_prefill_tokens,
                       const ParallelConfig& parallel) {
  const bool is_plain = input.wanted_layers.empty() && input.given_embeddings.empty();
  if (!parallel.has_halves() || !is_plain || num_prefill_tokens == 0 ||
      input.num_tokens() < parallel.min_overlapped_tokens)
    return 0;
  return first_half_of(input.num_tokens());
}

// It owns the turn but while it exchanges or waits for the other half.
class HalfBatches::Half final : public ExchangeWatch,
                                public AttentionOrder,
                                public WatchedCommunicator {
 public:
  Half(HalfBatches& both, int idx, ExchangeLog* log)
      : WatchedCommunicator(*both.ends_[static_cast<size_t>(idx)], *this),
        both_(both),
        idx_(idx),
        logged_(log, idx + 1) {
    both_.take_turn();
  }
  ~Half() override { both_.pass_turn(); }

  void begin_attention() override {
    ++num_begun_;
    if (idx_ == 0) return;
    both_.pass_turn();
    {
      const BeatPause pause;
      std::unique_lock lock(both_.mutex_);
      both_.has_changed_.wait(
          lock, [&] { return both_.num_attended_ >= num_begun_ || both_.has_failed_; });
    }
    both_.take_turn();
    const std::lock_guard lock(both_.mutex_);
    if (both_.has_failed_) throw DeviceError("the other half of the step has failed");
  }
  void end_attention() override {
    if (idx_ > 0) return;
    const std::lock_guard lock(both_.mutex_);
    ++both_.num_attended_;
    both_.has_changed_.notify_all();
  }
  void begin_exchange(const char* name) override {
    both_.pass_turn();
    logged_.begin_exchange(name);
  }
  void end_exchange() noexcept override {
    logged_.end_exchange();
    both_.take_turn();
  }

 private:
  HalfBatches& both_;
  const int idx_;
  LoggedExchanges logged_;
  int64_t num_begun_ = 0;  // layers
};

HalfBatches::HalfBatches(int64_t workspace_bytes, int first_thread, Memory& memory,
                         const RankPatience& patience)
    : arenas_{Arena(workspace_bytes, memory), Arena(workspace_bytes, memory)},
      threads_(2,
               {.on_failure = [this] { give_up(); }, .patience = patience, .has_far_ranks = true}) {
  threads_.run([&](int half) {
    if (half > 0 && first_thread > 0) pin_thread_to(first_thread, 1);
  });
}

int64_t HalfBatches::num_bytes() const {
  return arenas_[0].capacity_bytes() + arenas_[1].capacity_bytes();
}

void HalfBatches::cut(const ModelInput& whole, int64_t second_half) {
  const auto end_of = [&](size_t half) { return half == 0 ? second_half : whole.num_tokens(); };
  const auto width = static_cast<size_t>(whole.max_blocks);
  for (size_t half = 0; half < 2; ++half) {
    Part& part = parts_[half];
    const int64_t begin = half == 0 ? 0 : second_half;
    const int64_t end = end_of(half);
    part.query_starts.assign(1, 0);
    part.kv_lens.clear();
    size_t first = 0;  // sequence
    for (size_t b = 0; b < whole.kv_lens.size(); ++b) {
      const int64_t sequence_end = whole.query_starts[b + 1];
      if (sequence_end <= begin) first = b + 1;
      if (sequence_end <= begin || whole.query_starts[b] >= end) continue;
      const int64_t left_out = std::max<int64_t>(sequence_end - end, 0);  // of its tokens, later
      part.query_starts.push_back(static_cast<int32_t>(sequence_end - left_out - begin));
      part.kv_lens.push_back(static_cast<int32_t>(whole.kv_lens[b] - left_out));
    }
    const size_t num_sequences = part.kv_lens.size();
    const auto of_tokens = [&](auto span) {
      return span.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    };
    const auto of_sequences = [&](auto span) {
      return span.empty() ? span : span.subspan(first, num_sequences);
    };
    part.groups.clear();
    for (const KvGroupInput& group : whole.kv_groups)
      part.groups.push_back(
          {.slots = of_tokens(group.slots),
           .block_tables = group.block_tables.subspan(first * width, num_sequences * width)});
    part.input = {.token_ids = of_tokens(whole.token_ids),
                  .given_embeddings = {},
                  .positions = of_tokens(whole.positions),
                  .query_starts = part.query_starts,
                  .kv_lens = part.kv_lens,
                  .max_blocks = whole.max_blocks,
                  .kv_groups = part.groups,
                  .adapters = of_sequences(whole.adapters),
                  .state_slots = of_sequences(whole.state_slots),
                  .logit_rows = {},
                  .wanted_layers = {},
                  .wanted_tokens = {}};
  }
}

// Nobody waits for a half that does not come.
void HalfBatches::give_up() noexcept {
  for (Communicator* end : ends_) end->abort();
  const std::lock_guard lock(mutex_);
  has_failed_ = true;
  has_changed_.notify_all();
}

void HalfBatches::take_turn() noexcept {
  std::unique_lock lock(mutex_);
  {
    const BeatPause pause;
    has_changed_.wait(lock, [this] { return !is_turn_taken_ || has_failed_; });
  }
  // No pause: whoever waits for a half that hangs stands still as well, and whoever watches the
  // rank has to know.
  has_changed_.wait(lock, [this] { return !is_turn_taken_; });
  is_turn_taken_ = true;
}

void HalfBatches::pass_turn() noexcept {
  const std::lock_guard lock(mutex_);
  is_turn_taken_ = false;
  has_changed_.notify_all();
}

Tensor HalfBatches::forward(const Model& model, const ForwardContext& whole, int64_t second_half,
                            Communicator& first, Communicator& second, ExchangeLog* log) {
  cut(whole.input, second_half);
  ends_ = {&first, &second};
  num_attended_ = 0;
  has_failed_ = false;
  const RankThreads::Awaited awaited(threads_);
  const Tensor hidden =
      whole.arena.allocate(DType::kF32, {whole.input.num_tokens(), model.config().hidden_size});
  threads_.run([&](int idx) {
    Half half(*this, idx, log);
    const auto i = static_cast<size_t>(idx);
    Arena& arena = arenas_[i];
    const ParallelGroups groups{
        .tp = half, .pp = whole.groups.pp, .ep = whole.groups.ep, .cp = whole.groups.cp};
    const Arena::Scope scope(arena);
    const Tensor states = model.forward({.backend = whole.backend,
                                         .arena = arena,
                                         .input = parts_[i].input,
                                         .kv_caches = whole.kv_caches,
                                         .groups = groups,
                                         .layer_states = {},
                                         .routes = whole.routes});
    const Tensor own = hidden.slice(0, idx == 0 ? 0 : second_half, states.shape[0]);
    std::memcpy(own.data, states.data, static_cast<size_t>(states.num_bytes()));
  });
  return hidden;
}

}  // namespace llmserve
