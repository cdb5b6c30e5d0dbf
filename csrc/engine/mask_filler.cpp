#include "engine/mask_filler.h"

#include <algorithm>

#include "core/error.h"
#include "core/pin_thread.h"
#include "core/start_thread.h"

namespace llmserve {
namespace {

// A mask is a fraction of a millisecond, and ready before the forward. What the others' tokens wait
// at most for one that is not.
constexpr std::chrono::milliseconds kPatience{2};
// Whose masks took longer goes to the slow thread with the next.
constexpr std::chrono::milliseconds kSlow{5};
// What a quick thread gives a sequence that is late. Then it begins anew on the slow one.
constexpr std::chrono::milliseconds kQuickLimit{20};
// All masks of one sequence that were late, together.
constexpr std::chrono::seconds kBudget{2};
constexpr std::chrono::milliseconds kWatchInterval{5};

// One keeps up with a batch on a machine whose forward is that slow; a device's is faster.
size_t num_quick_threads() { return std::clamp(std::thread::hardware_concurrency() / 8, 1u, 4u); }

bool has_mask(const SampleTask& task) { return task.params->grammar && task.given_token_id < 0; }

bool is_of(const SampleTask& a, const SampleTask& b) {
  return a.request_id == b.request_id && a.sample_index == b.sample_index;
}

}  // namespace

MaskFiller::MaskFiller(int64_t vocab_size)
    : vocab_size_(vocab_size), report_([](RequestId, int32_t) {}) {}

MaskFiller::~MaskFiller() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    for (const auto& [key, sequence] : sequences_)
      if (sequence->state == State::kRunning && sequence->matcher) sequence->matcher->cancel();
    has_work_.notify_all();
    has_late_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void MaskFiller::begin(std::span<const SampleTask> tasks) { share_out(tasks, false); }

void MaskFiller::begin_drafts(std::span<const SampleTask> tasks) { share_out(tasks, true); }

void MaskFiller::share_out(std::span<const SampleTask> tasks, bool are_drafts) {
  shares_.clear();
  // Before there is work: where one cannot be started, none of them has begun.
  if (std::ranges::any_of(tasks, has_mask)) start_threads();
  const std::lock_guard lock(mutex_);
  for (size_t i = 0, end = 0; i < tasks.size(); i = end) {
    end = i + 1;
    if (!has_mask(tasks[i])) continue;
    while (end < tasks.size() && is_of(tasks[end], tasks[i])) ++end;
    Share share{.first_task = i, .num_tasks = end - i, .can_await = tasks[i].can_await_mask};
    share.sequence = followed(tasks[i]);
    share.is_left = are_drafts && share.sequence->is_slow;
    if (!share.is_left) follow(tasks.subspan(i, end - i), share);
    shares_.push_back(std::move(share));
  }
}

const MaskFiller::Sequence& MaskFiller::followed(const SampleTask& task) {
  Sequence& place = sequences_[{task.request_id, task.sample_index}];
  if (!place) {
    place = std::make_shared<Followed>(Followed{.request_id = task.request_id,
                                                .sample_index = task.sample_index,
                                                .grammar = task.params->grammar,
                                                .ignore_eos = task.params->ignore_eos});
  }
  return place;
}

// The sequence with what its tasks know, and on its way to a thread if anything is to be filled. A
// thread that has it already has it with the same tokens: it gets no further without a mask.
void MaskFiller::follow(std::span<const SampleTask> tasks, Share& share) {
  Followed& sequence = *share.sequence;
  const std::span<const int32_t> committed = tasks[0].committed_token_ids();
  const std::span<const int32_t> all = tasks.back().token_ids;
  const std::span<const int32_t> drafted = all.subspan(committed.size());
  const size_t num_same =
      static_cast<size_t>(std::ranges::mismatch(drafted, sequence.drafted).in1 - drafted.begin());
  const bool is_same = num_same == drafted.size() && num_same == sequence.drafted.size();
  if (sequence.state != State::kIdle) {
    share.is_other = !is_same;
    return;
  }
  const auto generated = committed.subspan(static_cast<size_t>(tasks[0].num_prompt_tokens));
  if (generated.size() > sequence.generated.size()) sequence.num_rows = 0;
  sequence.generated.insert(sequence.generated.end(),
                            generated.begin() + std::ssize(sequence.generated), generated.end());
  sequence.drafted.assign(drafted.begin(), drafted.end());
  // A row holds for the drafts before it.
  if (!is_same) sequence.num_rows = std::min(sequence.num_rows, num_same + 1);
  if (sequence.num_rows < drafted.size() + 1) enqueue(share.sequence);
}

void MaskFiller::enqueue(const Sequence& sequence) {
  sequence->state = State::kQueued;
  (sequence->is_slow ? slow_ : quick_).push_back(sequence);
  has_work_.notify_all();
}

void MaskFiller::start_threads() {
  const size_t num_threads = num_quick_threads() + 2;
  threads_.reserve(num_threads);
  while (threads_.size() < num_quick_threads())
    threads_.push_back(start_thread([this] { work(quick_); }));
  if (threads_.size() == num_quick_threads()) {
    threads_.push_back(start_thread([this] {
      lower_priority(current_thread_id());
      work(slow_);
    }));
  }
  if (threads_.size() < num_threads) threads_.push_back(start_thread([this] { watch(); }));
}

void MaskFiller::work(std::deque<Sequence>& queue) {
  unpin_thread();  // the engine's thread started this one
  std::unique_lock lock(mutex_);
  while (true) {
    has_work_.wait(lock, [&] { return is_stopping_ || !queue.empty(); });
    if (is_stopping_) return;
    const Sequence sequence = std::move(queue.front());
    queue.pop_front();
    sequence->state = State::kRunning;
    sequence->is_cancelled = false;
    sequence->begin = Clock::now();
    lock.unlock();
    const bool has_failed = !fill(*sequence);
    lock.lock();
    end_run(sequence, has_failed);
  }
}

void MaskFiller::end_run(const Sequence& sequence, bool has_failed) {
  const Clock::duration elapsed = Clock::now() - sequence->begin;
  const bool is_late = std::ranges::count(late_, sequence) > 0;
  const bool was_slow = std::exchange(sequence->is_slow, elapsed > kSlow);
  if (is_late) sequence->used += elapsed;
  if (has_failed && sequence->is_cancelled && !sequence->is_forgotten) {
    if (!was_slow && sequence->used < kBudget && !is_stopping_) return enqueue(sequence);
    const size_t num_filled = std::exchange(sequence->num_rows, sequence->drafted.size() + 1);
    for (size_t i = num_filled; i < sequence->num_rows; ++i) {
      sequence->rows[i].error =
          concat("structured_outputs: following the grammar took more than ", kBudget.count(),
                 " s beyond what a step waits for; make it simpler");
    }
  }
  sequence->state = State::kIdle;
  std::erase(late_, sequence);
  has_result_.notify_one();
  for (; sequence->num_reports > 0; --sequence->num_reports)
    report_(sequence->request_id, sequence->sample_index);
}

// False where rows have an error; its request fails alone, if a row is used.
bool MaskFiller::fill(Followed& sequence) {
  const size_t num_rows = sequence.drafted.size() + 1;
  if (sequence.rows.size() < num_rows) sequence.rows.resize(num_rows);
  for (size_t i = sequence.num_rows; i < num_rows; ++i) {
    sequence.rows[i].bits.clear();
    sequence.rows[i].end_token_id = -1;
    sequence.rows[i].error.clear();
  }
  bool has_failed = false;
  try {
    fill_rows(sequence);
  } catch (const std::exception& failure) {
    has_failed = true;
    for (size_t i = sequence.num_rows; i < num_rows; ++i) sequence.rows[i].error = failure.what();
    const std::lock_guard lock(mutex_);
    sequence.matcher.reset();  // of no more use; the next run, if there is one, makes another
    sequence.num_appended = 0;
    // A run that was cancelled may begin anew, with the rows that it has.
    if (sequence.is_cancelled) return false;
  }
  sequence.num_rows = num_rows;
  return !has_failed;
}

void MaskFiller::fill_rows(Followed& sequence) {
  catch_up(sequence);
  TokenMatcher& matcher = *sequence.matcher;
  int64_t num_ahead = 0;
  for (size_t i = 0; i <= sequence.drafted.size(); ++i) {
    RowMask& row = sequence.rows[i];
    if (i >= sequence.num_rows) {
      row.bits.resize(static_cast<size_t>((vocab_size_ + 31) / 32));
      matcher.fill(row.bits);
      separate_ends(sequence, row);
      sequence.num_rows = i + 1;
    }
    if (i == sequence.drafted.size() || !is_allowed(row, sequence.drafted[i])) break;
    matcher.append(sequence.drafted[i]);
    ++num_ahead;
  }
  if (num_ahead > 0) matcher.roll_back(num_ahead);
}

bool MaskFiller::is_allowed(const RowMask& row, int32_t token_id) {
  return (row.bits[static_cast<size_t>(token_id / 32)] >> (token_id % 32) & 1) != 0;
}

void MaskFiller::catch_up(Followed& sequence) {
  if (!sequence.matcher) {
    auto matcher = sequence.grammar->make_matcher();
    const std::lock_guard lock(mutex_);
    sequence.matcher = std::move(matcher);
    sequence.num_appended = 0;
    if (is_stopping_ || sequence.is_forgotten) sequence.matcher->cancel();
  }
  for (; sequence.num_appended < sequence.generated.size(); ++sequence.num_appended)
    sequence.matcher->append(sequence.generated[sequence.num_appended]);
}

// A text that can only end does so, whatever else was asked for: min_tokens and ignore_eos cannot
// lengthen it.
void MaskFiller::separate_ends(const Followed& sequence, RowMask& row) {
  std::vector<uint32_t>& mask = row.bits;
  row.ends.clear();
  for (const int32_t id : sequence.grammar->end_token_ids()) {
    uint32_t& word = mask[static_cast<size_t>(id / 32)];
    if ((word >> (id % 32) & 1) == 0) continue;
    row.ends.push_back(id);
    word &= ~(1u << (id % 32));
  }
  if (row.ends.empty()) return;
  if (std::ranges::all_of(mask, [](uint32_t word) { return word == 0; })) {
    row.end_token_id = row.ends[0];
  } else if (!sequence.ignore_eos) {
    for (const int32_t id : row.ends) mask[static_cast<size_t>(id / 32)] |= 1u << (id % 32);
  }
}

void MaskFiller::finish(std::span<SampleTask> tasks) {
  std::unique_lock lock(mutex_);
  const auto is_there = [](const Share& share) { return share.sequence->state == State::kIdle; };
  const auto is_there_or_awaited = [&](const Share& s) { return s.can_await || is_there(s); };
  const auto all_there = [&] { return std::ranges::all_of(shares_, is_there); };
  const auto all_needed = [&] { return std::ranges::all_of(shares_, is_there_or_awaited); };
  if (!has_result_.wait_for(lock, kPatience, all_there)) {
    for (const Share& share : shares_) {
      if (is_there(share) || std::ranges::count(late_, share.sequence) > 0) continue;
      late_.push_back(share.sequence);
    }
    has_late_.notify_one();
    has_result_.wait(lock, all_needed);
  }
  for (const Share& share : shares_) {
    if (is_there(share) && !share.is_other) {
      hand_over(share, tasks.subspan(share.first_task, share.num_tasks));
      continue;
    }
    if (is_there(share)) {
      report_(share.sequence->request_id, share.sequence->sample_index);
    } else {
      ++share.sequence->num_reports;
    }
    for (size_t i = 0; i < share.num_tasks; ++i) tasks[share.first_task + i].awaits_mask = true;
  }
}

// A row of a draft that was late waits for nothing: whoever checks the guesses asks again.
void MaskFiller::finish_drafts(std::span<SampleTask> tasks) {
  std::unique_lock lock(mutex_);
  const auto is_there = [](const Share& s) { return s.sequence->state == State::kIdle; };
  has_result_.wait_for(lock, kPatience, [&] {
    return std::ranges::all_of(shares_, [&](const Share& s) { return s.is_left || is_there(s); });
  });
  for (const Share& share : shares_) {
    const auto own = tasks.subspan(share.first_task, share.num_tasks);
    if (!share.is_left && !share.is_other && is_there(share)) {
      hand_over(share, own);
    } else {
      for (SampleTask& task : own) task.awaits_mask = true;
    }
  }
}

void MaskFiller::hand_over(const Share& share, std::span<SampleTask> tasks) {
  for (SampleTask& task : tasks) {
    const RowMask& row = share.sequence->rows[static_cast<size_t>(task.num_drafted_tokens)];
    task.allowed = row.bits;
    task.end_token_id = row.end_token_id;
    task.mask_error = row.error;
  }
}

// Sees to it that who is late neither keeps a quick thread nor takes more than the budget, also
// where no step runs.
void MaskFiller::watch() {
  unpin_thread();
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    has_late_.wait(lock, [this] { return is_stopping_ || !late_.empty(); });
    cancel_late();
    has_late_.wait_for(lock, kWatchInterval, [this] { return is_stopping_; });
  }
}

// Those that wait for a thread are not to blame.
void MaskFiller::cancel_late() {
  const Clock::time_point now = Clock::now();
  for (const Sequence& sequence : late_) {
    if (sequence->state != State::kRunning || !sequence->matcher) continue;
    const Clock::duration elapsed = now - sequence->begin;
    if (sequence->used + elapsed < kBudget && (sequence->is_slow || elapsed < kQuickLimit))
      continue;
    sequence->is_cancelled = true;
    sequence->matcher->cancel();
  }
}

void MaskFiller::forget(RequestId request_id, int32_t sample_index) {
  const std::lock_guard lock(mutex_);
  const auto place = sequences_.find({request_id, sample_index});
  if (place == sequences_.end()) return;
  const Sequence sequence = place->second;
  sequences_.erase(place);
  sequence->num_reports = 0;
  sequence->is_forgotten = true;
  std::erase(quick_, sequence);
  std::erase(slow_, sequence);
  std::erase(late_, sequence);  // so that it is not begun anew
  if (sequence->state == State::kRunning && sequence->matcher) sequence->matcher->cancel();
}

}  // namespace llmserve
