#include "engine/step_runner.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/thread_beat.h"
#include "core/trace_range.h"
#include "engine/kv_block_bytes.h"
#include "engine/kv_mover.h"
#include "engine/local_ranks.h"
#include "engine/node_blocks.h"
#include "engine/node_leader.h"
#include "engine/node_settings.h"
#include "engine/rank_devices.h"
#include "engine/step_wire.h"
#include "engine/worker_plan.h"
#include "kernels/device_copies.h"
#include "kernels/device_steps.h"
#include "models/expert_layers.h"
#include "speculation/registry.h"

namespace llmserve {
namespace {

// Of a step that another node may not read before the one before it has ended: so few that a
// connection holds all that may lie there, and whoever sends waits for nobody.
constexpr int64_t kMaxUnreadBytes = 16 << 10;

std::unique_ptr<DraftWorker> make_draft(const EngineConfig& config, const Worker& target,
                                        MaskFiller& masks) {
  if (!config.draft || find_drafter(config.speculation.method).has_head()) return nullptr;
  return std::make_unique<DraftWorker>(*config.draft, target, masks, config.speculation.is_exact());
}

}  // namespace

// Pools, samples, and asks for the masks as late as it can.
class StepRunner::Draw final : public StepSink {
 public:
  Draw(StepRunner& runner, const StepPlan& plan, StepBatch& batch, Flight& flight)
      : runner_(runner), plan_(plan), batch_(batch), flight_(flight) {}

  // Who computes for others may take as long as it likes here: masks and processors do.
  void take_hidden(const ConstTensor& hidden) override {
    const BeatPause pause;
    runner_.pooler_.take(hidden, batch_.input, plan_);
  }
  void take_pooled_logits(const ConstTensor& logits, const PooledRows& rows) override {
    const BeatPause pause;
    runner_.pooler_.take_logits(logits, rows);
  }
  void take_logits(const ConstTensor& logits, size_t begin) override {
    const BeatPause pause;
    if (begin == 0) runner_.masks_.finish(batch_.sample_tasks);
    if (runner_.steps_ != nullptr) {
      runner_.draw_rows(logits, batch_, begin, flight_);
    } else {
      const size_t count = static_cast<size_t>(logits.shape[0]);
      runner_.sampler_.sample(logits, std::span(batch_.sample_tasks).subspan(begin, count),
                              flight_.sampled);
    }
  }

 private:
  StepRunner& runner_;
  const StepPlan& plan_;
  StepBatch& batch_;
  Flight& flight_;
};

std::unique_ptr<CommunicatorGroup> StepRunner::make_group(std::string_view kind,
                                                          const GroupOptions& options) {
  return find_communicator(kind).make(options);
}

StepRunner::StepRunner(const EngineConfig& config, const Checkpoint& checkpoint,
                       MakeGroup make_group, const std::shared_ptr<SharedModels>& shared,
                       const std::stop_token& given_up, const RankPatience& patience)
    : config_(config),
      make_group_(std::move(make_group)),
      patience_(patience),
      ranks_(config.parallel.num_local_ranks(),
             {.on_failure = [this] { give_up_exchanges(); },
              .patience =
                  config.parallel.nodes == 1 || config.device == "cpu" ? patience : RankPatience(),
              .has_far_ranks = config.parallel.nodes > 1}),
      leader_(make_leader(checkpoint)),
      workers_(make_workers(ranks_, config, checkpoint, shared)),
      steps_(first().steps()),
      limits_{.max_num_seqs = config_.scheduler.max_num_seqs,
              .max_model_len = config_.scheduler.max_model_len,
              .block_size = config_.cache.block_size},
      masks_(first().vocab_size()),
      draft_(make_draft(config_, first(), masks_)),
      head_(make_head()),
      sampler_(first().backend()),
      pooler_(first().backend().memory()),
      flights_(max_in_flight()),
      watch_(make_watch()) {
  const BatchBuilder builder(config.cache.block_size, row_groups(config.cache.groups).size());
  const auto num_places = static_cast<size_t>(has_stages() ? max_in_flight() : 1);
  places_ = std::vector<BatchPlace>(num_places, {.builder = builder, .block = {}});
  for (const auto& worker : workers_)
    if (worker->steps() != nullptr) recorders_.push_back(worker->steps());
  if (steps_ != nullptr && !config_.speculation.is_exact())
    throw NotSupported(
        "speculative_config: rejection_sample_method 'rejection' draws on the host; use "
        "device='cpu', or leave it at 'exact'");
  if (!leader_) return;
  exchanges_ = std::make_shared<ExchangeLog>();
  first().log_exchanges(*exchanges_);
  const std::stop_callback end(given_up, [this] { cancel(); });
  meet_other_nodes();
}

std::unique_ptr<NodeLeader> StepRunner::make_leader(const Checkpoint& checkpoint) {
  if (config_.parallel.nodes == 1) return nullptr;
  return std::make_unique<NodeLeader>(config_.parallel, node_settings(config_, checkpoint),
                                      decided_settings(config_), [this] { give_up_exchanges(); });
}

// A worker goes on its rank's thread, as it came.
StepRunner::~StepRunner() {
  watch_.reset();  // it looks at the workers
  abandon();
  if (mover_) mover_->close();
  draft_.reset();
  head_.reset();
  leader_.reset();  // it ends exchanges of the workers
  ranks_.run([this](int rank) { workers_[static_cast<size_t>(rank)].reset(); });
}

StepBatch& StepRunner::build(const StepPlan& plan, const BatchShape& shape) {
  auto& [builder, block] = places_[static_cast<size_t>(num_batches_++) % places_.size()];
  const int64_t num_bytes = builder.num_bytes(shape);
  if (steps_ != nullptr) {
    const int64_t num_rows = std::ssize(plan.logit_rows);
    const std::span<std::byte> given = steps_->begin(num_bytes, num_rows, shape.num_rows);
    followed_ = {.block = given, .num_rows = num_rows, .max_rows = shape.num_rows};
    return builder.build(plan, shape, given);
  }
  if (std::ssize(block) < num_bytes) block.resize(static_cast<size_t>(num_bytes));
  return builder.build(plan, shape, block);
}

StepRunner::Flight& StepRunner::begin_flight() {
  Flight& flight = flights_.next();
  flight.is_empty = true;
  flight.is_replayed = false;
  flight.sampled.clear();
  flight.num_rows = 0;
  flight.number = num_launched_ + 1;
  return flight;
}

// No step in flight touches their blocks.
void StepRunner::begin_transfers(const StepPlan& plan) {
  if (plan.transfers.empty()) return;
  for (const auto& worker : workers_)
    if (DeviceCopies* const copies = worker->copies())
      copies->follow(num_launched_ - flights_.size());
  for (const Transfer& transfer : plan.transfers) {
    if (!transfer.is_hand_over())
      throw NotSupported("a plan moves blocks between tiers, and this executor has one tier");
    check_internal(mover_ != nullptr, "who hands over has been set up for it");
    mover_->begin(transfer);
  }
}

void StepRunner::launch(const StepPlan& plan) {
  if (!plan.is_empty()) move_experts();
  begin_transfers(plan);
  Flight& flight = begin_flight();
  if (!plan.is_empty()) {
    flight.name = plan.num_prefill_tokens > 0 ? "Prefill" : "Decode";
    const TraceRange range(flight.name);
    std::optional<RecordedShape> recorded;
    if (may_record()) recorded = recorded_shape(plan, limits_);
    const ExpertLoads* const loads = first().expert_loads().get();
    const bool counts_ids = loads != nullptr && loads->is_counting();
    // Then a layer sees the routes of a step in parts, and those that fill it up are in the last.
    if (counts_ids && recorded && recorded->batch.num_tokens > first().backend().mlp_rows())
      recorded.reset();
    StepBatch& batch = build(plan, recorded ? recorded->batch : places_[0].builder.shape_of(plan));
    flight.is_empty = false;
    flight.batch = &batch;
    flight.num_rows = batch.sample_tasks.size();
    flight.only_draws.assign(flight.num_rows, true);
    if (flight.answered.size() < flight.num_rows) {
      flight.answered.resize(flight.num_rows);
      flight.pending.resize(flight.num_rows);
    }
    if (recorded) {
      Draw draw(*this, plan, batch, flight);
      run_recorded({.num_rows = recorded->batch.num_rows,
                    .max_blocks = recorded->batch.max_blocks,
                    .lengths = recorded->lengths,
                    .num_layers = static_cast<int32_t>(plan.wanted_layers.size()),
                    .counts_ids = counts_ids,
                    .draws = recorded->draws,
                    .is_shared = workers_.size() > 1},
                   batch, flight, draw);
    } else if (has_stages()) {
      begin(plan, batch, flight);
    } else {
      run(plan, batch, flight);
    }
    if (steps_ != nullptr) flight.step = steps_->end();
  }
  flights_.launch();
  ++num_launched_;
}

// Under the rejection rule: which guess runs in the place of a row's token.
void StepRunner::tell_guesses(const StepPlan& plan, StepBatch& batch) const {
  for (size_t i = 0; i < plan.logit_rows.size(); ++i) {
    const LogitRow& row = plan.logit_rows[i];
    const ScheduledSequence& sequence = plan.sequences[static_cast<size_t>(row.sequence_idx)];
    if (row.given_token_id >= 0 || row.num_drafted >= sequence.num_drafted) continue;
    SampleTask& task = batch.sample_tasks[i];
    task.guess = plan.tokens_of(sequence).last(
        static_cast<size_t>(sequence.num_drafted))[static_cast<size_t>(row.num_drafted)];
    if (draft_)
      task.guess_probabilities = draft_->drawn_from(row.request_id, row.sample_index, row.position);
  }
}

void StepRunner::run(const StepPlan& plan, StepBatch& batch, Flight& flight) {
  if (!config_.speculation.is_exact()) tell_guesses(plan, batch);
  masks_.begin(batch.sample_tasks);
  if (steps_ != nullptr) steps_->bring_over();
  Draw draw(*this, plan, batch, flight);
  if (leader_) {
    batch.second_half = second_half_of(batch.input, plan.num_prefill_tokens, config_.parallel);
    write_step(batch, config_.cache.block_size, hidden_size(), wire_);
  }
  if (balancer_ && steps_ == nullptr) balancer_->begin_step();
  run_on_ranks([&](int rank) {
    if (rank == 0 && leader_) leader_->run(RankFrameType::kStep, wire_);
    run_rank(rank, flight, draw);
  });
}

void StepRunner::run_rank(int rank, const Flight& flight, StepSink& sink) {
  std::optional<TraceRange> range;  // rank 0's is around launch()
  if (rank > 0) range.emplace(flight.name);
  begin_rank(rank, *flight.batch);
  workers_[static_cast<size_t>(rank)]->run(*flight.batch, sink);
  end_rank(rank, flight);
}

void StepRunner::begin_rank(int rank, const StepBatch& batch) {
  Worker& worker = *workers_[static_cast<size_t>(rank)];
  if (DeviceSteps* const follows = rank > 0 ? worker.steps() : nullptr) {
    follows->follow(followed_.block, followed_.num_rows, followed_.max_rows);
    follows->bring_over();
  }
  worker.prepare(batch);
}

void StepRunner::end_rank(int rank, const Flight& flight) {
  Worker& worker = *workers_[static_cast<size_t>(rank)];
  if (rank > 0 && worker.steps() != nullptr) worker.steps()->end();
  worker.end_step(flight.number);
}

void StepRunner::begin(const StepPlan& plan, StepBatch& batch, Flight& flight) {
  if (!config_.speculation.is_exact()) tell_guesses(plan, batch);
  flight.draw = std::make_unique<Draw>(*this, plan, batch, flight);
  flight.work = {.runner = this, .flight = &flight};
  flight.is_posted = false;
  flight.wire.clear();
  if (num_posted_ == num_begun_++) post(flight);
}

// False: it has to wait until no other step is posted.
bool StepRunner::post(Flight& flight) {
  if (num_posted_ == 0) {
    if (!has_met_) leader_ ? meet_other_nodes() : meet();
  } else if (balancer_) {
    return false;  // places change between two steps
  }
  if (leader_) {
    if (flight.wire.empty())
      write_step(*flight.batch, config_.cache.block_size, hidden_size(), flight.wire);
    if (num_posted_ > 0 && std::ssize(flight.wire) > kMaxUnreadBytes) return false;
  }
  if (balancer_) balancer_->begin_step();
  if (leader_) {
    run_guarded([&] { leader_->run(RankFrameType::kStep, flight.wire); });
    ranks_.await_work(true);
  }
  ranks_.post(flight.work);
  flight.is_posted = true;
  ++num_posted_;
  return true;
}

// The part of rank 0.
void StepRunner::end(Flight& flight) {
  if (!flight.is_posted) post(flight);
  masks_.begin(flight.batch->sample_tasks);
  run_guarded([&] { ranks_.finish(flight.work); });
  --num_posted_;
  --num_begun_;
  if (num_posted_ == 0) ranks_.await_work(false);
}

// Those that had to wait, in their order, as far as they may go now.
void StepRunner::post_waiting() {
  for (int32_t i = 1; i < flights_.size(); ++i) {
    Flight& flight = flights_[i];
    if (!flight.is_empty && !flight.is_posted && !post(flight)) return;
  }
}

std::unique_ptr<HeadWorker> StepRunner::make_head() {
  if (!config_.draft || !find_drafter(config_.speculation.method).has_head()) return nullptr;
  using Work = std::function<void(int rank)>;
  HeadWorker::Target target{.workers = {},
                            .on_each_rank = [this](const Work& work) { ranks_.run(work); },
                            .run_on_ranks = [this](const Work& work) { run_on_ranks(work); },
                            .masks = masks_,
                            .tell = {}};
  if (has_far_head())
    target.tell = [this](RankFrameType type, Bytes payload) { leader_->run(type, payload); };
  for (const auto& worker : workers_) target.workers.push_back(worker.get());
  return std::make_unique<HeadWorker>(head_kind(config_.speculation.method), *config_.draft,
                                      std::move(target));
}

const SampledTokens& StepRunner::wait() {
  if (has_stages() && !flights_.oldest().is_empty) {
    end(flights_.oldest());
    post_waiting();
  }
  Flight& flight = flights_.retire();
  std::swap(sampled_, flight.sampled);
  if (steps_ == nullptr || flight.is_empty) return sampled_;
  const std::span<const DrawnRow> drawn = results_of(flight);
  for (size_t row = 0; row < flight.num_rows; ++row) {
    if (flight.only_draws[row]) {
      sampled_.rows.push_back(
          {.token_id = drawn[row].token_id, .is_valid = drawn[row].is_valid != 0});
    } else {
      Sampler::append(flight.answered[row], flight.pending[row], sampled_);
    }
  }
  return sampled_;
}

int64_t StepRunner::max_exact_rows() const {
  return steps_ == nullptr ? 0 : steps_->max_exact_rows();
}

void StepRunner::cancel() noexcept {
  if (leader_) leader_->cancel();
}

void StepRunner::abandon() noexcept {
  if (num_posted_ > 0) give_up_exchanges();  // of ranks that wait for rank 0
  ranks_.drain();
  ranks_.await_work(false);
  num_posted_ = num_begun_ = 0;
  flights_.clear();
  for (const auto& worker : workers_)
    if (DeviceSteps* const steps = worker->steps()) steps->abandon();
}

// All are drawn on the device, and nobody waits for them here, but for the logits of those that
// have logits processors. One row that asks for more takes all others along: kernels cost more than
// what a plain row asks for.
void StepRunner::draw_rows(const ConstTensor& logits, const StepBatch& batch, size_t begin,
                           Flight& flight) {
  const size_t count = static_cast<size_t>(logits.shape[0]);
  const auto tasks = std::span(batch.sample_tasks).subspan(begin, count);
  if (std::ranges::all_of(tasks, &SampleTask::only_draws))
    steps_->draw(logits, batch.draws.subspan(begin, count), static_cast<int64_t>(begin));
  else
    sample_on_device(logits, batch, begin, flight);
}

// Rows [begin, begin + S') of the step.
void StepRunner::sample_on_device(const ConstTensor& logits, const StepBatch& batch, size_t begin,
                                  Flight& flight) {
  const size_t count = static_cast<size_t>(logits.shape[0]);
  const auto tasks = std::span(batch.sample_tasks).subspan(begin, count);
  std::fill_n(flight.only_draws.begin() + static_cast<int64_t>(begin), count, false);
  late_tokens_.clear();
  for (const SampleTask& task : tasks)
    late_tokens_.push_back(task.params->draw.has_penalties() ? task.late_token : -1);
  const SampleArgs args{
      .logits = logits,
      .rows = sampler_.ask(logits, tasks, std::span(flight.pending).subspan(begin, count)),
      .out = std::span(flight.answered).subspan(begin, count)};
  steps_->sample(args, static_cast<int64_t>(begin),
                 {.token_ids = batch.input.token_ids, .indices = late_tokens_},
                 sampler_.kept_counts());
}

std::shared_ptr<KvMover> StepRunner::open_hand_over(const HandOverOptions& options,
                                                    std::shared_ptr<KvHost> host) {
  if (mover_) throw InvalidArgument("hand-over is open already; make a new engine to change it");
  ranks_.run([this](int rank) { workers_[static_cast<size_t>(rank)]->open_copies(); });
  std::vector<const Worker*> workers;
  for (const auto& worker : workers_) workers.push_back(worker.get());
  std::unique_ptr<KvBlocks> blocks;
  if (leader_)
    blocks = std::make_unique<NodeBlocks>(workers, *leader_);
  else
    blocks = std::make_unique<KvBlockBytes>(workers);
  mover_ = std::make_shared<KvMover>(options, std::move(blocks), config_.cache.num_blocks, news_,
                                     std::move(host));
  return mover_;
}

std::shared_ptr<const ExpertBalancer> StepRunner::balance_experts(
    const ExpertBalanceOptions& options) {
  const ModelConfig& model = first().model().config();
  if (model.experts.num_experts == 0) return Executor::balance_experts(options);
  if (!config_.parallel.has_whole_experts || config_.parallel.tensor == 1)
    throw InvalidArgument(
        "enable_eplb: no experts stand whole on ranks; it needs enable_expert_parallel=True and a "
        "tensor_parallel_size above 1");
  if (steps_ != nullptr && options.num_redundant_experts > 0)
    throw NotSupported(
        "eplb_config: num_redundant_experts on device 'cuda': GPUs have places for one copy of "
        "each expert; leave it out, or use device='cpu'");
  if (leader_)
    throw NotSupported(
        "enable_eplb: an expert that moves is read from another rank's memory, and ranks are on "
        "several nodes; use nnodes=1");
  balancer_ = std::make_shared<ExpertBalancer>(options, model.num_layers, model.experts.num_experts,
                                               config_.parallel.tensor);
  if (steps_ != nullptr) first().expert_loads()->start();
  for (const auto& worker : workers_) worker->balance_by(balancer_);
  for (DeviceSteps* const steps : recorders_) steps->forget_recorded();  // they know no places
  link_experts();
  return balancer_;
}

void StepRunner::link_experts() {
  if (steps_ != nullptr) {
    balancer_->link_devices([loads = first().expert_loads()] {
      std::vector<std::pair<int64_t, std::vector<int64_t>>> rows;
      for (ExpertLoads::Layer& layer : loads->layers())
        rows.emplace_back(layer.layer_idx, std::move(layer.rows));
      return rows;
    });
    return ranks_.run([this](int rank) { workers_[static_cast<size_t>(rank)]->find_experts(); });
  }
  const auto num_ranks = static_cast<size_t>(config_.parallel.tensor);
  for (size_t begin = 0; begin < workers_.size(); begin += num_ranks) {
    std::vector<std::vector<RankExperts>> stage;
    for (size_t rank = 0; rank < num_ranks; ++rank)
      stage.push_back(rank_experts(workers_[begin + rank]->model()));
    balancer_->link(stage);
  }
}

void StepRunner::report_to(NewsSink sink) {
  news_ = sink;
  masks_.report_to([sink = std::move(sink)](RequestId request_id, int32_t sample_index) {
    sink(MaskReady{.request_id = request_id, .sample_index = sample_index});
  });
}

bool StepRunner::do_background_work() {
  if (config_.parallel.pipeline > 1) return false;  // nothing was left for later
  std::atomic<bool> is_more{false};
  ranks_.run([&](int rank) {
    if (workers_[static_cast<size_t>(rank)]->pack_weight()) is_more = true;
  });
  if (draft_) is_more = draft_->pack_weight() || is_more;
  return is_more;
}

bool StepRunner::do_idle_work() {
  if (num_begun_ > 0) return false;
  std::atomic<bool> is_more{false};
  ranks_.run([&](int rank) {
    if (workers_[static_cast<size_t>(rank)]->reserve_blocks()) is_more = true;
  });
  return is_more;
}

void StepRunner::forget(RequestId request_id, int32_t sample_index) {
  sampler_.forget(request_id, sample_index);
  masks_.forget(request_id, sample_index);
}

void StepRunner::check_idle() const {
  check_internal(sampler_.num_slots() == 0, "the sampler keeps nothing of an ended sequence");
  check_internal(masks_.num_matchers() == 0, "no matcher is kept of an ended sequence");
}

std::string StepRunner::description() const {
  const std::string of_one = first().description();
  const int num_ranks = config_.parallel.num_ranks();
  return num_ranks == 1 ? of_one : concat(of_one, ", rank 0 of ", num_ranks);
}

MemoryUse StepRunner::memory_use() const {
  MemoryUse sum;
  for (const std::unique_ptr<Worker>& worker : workers_) sum += worker->memory_use();
  if (draft_) sum += draft_->memory_use();
  if (head_) sum += head_->memory_use();
  return sum;
}

void StepRunner::release(MemoryPart part) {
  if (mover_ && part == MemoryPart::kKvCache) mover_->end_all();
  if (leader_) leader_->order(RankFrameType::kRelease, static_cast<uint8_t>(part));
  ranks_.run([&](int rank) { workers_[static_cast<size_t>(rank)]->release(part); });
  if (draft_) draft_->release(part);
  if (head_) head_->release(part);
}

void StepRunner::restore(MemoryPart part) {
  if (leader_) leader_->order(RankFrameType::kRestore, static_cast<uint8_t>(part));
  ranks_.run([&](int rank) { workers_[static_cast<size_t>(rank)]->restore(part); });
  if (balancer_ && part == MemoryPart::kWeights) link_experts();
  if (draft_) draft_->restore(part);
  if (head_) head_->restore(part);
}

}  // namespace llmserve
