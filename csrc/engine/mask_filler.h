// Fills the masks of a step's constrained rows while its forward runs. It has threads of its own;
// the engine's hands them the rows before the forward and asks for the masks after it, before
// sampling.
//
// A slow grammar holds up nobody but its own sequence. Where a sequence's masks are not there
// shortly after the forward, its rows await them: nothing is drawn from these, a later step runs
// the sequence's last token again, and the masks are kept for that step. Sequences whose masks take
// long share a thread of low priority, and the masks of one that were late have a budget together.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sampling/sampling_slot.h"
#include "text/token_mask.h"

namespace llmserve {

class MaskFiller {
 public:
  // Told once for each sequence and step whose rows await masks, when they are there. On a thread
  // of the filler's, with its lock held.
  using Report = std::function<void(RequestId request_id, int32_t sample_index)>;

  explicit MaskFiller(int64_t vocab_size);
  ~MaskFiller();
  MaskFiller(const MaskFiller&) = delete;
  MaskFiller& operator=(const MaskFiller&) = delete;

  void report_to(Report report) { report_ = std::move(report); }  // before the first begin()

  // Takes those tasks that have a grammar; nothing of them is read later. For rows after drafted
  // tokens the matcher runs ahead and is rolled back. A row behind a draft that the grammar does
  // not allow has no mask: its draft is not drawn, and its token is not used.
  void begin(std::span<const SampleTask> tasks);
  // Waits a little, and sets allowed, end_token_id and mask_error of begin()'s tasks, or
  // awaits_mask; what they point to stays valid until the next begin(). For rows that cannot await
  // theirs it waits as long as it takes.
  void finish(std::span<SampleTask> tasks);

  // The same for rows of a draft, one a sequence, whose guesses so far are drafted tokens. The
  // masks are kept for the step that checks the guesses. A sequence whose grammar is slow, or late
  // now, awaits its mask, which nobody is told of: the draft ends there.
  void begin_drafts(std::span<const SampleTask> tasks);
  void finish_drafts(std::span<SampleTask> tasks);

  // The sequence has ended: its matcher goes.
  void forget(RequestId request_id, int32_t sample_index);
  int64_t num_matchers() const { return static_cast<int64_t>(sequences_.size()); }

 private:
  using Clock = std::chrono::steady_clock;

  // What the grammar says of one row.
  struct RowMask {
    std::vector<uint32_t> bits;  // [ceil(V / 32)], or empty: it says nothing
    std::vector<int32_t> ends;   // tokens that end the text and that the grammar allows
    int32_t end_token_id = -1;   // >= 0: nothing but the end may come
    std::string error;
  };
  enum class State : uint8_t { kIdle, kQueued, kRunning };
  // A sequence in its grammar. While a thread runs it, all that the lock does not guard is the
  // thread's, and otherwise the engine's.
  struct Followed {
    RequestId request_id = 0;
    int32_t sample_index = 0;
    std::shared_ptr<TokenGrammar> grammar;
    bool ignore_eos = false;
    std::vector<int32_t> generated;  // committed, without the prompt
    std::vector<int32_t> drafted;    // behind them
    size_t num_appended = 0;         // of `generated`, that the matcher has
    size_t num_rows = 0;             // rows that hold for `generated` and `drafted`
    std::vector<RowMask> rows;       // [at least num_rows]
    // Under the lock.
    std::unique_ptr<TokenMatcher> matcher;  // null: at the beginning of the text
    State state = State::kIdle;
    bool is_slow = false;       // took long for its last masks
    bool is_forgotten = false;  // nobody asks for its masks any more
    bool is_cancelled = false;  // where it runs: too long for its thread, or for its budget
    int32_t num_reports = 0;    // due when it is idle
    Clock::time_point begin;    // once a thread has it
    Clock::duration used{};     // of the budget
  };
  using Sequence = std::shared_ptr<Followed>;
  // The rows of one sequence in the step.
  struct Share {
    size_t first_task = 0;
    size_t num_tasks = 0;
    bool can_await = true;
    bool is_other = false;  // a thread has the sequence with other drafts than the tasks
    bool is_left = false;   // a draft's, whose masks take too long
    Sequence sequence;
  };

  void start_threads();
  void work(std::deque<Sequence>& queue);
  void watch();
  void cancel_late();
  void share_out(std::span<const SampleTask> tasks, bool are_drafts);
  const Sequence& followed(const SampleTask& task);
  void follow(std::span<const SampleTask> tasks, Share& share);
  void enqueue(const Sequence& sequence);
  void end_run(const Sequence& sequence, bool has_failed);
  bool fill(Followed& sequence);
  void fill_rows(Followed& sequence);
  void catch_up(Followed& sequence);
  static bool is_allowed(const RowMask& row, int32_t token_id);
  static void separate_ends(const Followed& sequence, RowMask& row);
  static void hand_over(const Share& share, std::span<SampleTask> tasks);

  const int64_t vocab_size_;
  Report report_;
  std::map<std::pair<RequestId, int32_t>, Sequence> sequences_;  // by request and sample
  std::vector<Share> shares_;                                    // of the step
  std::vector<std::thread> threads_;                             // none before the first grammar

  std::mutex mutex_;  // guards what follows
  std::condition_variable has_work_;
  std::condition_variable has_result_;
  std::condition_variable has_late_;
  std::deque<Sequence> quick_;
  std::deque<Sequence> slow_;   // of those that are
  std::vector<Sequence> late_;  // that a step has gone on without, or waits for longer
  bool is_stopping_ = false;
};

}  // namespace llmserve
