// A step's rows in two halves, so that what one half exchanges goes over a wire while the other
// computes. Two micro-batches: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.4.1.
//
// Rows do not depend on each other, but for keys and values: of a sequence that is cut, the second
// half reads what the first stores. So the bits are those of one batch.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "api/engine_config.h"
#include "core/arena.h"
#include "engine/exchange_log.h"
#include "engine/rank_threads.h"
#include "models/model.h"

namespace llmserve {

// Tokens of the first half of T, which has no fewer than the second; grows with T.
int64_t first_half_of(int64_t num_tokens);
// Where the second half of a step begins; 0: it runs at once. Steps of decoding sequences alone do:
// they take as long as weights take to be read, which halves would read twice. So do steps that
// want the states of layers, or have embeddings in the place of tokens.
int64_t second_half_of(const ModelInput& input, int64_t num_prefill_tokens,
                       const ParallelConfig& parallel);

// Each half has a thread, an arena, and connections of its own. One of them computes at a time,
// with all of the backend's threads, and whoever waits for other ranks lets the other one compute.
// So ranks need not agree on an order: only on where the halves are.
//
// The second half's thread is watched here: if it stands still, the step fails. The first half's is
// the rank's, which others watch, also where it waits for a second half that hangs while it
// computes.
class HalfBatches {
 public:
  // workspace_bytes: of Model::workspace_bytes() for first_half_of() the most tokens. first_thread:
  // as thread_share() has it, 0 where the rank's threads are not pinned.
  HalfBatches(int64_t workspace_bytes, int first_thread, Memory& memory,
              const RankPatience& patience = kHostPatience);

  // As Model::forward(), of whole.input from token `second_half` on in a second half, which
  // exchanges through `second`. Throws what that throws; both ends have been aborted then.
  // RankLeft: the second half's thread has not come back, and this object must not be destroyed.
  Tensor forward(const Model& model, const ForwardContext& whole, int64_t second_half,
                 Communicator& first, Communicator& second, ExchangeLog* log);

  int64_t num_bytes() const;

 private:
  class Half;  // one that runs

  // A half of a step's input.
  struct Part {
    std::vector<int32_t> query_starts, kv_lens;
    std::vector<KvGroupInput> groups;
    ModelInput input;
  };
  void cut(const ModelInput& whole, int64_t second_half);
  void give_up() noexcept;
  void take_turn() noexcept;
  void pass_turn() noexcept;

  std::array<Arena, 2> arenas_;
  std::array<Part, 2> parts_;
  std::array<Communicator*, 2> ends_{};  // of the step at hand

  std::mutex mutex_;  // guards what follows
  std::condition_variable has_changed_;
  bool is_turn_taken_ = false;  // a half computes
  int64_t num_attended_ = 0;    // layers whose attention the first half has ended
  bool has_failed_ = false;
  RankThreads threads_;  // the last: they use the others
};

}  // namespace llmserve
