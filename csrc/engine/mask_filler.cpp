#include "engine/mask_filler.h"

#include <algorithm>
#include <chrono>

#include "core/error.h"
#include "core/pin_thread.h"
#include "core/start_thread.h"

namespace llmserve {
namespace {

// A mask is a fraction of a millisecond. One that takes longer than this holds up everybody else's
// tokens.
constexpr std::chrono::seconds kPatience{2};

// One keeps up with a batch on a machine whose forward is that slow; a device's is faster.
size_t num_mask_threads() { return std::clamp(std::thread::hardware_concurrency() / 8, 1u, 4u); }

}  // namespace

MaskFiller::MaskFiller(int64_t vocab_size) : vocab_size_(vocab_size) {}

MaskFiller::~MaskFiller() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    has_work_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

MaskFiller::Pending MaskFiller::begin(std::span<SampleTask> tasks) {
  const std::lock_guard lock(mutex_);
  jobs_.clear();
  next_job_ = num_done_ = 0;
  const auto has_mask = [](const SampleTask& task) {
    return task.params->grammar && task.given_token_id < 0;
  };
  // Before there is work: where one cannot be started, none of them has begun.
  if (std::ranges::any_of(tasks, has_mask)) start_threads();
  for (size_t i = 0; i < tasks.size(); ++i) {
    const SampleTask& task = tasks[i];
    if (!has_mask(task)) continue;
    size_t count = 1;
    while (i + count < tasks.size() && tasks[i + count].request_id == task.request_id &&
           tasks[i + count].sample_index == task.sample_index)
      ++count;
    jobs_.push_back({.tasks = tasks.subspan(i, count),
                     .followed = &matchers_[{task.request_id, task.sample_index}]});
    i += count - 1;
  }
  if (!jobs_.empty()) has_work_.notify_all();
  return Pending(*this);
}

void MaskFiller::start_threads() {
  threads_.reserve(num_mask_threads());
  while (threads_.size() < num_mask_threads()) threads_.push_back(start_thread([this] { work(); }));
}

void MaskFiller::work() {
  unpin_thread();  // the engine's thread started this one
  std::unique_lock lock(mutex_);
  while (true) {
    has_work_.wait(lock, [this] { return is_stopping_ || next_job_ < jobs_.size(); });
    if (is_stopping_) return;
    Job& job = jobs_[next_job_++];  // stays where it is until all are done
    job.begin = std::chrono::steady_clock::now();
    job.is_running = true;
    lock.unlock();
    fill(job.tasks, *job.followed);
    lock.lock();
    job.is_running = false;
    if (++num_done_ == jobs_.size()) has_result_.notify_one();
  }
}

void MaskFiller::fill(std::span<const SampleTask> tasks, Followed& followed) {
  if (followed.rows.size() < tasks.size()) followed.rows.resize(tasks.size());
  for (size_t i = 0; i < tasks.size(); ++i) {
    followed.rows[i].bits.clear();
    followed.rows[i].end_token_id = -1;
    followed.rows[i].error.clear();
  }
  size_t num_filled = 0;
  try {
    fill_rows(tasks, followed, num_filled);
  } catch (const std::exception& failure) {  // its request fails alone, if the row is used
    for (size_t i = num_filled; i < tasks.size(); ++i) followed.rows[i].error = failure.what();
    let_go_of_matcher(followed);
  }
}

void MaskFiller::fill_rows(std::span<const SampleTask> tasks, Followed& followed,
                           size_t& num_filled) {
  follow(tasks[0], followed);
  TokenMatcher& matcher = *followed.matcher;
  for (size_t i = 0; i < tasks.size(); ++i) {
    RowMask& row = followed.rows[i];
    row.bits.resize(static_cast<size_t>((vocab_size_ + 31) / 32));
    matcher.fill(row.bits);
    row.error.clear();
    ++num_filled;
    const bool runs_ahead = i + 1 < tasks.size() && is_allowed(row, tasks[i + 1].token_ids.back());
    separate_ends(tasks[i], row);
    if (!runs_ahead) break;
    matcher.append(tasks[i + 1].token_ids.back());
  }
  if (num_filled > 1) matcher.roll_back(static_cast<int64_t>(num_filled) - 1);
}

bool MaskFiller::is_allowed(const RowMask& row, int32_t token_id) {
  return (row.bits[static_cast<size_t>(token_id / 32)] >> (token_id % 32) & 1) != 0;
}

// After an error a matcher is of no use. The next step, if there is one, makes another.
void MaskFiller::let_go_of_matcher(Followed& followed) {
  const std::lock_guard lock(mutex_);
  followed.matcher.reset();
}

void MaskFiller::follow(const SampleTask& task, Followed& followed) {
  if (!followed.matcher) {
    auto matcher = task.params->grammar->make_matcher();
    followed.num_seen = static_cast<size_t>(task.num_prompt_tokens);
    const std::lock_guard lock(mutex_);
    followed.matcher = std::move(matcher);
  }
  const std::span<const int32_t> committed = task.committed_token_ids();
  for (; followed.num_seen < committed.size(); ++followed.num_seen)
    followed.matcher->append(committed[followed.num_seen]);
}

// A text that can only end does so, whatever else was asked for: min_tokens and ignore_eos cannot
// lengthen it.
void MaskFiller::separate_ends(const SampleTask& task, RowMask& row) {
  std::vector<uint32_t>& mask = row.bits;
  row.ends.clear();
  for (const int32_t id : task.params->grammar->end_token_ids()) {
    uint32_t& word = mask[static_cast<size_t>(id / 32)];
    if ((word >> (id % 32) & 1) == 0) continue;
    row.ends.push_back(id);
    word &= ~(1u << (id % 32));
  }
  if (row.ends.empty()) return;
  if (std::ranges::all_of(mask, [](uint32_t word) { return word == 0; })) {
    row.end_token_id = row.ends[0];
  } else if (!task.params->ignore_eos) {
    for (const int32_t id : row.ends) mask[static_cast<size_t>(id / 32)] |= 1u << (id % 32);
  }
}

void MaskFiller::finish() {
  std::unique_lock lock(mutex_);
  const auto all_done = [this] { return num_done_ == jobs_.size(); };
  while (!has_result_.wait_for(lock, kPatience, all_done)) cancel_late_jobs();
  for (const Job& job : jobs_) {
    for (size_t i = 0; i < job.tasks.size(); ++i) {
      const RowMask& row = job.followed->rows[i];
      job.tasks[i].allowed = row.bits;
      job.tasks[i].end_token_id = row.end_token_id;
      job.tasks[i].mask_error = row.error;
    }
  }
}

// Those that wait for a thread are not to blame.
void MaskFiller::cancel_late_jobs() {
  const auto since = std::chrono::steady_clock::now() - kPatience;
  for (const Job& job : jobs_) {
    if (job.is_running && job.begin <= since && job.followed->matcher)
      job.followed->matcher->cancel();
  }
}

void MaskFiller::forget(RequestId request_id, int32_t sample_index) {
  matchers_.erase({request_id, sample_index});
}

}  // namespace llmserve
