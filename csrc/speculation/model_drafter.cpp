#include "speculation/model_drafter.h"

#include <algorithm>

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
  jobs_.clear();
  for (size_t i = 0; i < tasks.size(); ++i) {
    Job job{.task = &tasks[i], .entry = &entry_of(tasks[i]), .draft = &drafts[i]};
    if (begin(job)) jobs_.push_back(job);
  }
  num_to_catch_up_ = model_.max_step_tokens();
  while (run_step()) {
  }
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
  row_jobs_.clear();
  const auto lacks = [](const Job& job) {
    return !job.is_done && job.entry->num_computed < job.entry->num_known;
  };
  const bool is_catching_up = std::ranges::any_of(jobs_, lacks);
  int64_t budget = is_catching_up ? num_to_catch_up_ : model_.max_step_tokens();
  for (Job& job : jobs_) {
    if (job.is_done || (is_catching_up && !lacks(job))) continue;
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
  const SampledTokens& sampled = model_.run(plan_, contexts_);
  for (size_t row = 0; row < row_jobs_.size(); ++row)
    take_guess(*row_jobs_[row], sampled.rows[row]);
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
  const int64_t num_prompt_tokens = map_ ? 0 : task.num_prompt_tokens;
  const bool may_stop = map_ || position - num_prompt_tokens >= entry.params.min_tokens;
  plan_.logit_rows.push_back(
      {.sequence_idx = static_cast<int32_t>(plan_.sequences.size() - 1),
       .token_offset = static_cast<int32_t>(num_tokens - 1),
       .request_id = task.request_id,
       .sample_index = task.sample_index,
       .seed = task.seed,
       .position = position,
       .params = &entry.params,
       .token_ids = entry.token_ids,
       .num_prompt_tokens = num_prompt_tokens,
       .banned_token_ids = may_stop ? std::span<const int32_t>() : task.stop_token_ids});
  contexts_.push_back({.token_ids = entry.token_ids,
                       .num_drafted = static_cast<int32_t>(position - entry.num_known)});
  row_jobs_.push_back(&job);
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
  const int64_t num_generated =
      std::ssize(task.token_ids) + std::ssize(*job.draft) - task.num_prompt_tokens;
  const bool ends = token.is_end || (num_generated >= task.params->min_tokens &&
                                     std::ranges::binary_search(task.stop_token_ids, token_id));
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
  kv_cache_.check_integrity(tables);
}

}  // namespace llmserve
