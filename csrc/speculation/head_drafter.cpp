#include "speculation/head_drafter.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "core/error.h"
#include "core/token_hash.h"

namespace llmserve {
namespace {

// A head without a cache has books of a single block, which nothing asks for.
CacheConfig books_of(CacheConfig cache) {
  if (!cache.groups.empty()) return cache;
  cache.groups.resize(1);
  cache.num_blocks = 1;
  return cache;
}

SamplingParams draft_params(const SamplingParams& target, DraftSampling sampling) {
  SamplingParams params = target;
  params.n = 1;
  params.logprobs.reset();
  params.logprob_token_ids.clear();
  params.prompt_logprobs.reset();
  if (sampling == DraftSampling::kGreedy) params.draw.temperature = 0;
  return params;
}

}  // namespace

void HeadStep::clear() {
  place = 0;
  token_ids.clear();
  positions.clear();
  sources.clear();
  sequences.clear();
  logit_rows.clear();
  samples.clear();
  num_choices.clear();
  copies.clear();
}

HeadDrafter::HeadDrafter(HeadModel& model, DraftSampling sampling)
    : model_(model),
      sampling_(sampling),
      has_cache_(!model.cache().groups.empty()),
      num_layers_(model.num_layers()),
      kv_cache_(books_of(model.cache()), &chain_hash, model.max_step_rows()) {
  for (int64_t i = model.num_kept(); i-- > 0;) free_.push_back(static_cast<int32_t>(i));
}

void HeadDrafter::begin(const Request& request) {
  if (!request.has_drafter || request.prompt_embeds) return;
  Prompt& prompt = prompts_[request.id];
  prompt.token_ids = request.prompt_token_ids;
  prompt.token_ids.insert(prompt.token_ids.end(), request.resumed_token_ids.begin(),
                          request.resumed_token_ids.end());
  prompt.salt = request.cache_salt;
}

// Null: of a request that is not guessed.
HeadDrafter::Entry* HeadDrafter::entry_of(RequestId request_id, int32_t sample_index) {
  const auto prompt = prompts_.find(request_id);
  if (prompt == prompts_.end()) return nullptr;
  const auto [place, is_new] = entries_.try_emplace({request_id, sample_index});
  Entry& entry = place->second;
  if (is_new) {
    entry.table.root = root_hash(concat(prompt->second.token_ids[0], "/", prompt->second.salt));
    entry.table.owner = request_id;
    entry.prompt = &prompt->second;
  }
  return &entry;
}

// A table without blocks is given the rows that others have left in the cache, of tokens whose
// states did not come.
void HeadDrafter::look_up(Entry& entry) {
  // What the later of several layers keep of a row hangs on tokens that a block is not found by.
  if (!has_cache_ || num_layers_ > 1 || entry.has_looked_up) return;
  entry.has_looked_up = true;
  const auto known = std::span(entry.prompt->token_ids).subspan(1);
  const auto tokens =
      known.first(static_cast<size_t>(std::clamp<int64_t>(entry.first_kept, 0, std::ssize(known))));
  const PrefixMatch match = kv_cache_.find_prefix(entry.table, tokens);
  kv_cache_.attach(entry.table, match, {});
  entry.num_rows = entry.next_position = int64_t{match.num_blocks} * kv_cache_.block_size();
  entry.is_whole = true;
}

// All blocks of a sequence go back. What it runs from now on comes behind a gap.
void HeadDrafter::let_go(Entry& entry) {
  kv_cache_.release(entry.table);
  entry.num_rows = 0;
  entry.has_looked_up = false;
}

// For the head: nothing is guessed of it any more.
bool HeadDrafter::is_too_long(const Entry& entry) const {
  return std::max(entry.num_certain, std::ssize(entry.prompt->token_ids)) >= model_.max_model_len();
}

// Rows that can run without a task: of states whose next tokens are certain and kept.
int64_t HeadDrafter::num_runnable(const Entry& entry) const {
  const int64_t end = std::min(entry.end_kept(), entry.num_certain) - num_layers_;
  return end - std::max(entry.next_position, entry.first_kept);
}

// Runs what it can of all sequences. A head that keeps no rows needs the newest state alone.
void HeadDrafter::catch_up() {
  kv_cache_.give_back_replaced();
  bool is_more = true;
  while (is_more) {
    step_.clear();
    is_more = false;
    int64_t budget = model_.max_step_rows();
    for (auto& [key, entry] : entries_) {
      if (num_runnable(entry) <= 0) continue;
      look_up(entry);
      const int64_t num_rows = std::min(num_runnable(entry), budget);
      if (has_cache_ && !kv_cache_.can_allocate(entry.table, entry.num_rows, num_rows)) continue;
      if (num_rows > 0) plan_rows(entry, num_rows, {});
      if (num_rows > 0 && num_layers_ > 1) ran_.emplace_back(&entry, num_rows);
      budget -= num_rows;
      is_more |= budget == 0;
    }
    if (has_cache_ && !step_.token_ids.empty()) model_.run(step_);
    run_later_layers();
  }
  // The last state of each may be asked for again.
  for (auto& [key, entry] : entries_)
    drop_kept(entry, std::clamp<int64_t>(entry.next_position - 1 - entry.first_kept, 0,
                                         std::ssize(entry.kept)));
}

// The rows of catch_up() at the further places.
void HeadDrafter::run_later_layers() {
  for (int32_t place = 1; place < num_layers_ && !ran_.empty(); ++place) {
    step_.place = place;
    step_.copies.clear();
    size_t row = 0;
    for (const auto& [entry, num_rows] : ran_) {
      const int64_t first = entry->next_position - num_rows - entry->first_kept;
      for (int64_t i = first; i < first + num_rows; ++i, ++row) {
        step_.token_ids[row] = entry->token_ids[static_cast<size_t>(i + 1 + place)];
        step_.sources[row] = static_cast<int32_t>(row);
      }
    }
    model_.run(step_);
  }
  ran_.clear();
}

// The next rows of a sequence, of kept states; token_ids are all of its tokens that are certain, or
// none where those of the states will do.
void HeadDrafter::plan_rows(Entry& entry, int64_t num_rows, std::span<const int32_t> token_ids) {
  const int64_t first = std::max(entry.next_position, entry.first_kept);
  if (first > entry.next_position) entry.is_whole = false;
  if (has_cache_) {
    kv_cache_.allocate(entry.table, entry.num_rows, num_rows, step_.copies);
    for (int64_t position = first; position < first + num_rows; ++position) {
      const auto idx = static_cast<size_t>(position - entry.first_kept);
      step_.token_ids.push_back(token_ids.empty() ? entry.token_ids[idx + 1]
                                                  : token_ids[static_cast<size_t>(position) + 1]);
      step_.positions.push_back(static_cast<int32_t>(position));
      step_.sources.push_back(entry.kept[idx]);
    }
    step_.sequences.push_back({.num_rows = static_cast<int32_t>(num_rows),
                               .first_row = entry.num_rows,
                               .block_tables = entry.table.blocks});
  }
  entry.num_rows += num_rows;
  entry.next_position = first + num_rows;
}

// Those that no task is of give their blocks back, the longest unused first.
bool HeadDrafter::make_room(const Entry& entry, int64_t num_new_rows) {
  while (!kv_cache_.can_allocate(entry.table, entry.num_rows, num_new_rows)) {
    Entry* oldest = nullptr;
    for (auto& [key, other] : entries_) {
      if (&other == &entry || other.last_used == num_calls_ || other.table.num_blocks() == 0)
        continue;
      if (oldest == nullptr || other.last_used < oldest->last_used) oldest = &other;
    }
    if (oldest == nullptr) return false;
    let_go(*oldest);
  }
  return true;
}

void HeadDrafter::draft(std::span<const DraftTask> tasks, std::span<std::vector<int32_t>> drafts) {
  ++num_calls_;
  num_idle_steps_ = 0;
  catch_up();
  for (Job& job : jobs_) drop_twigs(job);  // of a call that was cut off
  jobs_.clear();
  trees_.assign(std::max(trees_.size(), tasks.size()), {});
  for (size_t i = 0; i < tasks.size(); ++i) {
    Job job{.task = &tasks[i],
            .entry = entry_of(tasks[i].request_id, tasks[i].sample_index),
            .draft = &drafts[i],
            .tree = &trees_[i]};
    if (job.entry != nullptr && begin_job(job)) jobs_.push_back(std::move(job));
  }
  if (!run_first()) return;
  while (run_next()) {
  }
  // Rows that stand on guesses are not kept: the states of what is accepted come.
  for (Job& job : jobs_) {
    drop_twigs(job);
    settle_rows(job);
    if (has_cache_ && job.entry->table.num_blocks() > 0)
      kv_cache_.truncate(job.entry->table, job.entry->num_rows);
  }
}

// False: the state of the newest token that has run is not there, and nothing can be guessed.
bool HeadDrafter::begin_job(Job& job) {
  Entry& entry = *job.entry;
  const std::span<const int32_t> known = job.task->token_ids;
  const int64_t last = std::ssize(known) - 2;  // the newest that has run
  entry.last_used = num_calls_;
  entry.num_certain = std::ssize(known);
  if (!entry.params) entry.params = draft_params(*job.task->params, sampling_);
  if (last < 0 || std::ssize(known) >= model_.max_model_len()) return false;
  settle_branches(entry, known);
  // States of guesses that were not right.
  int64_t end = entry.first_kept;
  while (end < std::min(entry.end_kept(), last + 1) &&
         entry.token_ids[static_cast<size_t>(end - entry.first_kept)] ==
             known[static_cast<size_t>(end)])
    ++end;
  cut_kept(entry, end);
  if (end != last + 1 || entry.kept.empty()) return false;
  look_up(entry);
  if (entry.next_position > last) {  // asked again without a step between
    entry.num_rows = std::max<int64_t>(0, entry.num_rows - (entry.next_position - last));
    entry.next_position = last;
  }
  job.token_ids.assign(known.begin(), known.end());
  return true;
}

// The row of the newest token of each, and those before it that were not run.
bool HeadDrafter::run_first() {
  step_.clear();
  owners_.clear();
  int64_t budget = model_.max_step_rows();
  for (Job& job : jobs_) {
    Entry& entry = *job.entry;
    const int64_t last = std::ssize(job.token_ids) - 2;
    if (!has_cache_) {
      step_.token_ids.push_back(job.token_ids.back());
      step_.positions.push_back(static_cast<int32_t>(last));
      step_.sources.push_back(entry.kept[static_cast<size_t>(last - entry.first_kept)]);
      step_.sequences.push_back({.num_rows = 1});
      entry.next_position = last + 1;
      ask(job);
      continue;
    }
    const int64_t num_rows = last + 1 - std::max(entry.next_position, entry.first_kept);
    if (num_rows > budget || !make_room(entry, num_rows)) {
      job.is_done = true;
      continue;
    }
    job.first_row = entry.num_rows;
    job.num_rows = static_cast<int32_t>(num_rows);
    job.run_begin = static_cast<int32_t>(std::ssize(step_.token_ids));
    plan_rows(entry, num_rows, job.token_ids);
    job.first_position = entry.next_position - num_rows;
    job.num_places = 1;
    budget -= num_rows;
    ask(job);
  }
  if (owners_.empty()) return false;
  take_guesses(model_.run(step_));
  for (Job& job : jobs_) {
    Entry& entry = *job.entry;
    if (num_layers_ > 1) continue;
    drop_kept(entry, std::max<int64_t>(0, entry.next_position - 1 - entry.first_kept));
    if (!has_cache_ || !entry.is_whole || job.logit_row < 0) continue;
    // But the last, which may run again.
    kv_cache_.commit(entry.table, job.task->token_ids.subspan(1), entry.num_rows - 1);
  }
  return true;
}

// A row of each guess, which reads what the row before it gave. Those of trees take what room is
// left. Heads that keep no rows say the same behind all guesses of a place: a row of one does for
// all.
bool HeadDrafter::run_next() {
  const int32_t place = step_.place + 1;
  step_.clear();
  step_.place = place;
  owners_.clear();
  if (model_.max_guesses() > 0 && place >= model_.max_guesses()) return false;
  for (Job& job : jobs_) {
    if (job.is_done) continue;
    if (num_layers_ > 1) {
      plan_again(job, place);
    } else if (!plan_guess(job, -1, place)) {
      job.is_done = true;
    }
  }
  for (Job& job : jobs_) {
    const bool has_row = !has_cache_ && !job.is_done;
    const size_t num_twigs = has_cache_ ? job.twigs.size() : std::min<size_t>(job.twigs.size(), 1);
    for (size_t twig = 0; twig < num_twigs && !has_row; ++twig)
      if (std::ssize(step_.token_ids) < model_.max_step_rows())
        plan_guess(job, static_cast<int32_t>(twig), place);
  }
  if (owners_.empty()) return false;
  take_guesses(model_.run(step_));
  return true;
}

// The row of a path's last guess, at `place`, - 1: the task's own. False: there is no room.
bool HeadDrafter::plan_guess(Job& job, int32_t twig_idx, int32_t place) {
  Entry& entry = *job.entry;
  Twig* const twig = twig_idx < 0 ? nullptr : &job.twigs[static_cast<size_t>(twig_idx)];
  BlockTable& table = twig == nullptr ? entry.table : twig->table;
  const int64_t row = entry.num_rows + place - 1;
  HeadSequence sequence{.num_rows = 1, .first_row = row};
  if (has_cache_) {
    if (!kv_cache_.can_allocate(table, row, 1)) return false;
    kv_cache_.allocate(table, row, 1, step_.copies);
    sequence.block_tables = table.blocks;
  }
  step_.token_ids.push_back(twig == nullptr
                                ? job.token_ids.back()
                                : job.tree->nodes[static_cast<size_t>(twig->tip.node)].token_id);
  step_.positions.push_back(static_cast<int32_t>(std::ssize(job.task->token_ids) + place - 2));
  step_.sources.push_back(twig == nullptr ? job.logit_row : twig->logit_row);
  step_.sequences.push_back(sequence);
  ask(job, twig_idx);
  return true;
}

// The rows of the first place once more, by the layer of this one.
void HeadDrafter::plan_again(Job& job, int32_t place) {
  const auto begin = static_cast<int32_t>(std::ssize(step_.token_ids));
  for (int32_t i = 0; i < job.num_rows; ++i) {
    const int64_t position = job.first_position + i;
    step_.token_ids.push_back(job.token_ids[static_cast<size_t>(position + 1 + place)]);
    step_.positions.push_back(static_cast<int32_t>(position));
    step_.sources.push_back(job.run_begin + i);
  }
  step_.sequences.push_back({.num_rows = job.num_rows,
                             .first_row = job.first_row,
                             .block_tables = job.entry->table.blocks});
  job.run_begin = begin;
  ++job.num_places;
  ask(job);
}

// Of several layers: the rows that all have run with tokens that are certain stay.
void HeadDrafter::settle_rows(Job& job) {
  if (num_layers_ == 1 || job.num_rows == 0) return;
  Entry& entry = *job.entry;
  const int64_t end = std::ssize(job.task->token_ids) - num_layers_;
  entry.next_position = job.first_position;
  if (job.num_places == num_layers_) entry.next_position = std::max(end, job.first_position);
  entry.num_rows = job.first_row + entry.next_position - job.first_position;
  drop_kept(entry,
            std::clamp<int64_t>(entry.next_position - entry.first_kept, 0, std::ssize(entry.kept)));
}

// A guess behind the last row. Requests with trees have no edits, so that nobody reads the tokens
// of a twig's row.
void HeadDrafter::ask(Job& job, int32_t twig) {
  const DraftTask& task = *job.task;
  const SamplingParams& params = *job.entry->params;
  const bool is_own = twig < 0;
  const int64_t position =
      is_own ? std::ssize(job.token_ids)
             : std::ssize(task.token_ids) + job.twigs[static_cast<size_t>(twig)].tip.num_guesses;
  const bool may_stop = position - task.num_prompt_tokens >= params.min_tokens;
  step_.logit_rows.push_back(static_cast<int32_t>(std::ssize(step_.token_ids) - 1));
  step_.samples.push_back(
      {.request_id = task.request_id,
       .sample_index = task.sample_index,
       .params = &params,
       .seed = task.seed,
       .position = position,
       .token_ids = is_own ? std::span<const int32_t>(job.token_ids) : task.token_ids,
       .num_prompt_tokens = task.num_prompt_tokens,
       .num_drafted_tokens =
           is_own ? static_cast<int32_t>(position - std::ssize(task.token_ids)) : 0,
       .only_draws = may_stop && params.only_draws(),
       .banned_token_ids = may_stop ? std::span<const int32_t>() : task.stop_token_ids});
  int32_t num_choices = 1;
  if (task.tree != nullptr) {  // the second says how sure the first is
    num_choices = 2;
    const auto count = [&](const TreeTip& tip) {
      num_choices = std::max(num_choices, job.tree->num_wanted(task.tree->config, tip.node));
    };
    if (is_own) count(job.tip);
    if (!is_own || !has_cache_)
      for (const Twig& other : job.twigs) count(other.tip);
  }
  step_.num_choices.push_back(num_choices);
  if (is_own) job.logit_row = static_cast<int32_t>(owners_.size());
  owners_.push_back({.job = &job, .twig = twig});
}

void HeadDrafter::take_guesses(const SampledTokens& sampled) {
  for (size_t i = 0; i < owners_.size(); ++i) {
    Job& job = *owners_[i].job;
    const int32_t twig = owners_[i].twig;
    const auto row = static_cast<int32_t>(i);
    if (twig < 0) take_guess(job, sampled.rows[i]);
    if (job.task->tree == nullptr) continue;
    if (twig < 0 || has_cache_) grow(job, twig, row);
    if (!has_cache_)
      for (size_t other = 0; other < job.twigs.size(); ++other)
        grow(job, static_cast<int32_t>(other), row);
  }
  for (Job& job : jobs_)
    if (job.task->tree != nullptr) choose_twigs(job);
  buds_.clear();
}

bool HeadDrafter::ends_text(const Job& job, int32_t token_id, int64_t num_guesses) const {
  const DraftTask& task = *job.task;
  const int64_t num_generated = std::ssize(task.token_ids) + num_guesses - task.num_prompt_tokens;
  return num_generated >= job.entry->params->min_tokens &&
         std::ranges::binary_search(task.stop_token_ids, token_id);
}

void HeadDrafter::take_guess(Job& job, const SampledToken& token) {
  const DraftTask& task = *job.task;
  job.is_done = true;
  if (token.awaits_mask) return;
  if (!token.is_valid) {
    if (token.error_idx < 0)
      throw DeviceError(
          concat("the head's logits of position ", job.token_ids.size(), " are not finite"));
    return;
  }
  job.token_ids.push_back(token.token_id);
  job.draft->push_back(token.token_id);
  const bool ends = token.is_end || ends_text(job, token.token_id, std::ssize(*job.draft));
  job.is_done = ends || std::ssize(*job.draft) >= task.max_tokens ||
                std::ssize(job.token_ids) >= model_.max_model_len();
}

// What a row chose are guesses of one place behind a path, - 1: the task's own.
void HeadDrafter::grow(Job& job, int32_t twig_idx, int32_t logit_row) {
  const DraftTask& task = *job.task;
  const bool is_own = twig_idx < 0;
  Twig* const twig = is_own ? nullptr : &job.twigs[static_cast<size_t>(twig_idx)];
  const BlockTable* const table = is_own ? &job.entry->table : &twig->table;
  const auto may_go_on = [&](int32_t token_id, int32_t num_guesses) {
    return std::ssize(task.token_ids) + num_guesses < model_.max_model_len() &&
           !ends_text(job, token_id, num_guesses);
  };
  grow_tree(*job.tree, *task.tree, is_own ? job.tip : twig->tip, is_own,
            model_.choices(static_cast<size_t>(logit_row)), task.max_tokens, may_go_on,
            [&](const TreeTip& tip) {
              buds_.push_back({.job = &job, .tip = tip, .logit_row = logit_row, .table = table});
            });
  if (is_own && job.tree->num_wanted(task.tree->config, job.tip.node) == 0) job.is_done = true;
}

// The likeliest are gone on from, and all of a tree that is given. Their tables are made while
// those they come from hold the rows before them and nothing else.
void HeadDrafter::choose_twigs(Job& job) {
  const SpeculationConfig& config = job.task->tree->config;
  std::vector<Bud> buds;
  std::ranges::copy_if(buds_, std::back_inserter(buds),
                       [&](const Bud& bud) { return bud.job == &job; });
  std::ranges::stable_sort(buds, std::ranges::greater(),
                           [](const Bud& bud) { return bud.tip.survival; });
  if (config.token_tree.empty() && std::ssize(buds) > config.tree_width)
    buds.resize(static_cast<size_t>(config.tree_width));
  std::vector<Twig> twigs(buds.size());
  for (size_t i = 0; i < buds.size(); ++i) {
    twigs[i].tip = buds[i].tip;
    twigs[i].logit_row = buds[i].logit_row;
    if (has_cache_) kv_cache_.fork(*buds[i].table, twigs[i].table);
  }
  drop_twigs(job);
  job.twigs = std::move(twigs);
}

void HeadDrafter::drop_twigs(Job& job) {
  if (has_cache_)
    for (Twig& twig : job.twigs) kv_cache_.release(twig.table);
  job.twigs.clear();
}

void HeadDrafter::forget(RequestId request_id, int32_t sample_index, bool is_last) {
  model_.forget(request_id, sample_index);
  if (const auto place = entries_.find({request_id, sample_index}); place != entries_.end()) {
    cut_kept(place->second, place->second.first_kept);
    drop_branches(place->second);
    kv_cache_.release(place->second.table);
    kv_cache_.give_back_replaced();
    entries_.erase(place);
  }
  if (is_last) prompts_.erase(request_id);
}

void HeadDrafter::reset() {
  for (auto& [key, entry] : entries_) let_go(entry);
  kv_cache_.reset_prefix_cache({});
}

void HeadDrafter::check_integrity() const {
  std::vector<const BlockTable*> tables;
  for (const auto& [key, entry] : entries_) tables.push_back(&entry.table);
  for (const Job& job : jobs_)
    for (const Twig& twig : job.twigs) tables.push_back(&twig.table);
  kv_cache_.check_integrity(tables);
  int64_t num_kept = std::ssize(free_);
  for (const auto& [key, entry] : entries_)
    num_kept += std::ssize(entry.kept) + std::ssize(entry.branch_states);
  check_internal(num_kept == model_.num_kept(), "each place of a state is free or an entry's");
}

}  // namespace llmserve
