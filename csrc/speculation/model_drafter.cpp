#include "speculation/model_drafter.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "core/error.h"
#include "core/token_hash.h"

namespace llmserve {

ModelDrafter::ModelDrafter(DraftModel& model, DraftSampling sampling,
                           std::shared_ptr<const VocabularyMap> map)
    : model_(model),
      sampling_(sampling),
      map_(std::move(map)),
      kv_cache_(model.cache(), &chain_hash, model.max_step_tokens()) {}

SamplingParams ModelDrafter::params_of(const DraftTask& task) const {
  if (map_) {
    SamplingParams params;
    params.draw.temperature = 0;
    if (std::ssize(map_->shared_draft_ids()) < model_.vocab_size())
      params.allowed_token_ids = map_->shared_draft_ids();
    return params;
  }
  SamplingParams params = *task.params;
  params.n = 1;
  params.logprobs.reset();
  params.logprob_token_ids.clear();
  params.prompt_logprobs.reset();
  if (sampling_ == DraftSampling::kGreedy) params.draw.temperature = 0;
  return params;
}

void ModelDrafter::draft(std::span<const DraftTask> tasks, std::span<std::vector<int32_t>> drafts) {
  ++num_calls_;
  kv_cache_.give_back_replaced();
  for (Job& job : jobs_) drop_twigs(job);  // of a call that was cut off
  jobs_.clear();
  trees_.assign(std::max(trees_.size(), tasks.size()), {});
  for (size_t i = 0; i < tasks.size(); ++i) {
    Job job{
        .task = &tasks[i], .entry = &entry_of(tasks[i]), .draft = &drafts[i], .tree = &trees_[i]};
    if (begin(job)) jobs_.push_back(std::move(job));
  }
  num_to_catch_up_ = model_.max_step_tokens();
  while (run_step()) {
  }
  for (Job& job : jobs_) drop_twigs(job);
}

ModelDrafter::Entry& ModelDrafter::entry_of(const DraftTask& task) {
  const auto [place, is_new] = entries_.try_emplace({task.request_id, task.sample_index});
  Entry& entry = place->second;
  entry.last_used = num_calls_;
  if (!is_new) return entry;
  entry.table.root = root_hash(task.cache_salt);
  entry.table.owner = task.request_id;
  entry.params = params_of(task);
  return entry;
}

// The task's tokens in the model's vocabulary.
std::span<const int32_t> ModelDrafter::known_tokens(const DraftTask& task, Entry& entry) const {
  if (!map_) return task.token_ids;
  for (; entry.num_mapped < task.token_ids.size(); ++entry.num_mapped) {
    const std::span<const int32_t> ids = map_->to_draft(task.token_ids[entry.num_mapped]);
    entry.mapped.insert(entry.mapped.end(), ids.begin(), ids.end());
  }
  return entry.mapped;
}

// The entry has the task's tokens, and of its pool what is theirs: guesses that were right among
// it. False: nothing can be guessed.
bool ModelDrafter::begin(Job& job) {
  Entry& entry = *job.entry;
  if (std::ranges::count(job.task->token_ids, kNoTokenId) > 0) return false;
  const std::span<const int32_t> known = known_tokens(*job.task, entry);
  const int64_t num_tokens = std::ssize(known);
  if (num_tokens == 0 || num_tokens > model_.max_model_len()) return false;
  const int64_t most = std::min(entry.num_computed, num_tokens - 1);
  int64_t keep = std::min(entry.num_known, most);
  while (keep < most &&
         entry.token_ids[static_cast<size_t>(keep)] == known[static_cast<size_t>(keep)])
    ++keep;
  entry.token_ids.resize(static_cast<size_t>(keep));
  entry.token_ids.insert(entry.token_ids.end(), known.begin() + keep, known.end());
  entry.num_known = num_tokens;
  entry.num_computed = keep;
  if (entry.table.num_blocks() > 0) {
    kv_cache_.commit(entry.table, entry.token_ids, keep);
    kv_cache_.truncate(entry.table, keep);
    return true;
  }
  const PrefixMatch match = kv_cache_.find_prefix(entry.table, entry.token_ids);
  kv_cache_.attach(entry.table, match, entry.token_ids);
  entry.num_computed = int64_t{match.num_blocks} * kv_cache_.block_size();
  return true;
}

// Those that no task is of give their blocks back, the longest unused first.
bool ModelDrafter::make_room(const Entry& entry, int64_t num_new_tokens) {
  while (!kv_cache_.can_allocate(entry.table, entry.num_computed, num_new_tokens)) {
    Entry* oldest = nullptr;
    for (auto& [key, other] : entries_) {
      if (other.last_used == num_calls_ || other.table.num_blocks() == 0) continue;
      if (oldest == nullptr || other.last_used < oldest->last_used) oldest = &other;
    }
    if (oldest == nullptr) return false;
    let_go(*oldest);
  }
  return true;
}

void ModelDrafter::let_go(Entry& entry) {
  kv_cache_.release(entry.table);
  entry.num_computed = 0;
}

// One token of each sequence, or what its pool lacks before it: then only those run that lack
// some, so that all have their first guess before any has its second, and the later steps are of
// all. A call catches up with a step's tokens at most: a long prompt of one sequence holds up the
// others no longer. False: all are done.
bool ModelDrafter::run_step() {
  plan_.clear();
  contexts_.clear();
  owners_.clear();
  const auto lacks = [](const Job& job) {
    return !job.is_done && job.entry->num_computed < job.entry->num_known;
  };
  const bool is_catching_up = std::ranges::any_of(jobs_, lacks);
  int64_t budget = is_catching_up ? num_to_catch_up_ : model_.max_step_tokens();
  for (Job& job : jobs_) {
    if (is_catching_up && !lacks(job)) continue;
    for (size_t twig = 0; twig < job.twigs.size() && budget > 0; ++twig) {
      --budget;
      plan_twig(job, twig);
    }
    if (job.is_done) continue;
    if (budget == 0) job.is_done = is_catching_up;  // it goes on in the next call
    Entry& entry = *job.entry;
    const int64_t num_tokens =
        std::min<int64_t>(std::ssize(entry.token_ids) - entry.num_computed, budget);
    if (num_tokens == 0) continue;
    if (!make_room(entry, num_tokens)) {
      job.is_done = true;
      continue;
    }
    budget -= num_tokens;
    if (is_catching_up) num_to_catch_up_ -= num_tokens;
    plan_tokens(job, num_tokens);
  }
  if (plan_.is_empty())  // those that lack some are done now, and others may go on
    return is_catching_up && !std::ranges::all_of(jobs_, &Job::is_done);
  take_rows(model_.run(plan_, contexts_));
  return true;
}

void ModelDrafter::plan_tokens(Job& job, int64_t num_tokens) {
  const DraftTask& task = *job.task;
  Entry& entry = *job.entry;
  const int64_t start = entry.num_computed;
  kv_cache_.allocate(entry.table, start, num_tokens, plan_.copies);
  plan_.sequences.push_back({.request_id = task.request_id,
                             .sample_index = task.sample_index,
                             .first_token = static_cast<int32_t>(plan_.token_ids.size()),
                             .num_tokens = static_cast<int32_t>(num_tokens),
                             .start_position = start,
                             .block_tables = entry.table.blocks,
                             .is_prefill = num_tokens > 1});
  const auto first = entry.token_ids.begin() + start;
  plan_.token_ids.insert(plan_.token_ids.end(), first, first + num_tokens);
  entry.num_computed = start + num_tokens;
  if (entry.num_computed < std::ssize(entry.token_ids)) return;
  const int64_t position = entry.num_computed;
  LogitRow row = row_of(job, position);
  row.token_offset = static_cast<int32_t>(num_tokens - 1);
  row.token_ids = entry.token_ids;
  plan_.logit_rows.push_back(row);
  contexts_.push_back({.token_ids = entry.token_ids,
                       .num_drafted = static_cast<int32_t>(position - entry.num_known),
                       .num_choices = num_choices(job, job.tip.node)});
  owners_.push_back({.job = &job});
}

// Of the token at a position, for the step's last sequence.
LogitRow ModelDrafter::row_of(const Job& job, int64_t position) const {
  const DraftTask& task = *job.task;
  const SamplingParams& params = job.entry->params;
  const int64_t num_prompt_tokens = map_ ? 0 : task.num_prompt_tokens;
  const bool may_stop = map_ || position - num_prompt_tokens >= params.min_tokens;
  return {.sequence_idx = static_cast<int32_t>(plan_.sequences.size() - 1),
          .request_id = task.request_id,
          .sample_index = task.sample_index,
          .seed = task.seed,
          .position = position,
          .params = &params,
          .num_prompt_tokens = num_prompt_tokens,
          .banned_token_ids = may_stop ? std::span<const int32_t>() : task.stop_token_ids};
}

// Of a row behind a guess; the second says how sure the first is.
int32_t ModelDrafter::num_choices(const Job& job, int32_t node) const {
  if (job.task->tree == nullptr) return 1;
  return std::max(2, job.tree->num_wanted(job.task->tree->config, node));
}

// A twig's last token, whose row draws what may come behind it. Requests with trees have no edits,
// so that nobody reads a row's tokens.
void ModelDrafter::plan_twig(Job& job, size_t twig_idx) {
  Twig& twig = job.twigs[twig_idx];
  const Entry& entry = *job.entry;
  const int64_t start = entry.num_known + twig.tip.num_guesses - 1;
  if (!kv_cache_.can_allocate(twig.table, start, 1)) return;
  kv_cache_.allocate(twig.table, start, 1, plan_.copies);
  plan_.sequences.push_back({.request_id = job.task->request_id,
                             .sample_index = job.task->sample_index,
                             .first_token = static_cast<int32_t>(plan_.token_ids.size()),
                             .num_tokens = 1,
                             .start_position = start,
                             .block_tables = twig.table.blocks});
  plan_.token_ids.push_back(job.tree->nodes[static_cast<size_t>(twig.tip.node)].token_id);
  LogitRow row = row_of(job, start + 1);
  row.token_ids = job.task->token_ids;
  plan_.logit_rows.push_back(row);
  contexts_.push_back(
      {.token_ids = job.task->token_ids, .num_choices = num_choices(job, twig.tip.node)});
  owners_.push_back({.job = &job, .twig = static_cast<int32_t>(twig_idx)});
}

void ModelDrafter::take_rows(const SampledTokens& sampled) {
  for (size_t row = 0; row < owners_.size(); ++row) {
    const RowOwner& owner = owners_[row];
    Job& job = *owner.job;
    if (owner.twig < 0) take_guess(job, sampled.rows[row]);
    if (job.task->tree == nullptr) continue;
    grow(owner, model_.choices(row));
    if (row + 1 == owners_.size() || owners_[row + 1].job != &job) choose_twigs(job);
  }
}

bool ModelDrafter::ends_text(const DraftTask& task, int32_t token_id, int64_t num_guesses) const {
  const int64_t num_generated = std::ssize(task.token_ids) + num_guesses - task.num_prompt_tokens;
  return num_generated >= task.params->min_tokens &&
         std::ranges::binary_search(task.stop_token_ids, token_id);
}

// The row's choices are guesses of one place, behind which others may be.
void ModelDrafter::grow(const RowOwner& owner, std::span<const DraftChoice> choices) {
  Job& job = *owner.job;
  const DraftTask& task = *job.task;
  const bool is_own = owner.twig < 0;
  Twig* const twig = is_own ? nullptr : &job.twigs[static_cast<size_t>(owner.twig)];
  const BlockTable* const table = is_own ? &job.entry->table : &twig->table;
  const auto may_go_on = [&](int32_t token_id, int32_t num_guesses) {
    return std::ssize(task.token_ids) + num_guesses < model_.max_model_len() &&
           !ends_text(task, token_id, num_guesses);
  };
  grow_tree(*job.tree, *task.tree, is_own ? job.tip : twig->tip, is_own, choices, task.max_tokens,
            may_go_on, [&](const TreeTip& tip) { buds_.push_back({.tip = tip, .table = table}); });
  if (is_own && job.tree->num_wanted(task.tree->config, job.tip.node) == 0) job.is_done = true;
}

// The likeliest are gone on from, and all of a tree that is given. Their tables are made while
// those they come from hold what is before them and nothing else.
void ModelDrafter::choose_twigs(Job& job) {
  const SpeculationConfig& config = job.task->tree->config;
  std::ranges::stable_sort(buds_, std::ranges::greater(),
                           [](const Bud& bud) { return bud.tip.survival; });
  if (config.token_tree.empty() && std::ssize(buds_) > config.tree_width)
    buds_.resize(static_cast<size_t>(config.tree_width));
  std::vector<Twig> twigs(buds_.size());
  for (size_t i = 0; i < buds_.size(); ++i) {
    twigs[i].tip = buds_[i].tip;
    kv_cache_.fork(*buds_[i].table, twigs[i].table);
  }
  buds_.clear();
  drop_twigs(job);
  job.twigs = std::move(twigs);
}

void ModelDrafter::drop_twigs(Job& job) {
  for (Twig& twig : job.twigs) kv_cache_.release(twig.table);
  job.twigs.clear();
}

void ModelDrafter::take_guess(Job& job, const SampledToken& token) {
  const DraftTask& task = *job.task;
  Entry& entry = *job.entry;
  job.is_done = true;
  if (token.awaits_mask) return;
  if (!token.is_valid) {
    if (token.error_idx < 0)
      throw DeviceError(concat("the draft model's logits of position ", std::ssize(entry.token_ids),
                               " are not finite"));
    return;  // nothing may be drawn there, as the target will find
  }
  const int32_t token_id = map_ ? map_->to_target(token.token_id) : token.token_id;
  if (token_id < 0) return;
  entry.token_ids.push_back(token.token_id);
  job.draft->push_back(token_id);
  const bool ends = token.is_end || ends_text(task, token_id, std::ssize(*job.draft));
  job.is_done = ends || std::ssize(*job.draft) >= task.max_tokens ||
                std::ssize(entry.token_ids) > model_.max_model_len();
}

void ModelDrafter::forget(RequestId request_id, int32_t sample_index, bool) {
  const auto place = entries_.find({request_id, sample_index});
  if (place == entries_.end()) return;
  // What is certain of it may serve others.
  Entry& entry = place->second;
  const int64_t num_certain = std::min(entry.num_known, entry.num_computed);
  if (entry.table.num_blocks() > 0) kv_cache_.commit(entry.table, entry.token_ids, num_certain);
  kv_cache_.release(entry.table);
  kv_cache_.give_back_replaced();
  model_.forget(request_id, sample_index);
  entries_.erase(place);
}

void ModelDrafter::reset() {
  for (auto& [key, entry] : entries_) let_go(entry);
  kv_cache_.reset_prefix_cache({});
}

void ModelDrafter::check_integrity() const {
  std::vector<const BlockTable*> tables;
  for (const auto& [key, entry] : entries_) tables.push_back(&entry.table);
  for (const Job& job : jobs_)
    for (const Twig& twig : job.twigs) tables.push_back(&twig.table);
  kv_cache_.check_integrity(tables);
}

}  // namespace llmserve
