// Fills the masks of a step's constrained rows while its forward runs. It has threads of its own;
// the engine's hands them the rows before the forward and waits for them after it, before sampling.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
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
  explicit MaskFiller(int64_t vocab_size);
  ~MaskFiller();
  MaskFiller(const MaskFiller&) = delete;
  MaskFiller& operator=(const MaskFiller&) = delete;

  // Masks under way: whoever leaves early waits for them, since they read the tasks.
  class Pending {
   public:
    explicit Pending(MaskFiller& filler) : filler_(filler) {}
    ~Pending() { filler_.finish(); }
    Pending(const Pending&) = delete;
    Pending& operator=(const Pending&) = delete;
    void finish() { filler_.finish(); }

   private:
    MaskFiller& filler_;
  };

  // Hands on those tasks that have a grammar. finish() waits, and sets allowed, end_token_id and
  // mask_error of these tasks; what they point to stays valid until the next begin(). A row that
  // takes too long is cancelled, and fails.
  // For rows after drafted tokens the matcher runs ahead and is rolled back. A row behind a draft
  // that the grammar does not allow has no mask: its draft is not drawn, and its token is not used.
  [[nodiscard]] Pending begin(std::span<SampleTask> tasks);

  // The sequence has ended: its matcher goes.
  void forget(RequestId request_id, int32_t sample_index);
  int64_t num_matchers() const { return static_cast<int64_t>(matchers_.size()); }

 private:
  // What the grammar says of one row.
  struct RowMask {
    std::vector<uint32_t> bits;  // [ceil(V / 32)], or empty: it says nothing
    std::vector<int32_t> ends;   // tokens that end the text and that the grammar allows
    int32_t end_token_id = -1;   // >= 0: nothing but the end may come
    std::string error;
  };
  // A sequence in its grammar. Its thread's between begin() and finish(), the engine's otherwise.
  struct Followed {
    std::unique_ptr<TokenMatcher> matcher;  // null: at the beginning of the text
    size_t num_seen = 0;        // committed tokens that the matcher has, prompt included
    std::vector<RowMask> rows;  // [at least the rows of its tasks]
  };
  // The rows of one sequence, which one thread fills.
  struct Job {
    std::span<SampleTask> tasks;
    Followed* followed = nullptr;
    std::chrono::steady_clock::time_point begin;  // once a thread has it
    bool is_running = false;
  };

  void start_threads();
  void work();
  void fill(std::span<const SampleTask> tasks, Followed& followed);
  void fill_rows(std::span<const SampleTask> tasks, Followed& followed, size_t& num_filled);
  void follow(const SampleTask& task, Followed& followed);
  void let_go_of_matcher(Followed& followed);
  static bool is_allowed(const RowMask& row, int32_t token_id);
  static void separate_ends(const SampleTask& task, RowMask& row);
  void finish();
  void cancel_late_jobs();

  const int64_t vocab_size_;
  std::map<std::pair<RequestId, int32_t>, Followed> matchers_;  // by request and sample
  std::vector<std::thread> threads_;                            // none before the first grammar

  std::mutex mutex_;  // guards what follows, and where Followed::matcher points while a job runs
  std::condition_variable has_work_;
  std::condition_variable has_result_;
  std::vector<Job> jobs_;
  size_t next_job_ = 0;
  size_t num_done_ = 0;
  bool is_stopping_ = false;
};

}  // namespace llmserve
