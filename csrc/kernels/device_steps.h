// What an engine asks of a device beside its ops, so that it can launch a step while the one before
// is under way: the step's integers in one block, tokens that never leave the device between two
// steps, and results that are waited for later.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "core/tensor.h"
#include "kernels/draw_records.h"
#include "kernels/ops.h"

namespace llmserve {

// Tokens that the counts of rows lack, since the step before draws them.
struct LateTokens {
  std::span<const int32_t> token_ids;  // [T] within the block, after take_awaited()
  std::span<const int32_t> indices;    // [S'] into them; -1: the row lacks none
};

// Of ranks that have experts whole, which rows are this one's. local[r] = ids[r] - begin where that
// is in [0, count), and -1 for the others. Of these, rows[r] becomes 0 in all its bits, so that the
// ranks' rows can be added up as integers, and weights[r] becomes 0.
//
// Where experts move among ranks, `homes` takes the place of begin and count: homes[e] has how many
// copies expert e has, which of them is here, or -1, and its place here, which becomes local[r]. Of
// n copies row r runs on copy (r / rows_per_token) mod n.
struct OwnExperts {
  ConstTensor ids;    // [R] i32, contiguous
  int32_t begin = 0;  // the rank's first expert
  int32_t count = 0;
  ConstTensor homes;  // [X, 3] i32, contiguous, in the device's memory; or none
  int64_t rows_per_token = 1;
  Tensor local;    // [R] i32, contiguous
  Tensor rows;     // [R, E] f32, or none; rows may be strided
  Tensor weights;  // [R] f32, contiguous, or none
};

// The counts of a row that are those of one sequence in every step, whose tokens only get more: a
// device keeps them and is told of the last ones.
struct KeptCounts {
  uint64_t id = 0;  // of no other sequence in this process; 0: the row's counts are its own
  // The entries of SampleRow::counts that the tokens so far were counted in, in their order.
  std::span<const uint32_t> counted;
};

// What tells recorded work apart.
struct RecordKey {
  int64_t num_rows = 0;
  int64_t max_blocks = 0;
  uint64_t lengths = 0;     // of the sequences, as the caller tells them apart; 0: a token each
  int32_t num_layers = 0;   // whose hidden states are wanted
  int32_t model = 0;        // of several on the device
  bool counts_ids = false;  // IdCounts::add is asked for
  bool draws = true;        // draw() of all rows; or nothing is drawn in it, but behind it
  bool is_shared = false;   // with other ranks, which it exchanges with
  auto operator<=>(const RecordKey&) const = default;
};

// What is taken of the pool that the device's memory comes from, what the pool has taken of the
// device, and the most that either has been. 0 where there is no pool.
struct PoolUse {
  int64_t used_bytes = 0;
  int64_t used_high_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t reserved_high_bytes = 0;
};

struct RecordCounts {
  int64_t num_captures = 0;
  int64_t num_refusals = 0;  // of a capture
  int64_t num_replays = 0;
  int64_t kept_bytes = 0;  // of the device, by which its free memory fell as they were recorded
};

// How often ids came, counted on the device: nothing of a step waits for the host.
class IdCounts {
 public:
  virtual ~IdCounts() = default;

  // As an op, and recorded as one: count(begin + i) grows by how often i is among ids [T, k] i32,
  // in the device's memory, contiguous and below num_ids. Of recorded work, whose T are all of the
  // step's, rows beyond those that are drawn fill it up and do not count.
  virtual void add(const ConstTensor& ids, int64_t begin, int64_t num_ids) = 0;
  // What a step has added is in it once wait() has returned for the step. Any thread.
  virtual int64_t count(int64_t i) const = 0;
};

// begin(), bring_over(), ops, draw() and sample(), end(): one step, in the order of the ops. Rows
// are numbered within the step. Each throws DeviceError.
class DeviceSteps {
 public:
  virtual ~DeviceSteps() = default;

  // Host memory, aligned to 64 bytes, for all of a step's integers. It is one of a ring: waits
  // where the device has not brought over what was written there before.
  // Of `max_rows` rows, num_rows are drawn; the others fill the batch up.
  virtual std::span<std::byte> begin(int64_t num_bytes, int64_t num_rows, int64_t max_rows) = 0;
  // The same for a rank that runs another one's step: `block` is what that one's begin() gave,
  // full. It is copied, and ops that are given spans within it find them on this device.
  virtual void follow(std::span<const std::byte> block, int64_t num_rows, int64_t max_rows) = 0;
  // What was written there goes over in one copy. Ops that are given spans within the block find
  // them on the device, until end(): the host must not change them any more.
  virtual void bring_over() = 0;
  // [n] i32 in the device's memory: where `ids`, a span within the block, were brought over to.
  // Among ranks one takes what was drawn, and tells the others.
  virtual Tensor brought(std::span<const int32_t> ids) = 0;
  // token_ids[t] = what the step before drew as row awaited_rows[t], where that is not -1. Spans
  // within the block.
  virtual void take_awaited(std::span<const int32_t> token_ids,
                            std::span<const int32_t> awaited_rows) = 0;
  // As an op, beside the ops of the step.
  virtual void own_experts(const OwnExperts& args) = 0;
  // Draws rows [first_row, first_row + S') from logits [S', V]; draws [S'] within the block.
  virtual void draw(const ConstTensor& logits, std::span<const SeededDraw> draws,
                    int64_t first_row) = 0;
  // The sample op for rows [first_row, first_row + S') whose draw is edited or that report. What
  // the rows refer to is taken over before it returns; args.out is written by wait(), and has to
  // stay where it is until then. A late token counts as one more that was generated. kept [S'].
  virtual void sample(const SampleArgs& args, int64_t first_row, const LateTokens& late,
                      std::span<const KeptCounts> kept) = 0;
  // The sequence with these counts (KeptCounts::id) has ended.
  virtual void forget_counts(uint64_t counts_id) = 0;
  // `work` asks for all of a step between bring_over() and end(): take_awaited(), ops and draw().
  // With a key without draws it is the beginning of that, and the rest is asked for behind it.
  // For one key it is the same but for what lies in the step's block and in memory that stays where
  // it is. It is asked for as it is the first time, then recorded, and from then on launched
  // without asking (engine/recorded_run.h).
  enum class Recording : uint8_t {
    kNone,      // it has not run yet, or cannot be recorded
    kPossible,  // it has run, so that nothing is loaded, measured or taken any more
    kThere,
  };
  virtual Recording recording(const RecordKey& key) = 0;
  virtual void run_asked(const RecordKey& key, const std::function<void()>& work) = 0;
  // Anew, where it was: nothing is asked of the device. False: it cannot be recorded, or was
  // forgotten meanwhile.
  virtual bool record(const RecordKey& key, const std::function<void()>& work) = 0;
  // It is not to be recorded, and what was recorded goes.
  virtual void refuse_recording(const RecordKey& key) = 0;
  // Throws DeviceError where it is not there any more.
  virtual void replay(const RecordKey& key) = 0;
  // Before memory that recorded work uses goes: it is recorded anew.
  virtual void forget_recorded() = 0;
  virtual RecordCounts record_counts() const = 0;
  // Rows of a step up to which a row's bits do not depend on how many run with it; 0: any number.
  virtual int64_t max_exact_rows() const { return 0; }
  virtual PoolUse pool_use() const = 0;
  // Of `size` ids, at 0. It must not live longer than this.
  virtual std::unique_ptr<IdCounts> make_id_counts(int64_t size) = 0;
  // The rows that were drawn are on their way to the host. Returns the step's number.
  virtual int64_t end() = 0;
  // The rows [num_rows] of a step, of which those not drawn are unspecified: waits for them. Valid
  // until two more steps have begun.
  virtual std::span<const DrawnRow> wait(int64_t step) = 0;
  // Waits until the device does nothing any more, whatever comes of it.
  virtual void abandon() noexcept = 0;
};

}  // namespace llmserve
