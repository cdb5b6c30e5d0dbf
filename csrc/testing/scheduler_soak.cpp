#include "testing/scheduler_soak.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/mix.h"
#include "scheduler/scheduler.h"
#include "testing/cache_groups.h"
#include "testing/soak_records.h"
#include "testing/token_oracle.h"

// GCC 12 takes the inactive members of a std::variant that is moved for uninitialized ones.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace llmserve {
namespace {

// Few tokens and salts, so that prompts share prefixes and stop tokens are drawn.
constexpr int32_t kVocabSize = 16;
constexpr int32_t kStopToken = 3;
constexpr int32_t kMaxSamples = 4;
constexpr int32_t kMaxTokens = 12;
constexpr int64_t kOperationsBetweenEnds = 500;
constexpr int32_t kNumAdapters = 2;

using soak::Asked, soak::HandedOver, soak::Sample;

// A step that has been carried out and not been committed.
struct Flight {
  SampledTokens sampled;
  std::vector<int32_t> blocks;  // that it reads or writes
};

// Tokens of the longest sequence that the pool can hold.
int64_t longest_sequence(const SoakConfig& config) {
  const std::vector<CacheGroupSpec> groups = groups_of_windows(config.windows);
  int64_t num_tokens = 0;
  while (max_blocks_held(groups, num_tokens + 1, config.block_size,
                         config.max_num_batched_tokens) <= config.num_blocks)
    ++num_tokens;
  return num_tokens;
}

class Soak {
 public:
  explicit Soak(const SoakConfig& config)
      : config_(config),
        capacity_(longest_sequence(config)),
        // Everybody who has a seat, one after another, each sample twice from the start.
        max_stall_(int64_t{config.max_num_seqs} * kMaxSamples * 2 * capacity_),
        scheduler_({.policy = config.policy,
                    .max_num_batched_tokens = config.max_num_batched_tokens,
                    .max_num_seqs = config.max_num_seqs,
                    .max_model_len = capacity_ + 2 * kMaxTokens,
                    .max_batch_delay_us = 50},
                   {.block_size = config.block_size,
                    .num_blocks = config.num_blocks,
                    .enable_prefix_caching = config.enable_prefix_caching,
                    .groups = groups_of_windows(config.windows, config.num_state_slots),
                    .lower_tier = {.num_blocks = config.num_lower_blocks, .max_stores = 4},
                    .num_state_slots = config.num_state_slots},
                   nullptr, clock_,
                   {.max_in_flight = config.max_in_flight,
                    .runs_ahead = config.runs_ahead,
                    .hasher = config.forge_collisions ? &forged_hash : &chain_hash}),
        model_(config.num_blocks, config.block_size, kVocabSize, config.windows,
               config.num_lower_blocks, config.num_state_slots) {}

  SoakCounts run(int64_t num_operations) {
    for (; counts_.num_operations < num_operations; ++counts_.num_operations) {
      operate(static_cast<int32_t>(below(1000)));
      check();
      if (counts_.num_operations % kOperationsBetweenEnds == kOperationsBetweenEnds - 1) end_all();
    }
    end_all();
    EngineMetrics metrics;
    scheduler_.fill_metrics(metrics);
    counts_.num_preemptions = metrics.num_preemptions;
    counts_.num_hits = metrics.prefix_cache_hits;
    counts_.num_evictions = metrics.prefix_cache_evictions;
    counts_.num_accepted = scheduler_.committer().num_accepted_tokens();
    for (const SequenceTransition& t : sequence_transitions()) {
      counts_.transitions.emplace_back(concat(name(t.from), " ", name(t.event)),
                                       scheduler_.book().num_transitions(t.from, t.event));
    }
    return counts_;
  }

 private:
  uint64_t below(uint64_t bound) { return mix64(config_.seed, num_draws_++) % bound; }
  bool happens(uint64_t percent) { return below(100) < percent; }

  void operate(int32_t per_mille) {
    if (per_mille < 150) {
      add();
    } else if (per_mille < 900) {
      step([] {});
    } else if (per_mille < 920) {
      abort();
    } else if (per_mille < 940) {
      step([this] { abort(); });
    } else if (per_mille < 950) {
      step([this] { add(); });
    } else if (per_mille < 955) {
      step([this] { scheduler_.reset_prefix_cache(); });
    } else if (per_mille < 985) {
      finish_steps(0);
      scheduler_.preempt(pick());
    } else if (per_mille < 994) {
      scheduler_.reset_prefix_cache();
    } else if (per_mille < 996) {
      flights_.clear();  // what was in flight went with the rank, and so did the KV cache
      model_.forget();
      break_sends();
      scheduler_.take(RankLost());
      take(scheduler_.take_result().events);
      ++counts_.num_restarts;
    } else if (per_mille < 997) {
      fail();
    } else if (per_mille < 998) {
      keep_transfers(scheduler_.schedule());  // a step that never comes back
      fail();
    } else {
      fail_step();
    }
  }

  void add() {
    Request request{.id = next_id_++,
                    .prompt_token_ids = {},
                    .params = {.n = happens(70) ? 1 : 1 + static_cast<int32_t>(below(kMaxSamples)),
                               .stop_token_ids = {kStopToken},
                               .max_tokens = 1 + static_cast<int32_t>(below(kMaxTokens))},
                    .seed = below(4),
                    .priority = static_cast<int32_t>(below(3)),
                    .cache_salt = happens(50) ? "" : "x",
                    .has_drafter = happens(static_cast<uint64_t>(config_.percent_drafted)),
                    .arrival_us = clock_.now_us(),
                    .is_streamed = happens(80)};
    request.params.min_tokens = happens(30) ? request.params.max_tokens / 2 : 0;
    const uint64_t length = 1 + below(static_cast<uint64_t>(capacity_) + 1);
    while (request.prompt_token_ids.size() < length) {
      request.prompt_token_ids.push_back(static_cast<int32_t>(below(2)));
    }
    // A forged hash is that of all roots.
    if (!config_.forge_collisions && happens(40)) request.adapter = adapter();
    if (config_.percent_handed_over > 0) hand_over(request);
    Asked asked{.params = request.params,
                .num_prompt_tokens = std::ssize(request.prompt_token_ids),
                .adapter = request.adapter,
                .send_to = request.send_to};
    for (int32_t i = 0; i < request.params.n; ++i) {
      asked.samples.push_back(
          {.token_ids = request.prompt_token_ids, .seed = sample_seed(request.seed, i)});
    }
    const RequestId id = request.id;
    if (asked.params.n == 1 && request.params.max_tokens > 1 && happens(10)) resume(request, asked);
    try {
      scheduler_.admission().admit(request);
      scheduler_.add(std::move(request));
    } catch (const ResourceExhausted&) {
      require(std::ssize(asked.samples[0].token_ids) >= capacity_,
              "a prompt that fits with a token is taken");
      ++counts_.num_refused;
      return;
    }
    ++counts_.num_requests;
    counts_.num_forked += asked.params.n - 1;
    counts_.num_adapted += asked.adapter ? 1 : 0;
    asked_.emplace(id, std::move(asked));
  }

  // Of two with one name each has weights of its own.
  AdapterRef adapter() {
    AdapterRef adapter{.name = "a", .index = static_cast<int32_t>(below(kNumAdapters))};
    adapter.digest.bytes.fill(static_cast<uint8_t>(1 + adapter.index));
    return adapter;
  }

  // Its blocks go to a peer at its end, or it goes on with those of another one.
  void hand_over(Request& request) {
    if (request.params.n > 1 || !happens(static_cast<uint64_t>(config_.percent_handed_over)))
      return;
    if (!handed_over_.empty() && happens(60)) {
      HandedOver& last = handed_over_.back();
      request.prompt_token_ids = std::move(last.token_ids);
      request.adapter = std::move(last.adapter);
      request.receive_from = last.hand_over;
      handed_over_.pop_back();
    }
    if (happens(70)) request.send_to = {.peer = 1, .id = next_hand_over_++};
  }

  // What a lost rank was sending is lost, too.
  void break_sends() {
    for (const Transfer& transfer : transfers_) {
      if (transfer.to != MemoryTier::kPeer) continue;
      ++counts_.num_broken;
      news_.emplace_back(TransferFailed{transfer.id});
    }
    std::erase_if(transfers_,
                  [](const Transfer& transfer) { return transfer.to == MemoryTier::kPeer; });
  }

  // It has had some of its tokens elsewhere, none of which was its last.
  void resume(Request& request, Asked& asked) {
    Sample& sample = asked.samples[0];
    const uint64_t count = below(static_cast<uint64_t>(request.params.max_tokens));
    for (uint64_t i = 0; i < count; ++i) {
      const int32_t token_id = next_token(asked, sample);
      if (token_id == kStopToken) break;
      sample.token_ids.push_back(token_id);
      request.resumed_token_ids.push_back(token_id);
    }
    if (!request.resumed_token_ids.empty()) ++counts_.num_resumed;
  }

  // Behind the sequence's tokens and `guesses`, most of them right.
  void guess(const Sequence& sequence, std::vector<int32_t>& guesses) {
    std::vector<int32_t> context = sequence.token_ids;
    context.insert(context.end(), guesses.begin(), guesses.end());
    for (uint64_t i = 0; i <= below(4); ++i) {
      const int32_t right = ShadowModel::next_token(context, sequence.seed, kVocabSize);
      context.push_back(happens(75) ? right : static_cast<int32_t>(below(kVocabSize)));
      guesses.push_back(context.back());
    }
  }

  // Guesses of what comes next, some of another place, and others that begin like them; what has
  // masks has no others.
  void draft() {
    for (const Sequence* sequence : scheduler_.sequences()) {
      if (!sequence->has_drafter || !happens(80)) continue;
      DraftReady news{.request_id = sequence->request_id,
                      .sample_index = sequence->sample_index,
                      .position = sequence->num_tokens() - static_cast<int64_t>(happens(5))};
      guess(*sequence, news.token_ids);
      while (config_.percent_late_masks == 0 && happens(30)) {
        std::vector<int32_t>& other = news.branches.emplace_back(news.token_ids);
        other.resize(below(other.size() + 1));
        guess(*sequence, other);
      }
      news_.emplace_back(std::move(news));
    }
  }

  void keep_transfers(const StepPlan& plan) {
    transfers_.insert(transfers_.end(), plan.transfers.begin(), plan.transfers.end());
  }

  // Some transfers end, in any order; some of them with a part of their blocks alone.
  void end_transfers(uint64_t percent) {
    for (size_t i = 0; i < transfers_.size();) {
      std::swap(transfers_[i], transfers_[i + below(transfers_.size() - i)]);
      if (!happens(percent)) {
        ++i;
        continue;
      }
      const Transfer& transfer = transfers_[i];
      // A peer that has not got the blocks yet, or never will, has none to give.
      const bool is_done =
          transfer.is_withdrawal ||
          (happens(85) && (transfer.from != MemoryTier::kPeer || model_.has_sent(transfer)));
      if (is_done || transfer.from != MemoryTier::kPeer)
        model_.carry_out(transfer, is_done || transfer.moves.empty()
                                       ? transfer.moves.size()
                                       : below(transfer.moves.size()));
      if (is_done) {
        count_done(transfer);
        news_.emplace_back(TransferDone{transfer.id});
      } else {
        ++counts_.num_broken;
        news_.emplace_back(TransferFailed{transfer.id});
      }
      if (happens(5)) news_.emplace_back(TransferDone{transfer.id + 1'000'000});  // of no transfer
      transfers_.erase(transfers_.begin() + static_cast<int64_t>(i));
    }
  }

  void count_done(const Transfer& transfer) {
    if (transfer.is_hand_over()) {
      ++(transfer.to == MemoryTier::kPool ? counts_.num_receives : counts_.num_sends);
    } else {
      ++(transfer.to == MemoryTier::kPool ? counts_.num_loads : counts_.num_stores);
    }
  }

  // In any order, some of them late.
  void give_news() {
    for (size_t i = 0; i < news_.size();) {
      std::swap(news_[i], news_[i + below(news_.size() - i)]);
      if (happens(10)) {
        ++i;
        continue;
      }
      scheduler_.take(std::move(news_[i]));
      news_.erase(news_.begin() + static_cast<int64_t>(i));
    }
  }

  template <class Meanwhile>
  void step(Meanwhile meanwhile) {
    clock_.advance_us(10);
    ++counts_.num_steps;
    draft();
    end_transfers(60);
    give_news();
    const Sequence* first = nullptr;
    for (const Sequence* sequence : scheduler_.sequences()) {
      if (first == nullptr || ServedBefore()(sequence, first)) first = sequence;
    }
    const auto key = first == nullptr ? std::pair<RequestId, int32_t>(-1, 0)
                                      : std::pair(first->context->request.id, first->sample_index);
    const StepPlan& plan = scheduler_.schedule();
    check_plan(plan, key);
    SampledTokens sampled = model_.execute(plan);
    const bool has_late = config_.percent_late_masks > 0 && delay_masks(plan, sampled);
    if (!sampled.rows.empty() && !has_late && happens(1)) spoil(plan, sampled);
    flights_.push_back({.sampled = std::move(sampled), .blocks = blocks_read(plan)});
    keep_transfers(plan);
    counts_.num_snapshots += std::ssize(plan.state_copies);
    for (const ScheduledSequence& sequence : plan.sequences) {
      if (sequence.awaited_row >= 0) ++counts_.num_awaited;
      counts_.num_drafted += sequence.num_drafted;
    }
    meanwhile();
    finish_steps(plan.is_empty() ? 0 : config_.max_in_flight - 1);
  }

  void finish_steps(int32_t num_left) {
    while (std::ssize(flights_) > num_left) {
      const SampledTokens sampled = std::move(flights_.front().sampled);
      flights_.pop_front();
      take(scheduler_.commit(sampled).events);
      counts_.num_dropped += std::ssize(scheduler_.ended_in_flight());
    }
  }

  std::vector<int32_t> blocks_read(const StepPlan& plan) const {
    std::vector<int32_t> blocks;
    for (const ScheduledSequence& sequence : plan.sequences) {
      for (size_t g = 0; g < config_.windows.size(); ++g) {
        const std::vector<int32_t>& table = sequence.block_tables[g];
        const int64_t begin =
            first_needed_block({config_.windows[g]}, sequence.start_position, config_.block_size);
        blocks.insert(blocks.end(), table.begin() + begin, table.end());
      }
    }
    return blocks;
  }

  void check_plan(const StepPlan& plan, std::pair<RequestId, int32_t> first) {
    int64_t num_tokens = 0;
    bool has_first = false;
    for (const ScheduledSequence& sequence : plan.sequences) {
      require(sequence.num_tokens > 0, "a scheduled sequence runs a token");
      const auto found = asked_.find(sequence.request_id);  // none: ended with the step before
      require(found == asked_.end() ||
                  sequence.adapter == (found->second.adapter ? found->second.adapter->index : -1),
              "a sequence runs with the adapter of its request");
      num_tokens += sequence.num_tokens;
      has_first |= std::pair(sequence.request_id, sequence.sample_index) == first;
    }
    require(num_tokens == plan.num_tokens() && num_tokens <= config_.max_num_batched_tokens,
            "a step's tokens are counted and fit the budget");
    require(plan.num_sequences() <= config_.max_num_seqs, "a step's sequences have a seat");
    counts_.num_copied += std::ssize(plan.copies);
    stall_ = has_first || first != first_ ? 0 : stall_ + 1;
    first_ = first;
    counts_.longest_stall = std::max(counts_.longest_stall, stall_);
    require(stall_ <= max_stall_, "whoever is served first is not passed over for ever");
  }

  // Nothing is drawn from some rows, and their masks come later. Whether any.
  bool delay_masks(const StepPlan& plan, SampledTokens& sampled) {
    int32_t last_sequence = -1;
    for (size_t i = 0; i < plan.logit_rows.size(); ++i) {
      const LogitRow& row = plan.logit_rows[i];
      if (row.num_drafted > 0 && last_sequence == row.sequence_idx) {
        sampled.rows[i].awaits_mask = true;  // with the first
        continue;
      }
      const ScheduledSequence& sequence = plan.sequences[static_cast<size_t>(row.sequence_idx)];
      if (row.is_awaitable || row.given_token_id >= 0 || sequence.state_slot != kNoSlot ||
          !happens(static_cast<uint64_t>(config_.percent_late_masks)))
        continue;
      last_sequence = row.sequence_idx;
      sampled.rows[i].awaits_mask = true;
      ++counts_.num_late_masks;
      news_.emplace_back(MaskReady{.request_id = row.request_id, .sample_index = row.sample_index});
    }
    return last_sequence >= 0;
  }

  void spoil(const StepPlan& plan, SampledTokens& sampled) {
    const size_t row = below(sampled.rows.size());
    sampled.rows[row].is_valid = false;
    const ScheduledSequence& sequence = plan.sequences[plan.logit_rows[row].sequence_idx];
    asked_.at(sequence.request_id).samples[plan.logit_rows[row].sample_index].is_spoiled = true;
  }

  RequestId pick() { return next_id_ - 1 - static_cast<RequestId>(below(8)); }

  void abort() {
    const RequestId id = pick();
    const auto found = asked_.find(id);
    if (found != asked_.end()) found->second.is_cut_short = true;
    scheduler_.abort(id);
    take(scheduler_.take_result().events);
  }

  void fail() {
    for (auto& [id, asked] : asked_) asked.is_cut_short = true;
    flights_.clear();
    scheduler_.fail("asked to");
    take(scheduler_.take_result().events);
    require(!scheduler_.has_unfinished(), "a failure ends every request");
  }

  // Its work has been done, and comes to nothing.
  void fail_step() {
    const StepPlan& plan = scheduler_.schedule();
    keep_transfers(plan);
    model_.execute(plan);
    std::set<RequestId> failed;
    for (const ScheduledSequence& sequence : plan.sequences) failed.insert(sequence.request_id);
    for (const RequestId id : failed) asked_.at(id).is_cut_short = true;
    // Those of the step before, too, as far as they have not ended.
    if (!flights_.empty())
      for (auto& [id, asked] : asked_) asked.is_cut_short = true;
    flights_.clear();
    scheduler_.fail_step("asked to");
    take(scheduler_.take_result().events);
    for (const RequestId id : failed)
      require(!asked_.contains(id), "a failed step ends its requests");
  }

  void take(const std::vector<TokenEvent>& events) {
    for (const TokenEvent& event : events) {
      const auto found = asked_.find(event.request_id);
      require(found != asked_.end(), "no event follows a request's last one");
      Asked& asked = found->second;
      Sample& sample = asked.samples.at(static_cast<size_t>(event.sample_index));
      require(!sample.is_finished, "no event follows a sample's last one");
      require(event.seed == sample.seed, "an event reports its sample's seed");
      for (const int32_t token_id : event.token_ids) check_token(asked, sample, token_id);
      if (event.finish_reason != FinishReason::kNone) check_end(asked, sample, event);
      const bool is_over =
          std::ranges::all_of(asked.samples, [](const Sample& s) { return s.is_finished; });
      require(event.is_request_finished == is_over, "a request ends with its last sample");
      if (is_over) asked_.erase(found);
    }
  }

  static int32_t next_token(const Asked& asked, const Sample& sample) {
    const int64_t num_generated = std::ssize(sample.token_ids) - asked.num_prompt_tokens;
    const bool may_stop = num_generated >= asked.params.min_tokens;
    return ShadowModel::next_token(
        sample.token_ids, sample.seed, kVocabSize,
        may_stop ? std::span<const int32_t>() : std::span(asked.params.stop_token_ids));
  }

  void check_token(const Asked& asked, Sample& sample, int32_t token_id) {
    require(token_id == next_token(asked, sample), "a token is the one that prompt and seed give");
    sample.token_ids.push_back(token_id);
  }

  void check_end(const Asked& asked, Sample& sample, const TokenEvent& event) {
    sample.is_finished = true;
    const bool is_whole =
        event.finish_reason == FinishReason::kStop || event.finish_reason == FinishReason::kLength;
    if (asked.send_to && is_whole)
      handed_over_.push_back({*asked.send_to, sample.token_ids, asked.adapter});
    const int64_t num_tokens = std::ssize(sample.token_ids);
    const int64_t num_generated = num_tokens - asked.num_prompt_tokens;
    switch (event.finish_reason) {
      case FinishReason::kStop:
        ++counts_.num_stopped;
        require(sample.token_ids.back() == kStopToken && num_generated > asked.params.min_tokens,
                "a sample stops at a stop token, not before min_tokens");
        break;
      case FinishReason::kLength:
        ++counts_.num_full;
        require(num_generated == asked.params.max_tokens, "a full sample has max_tokens");
        break;
      case FinishReason::kAbort:
        ++counts_.num_aborted;
        require(asked.is_cut_short, "only an aborted request ends so");
        break;
      default:
        ++counts_.num_failed;
        require(asked.is_cut_short || sample.is_spoiled || num_tokens == capacity_ + 1,
                "a sample fails with its logits, its engine or its pool");
    }
  }

  // Independent of the scheduler's own check: reference counts from the tables alone.
  void check() {
    scheduler_.check_integrity();
    const KvCacheManager& kv_cache = scheduler_.kv_cache();
    for (const Flight& flight : flights_) {
      for (const int32_t block : flight.blocks)
        require(kv_cache.ref_count(block) > 0, "what a step in flight reads is held for it");
    }
    for (const Transfer& transfer : transfers_) {
      for (const BlockMove& move : transfer.moves)
        require(kv_cache.ref_count(transfer.to == MemoryTier::kPool ? move.destination
                                                                    : move.source) > 0,
                "what a transfer reads or writes is held for it");
    }
    // What has left a table is a transfer's alone.
    if (config_.num_lower_blocks > 0 || config_.percent_handed_over > 0) return;
    holders_.assign(static_cast<size_t>(config_.num_blocks), 0);
    std::vector<const Sequence*> kept = scheduler_.sequences();
    for (const Sequence* sequence : kept)
      require(asked_.contains(sequence->context->request.id), "only unfinished requests are kept");
    const std::vector<const Sequence*> ended = scheduler_.ended_in_flight();
    kept.insert(kept.end(), ended.begin(), ended.end());
    const auto count = [&](int32_t block) { ++holders_[static_cast<size_t>(block)]; };
    for (const Sequence* sequence : kept) {
      sequence->table.for_each_block(count);
      for (const DraftBranch& branch : sequence->branches) branch.table.for_each_block(count);
    }
    for (const int32_t block : kv_cache.replaced()) ++holders_[static_cast<size_t>(block)];
    int32_t num_held = 0;
    for (int32_t block = 0; block < config_.num_blocks; ++block) {
      const int32_t num_holders = holders_[static_cast<size_t>(block)];
      require(kv_cache.ref_count(block) == num_holders, "each reference has its holder");
      num_held += num_holders > 0 ? 1 : 0;
    }
    require(
        kv_cache.num_free_blocks() + kv_cache.num_cached_blocks() + num_held == config_.num_blocks,
        "free + cached + referenced = total");
    require(scheduler_.has_unfinished() == (!asked_.empty() || !ended.empty()),
            "unfinished requests are known");
  }

  void end_all() {
    const int64_t max_steps = max_stall_ * (1 + std::ssize(asked_));
    for (int64_t i = 0; scheduler_.has_unfinished(); ++i) {
      require(i < max_steps, "every request ends");
      step([] {});
      check();
    }
    require(flights_.empty(), "whoever is in flight has not ended");
    while (!news_.empty() || scheduler_.kv_cache().num_transfers() > 0) {
      step([] {});
      check();
    }
    require(scheduler_.kv_cache().num_used_blocks() == 0, "every block comes back");
    handed_over_.clear();
    model_.forget_sent();
  }

  void require(bool holds, const char* invariant) const {
    if (!holds) {
      throw InternalError(concat("operation ", counts_.num_operations, ", seed ", config_.seed,
                                 ": broken: ", invariant));
    }
  }

  const SoakConfig config_;
  const int64_t capacity_;   // tokens of the longest sequence
  const int64_t max_stall_;  // steps
  ManualClock clock_;
  Scheduler scheduler_;
  ShadowModel model_;
  SoakCounts counts_;
  std::map<RequestId, Asked> asked_;  // unfinished
  std::deque<Flight> flights_;        // the oldest first
  std::vector<News> news_;            // not given yet
  std::vector<Transfer> transfers_;   // under way
  std::vector<HandedOver> handed_over_;
  int64_t next_hand_over_ = 0;
  std::vector<int32_t> holders_;  // [N]
  std::pair<RequestId, int32_t> first_;
  int64_t stall_ = 0;
  RequestId next_id_ = 0;
  uint64_t num_draws_ = 0;
};

}  // namespace

SoakCounts soak_scheduler(const SoakConfig& config, int64_t num_operations) {
  return Soak(config).run(num_operations);
}

}  // namespace llmserve
