// What carries out a plan: a model on a device, the tests' token oracle, or a cost model in
// simulated time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "api/engine_metrics.h"
#include "api/sampled_tokens.h"
#include "core/error.h"
#include "core/tensor.h"
#include "engine/rank_patience.h"
#include "scheduler/news.h"
#include "scheduler/step_plan.h"

namespace llmserve {

// Bytes that an executor holds.
struct MemoryUse {
  int64_t weight_bytes = 0;
  int64_t mapped_bytes = 0;  // of them, read in place from the file
  int64_t workspace_bytes = 0;
  int64_t kv_cache_bytes = 0;
  // Of a device's memory pool, which all of this and what the backend itself needs come from: in
  // use, taken from the device, and the most that either has been. 0 without one.
  int64_t pool_used_bytes = 0;
  int64_t pool_used_high_bytes = 0;
  int64_t pool_reserved_bytes = 0;
  int64_t pool_reserved_high_bytes = 0;
  int64_t graph_bytes = 0;  // of recorded steps, beside the pool, as far as can be told

  // Another worker's, too.
  MemoryUse& operator+=(const MemoryUse& other);
};

// What an executor can give back while nobody needs it. The workspace goes with the weights.
enum class MemoryPart : uint8_t { kWeights, kKvCache };
inline constexpr int kNumMemoryParts = 2;
// "weights", "kv_cache". Throws InvalidArgument.
MemoryPart parse_memory_part(std::string_view name);

// A rank has failed, and with it the step, but the next step can run: what ran in it can be
// computed again.
class RankFailure final : public DeviceError {
 public:
  RankFailure(int rank, const std::string& reason) : DeviceError(reason), rank_(rank) {}
  int rank() const { return rank_; }

 private:
  int rank_;
};

// A rank has failed and its thread has not come back: it may write to the executor's memory at any
// time, so that this memory stays for good, and the executor takes no more steps.
class RankLeft final : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

class KvHost;   // comm/kv_host.h
class KvMover;  // engine/kv_mover.h
struct HandOverOptions;
class ExchangeLog;     // engine/exchange_log.h
class ExpertLoads;     // engine/expert_loads.h
class ExpertBalancer;  // layers/expert_balancer.h
struct ExpertBalanceOptions;
class DraftModel;  // speculation/draft_model.h
class Drafter;     // speculation/drafter.h
class HeadModel;   // speculation/head_model.h

class Executor {
 public:
  virtual ~Executor() = default;

  // Steps that may be in flight, from launch() to wait(), at a time; at most
  // Scheduler::kMaxInFlight. An executor with one is asked for nothing ahead.
  virtual int32_t max_in_flight() const { return 1; }
  // Whether a step may run tokens that the one before draws, of two in flight. If not, steps in
  // flight have other sequences, or later tokens of their prompts.
  virtual bool runs_ahead() const { return true; }
  // Begins one step, after those in flight. The plan's spans are not read after it returns. A plan
  // without sequences is a step, too: it runs nothing, and its wait() gives no rows. Throws
  // DeviceError (or any Error) when the step as a whole failed.
  virtual void launch(const StepPlan& plan) = 0;
  // Waits for the oldest step in flight: one record a logit row of its plan, in its order; what is
  // pooled has gone to its output. The result is valid until the next call. Throws as launch()
  // does; a row that failed alone has is_valid = false.
  virtual const SampledTokens& wait() = 0;
  // Where launch() or wait() has thrown, or nobody will wait: no step is in flight any more.
  virtual void abandon() noexcept {}
  // How long the thread that calls it may stand still in a step; none: nobody knows.
  virtual RankPatience patience() const { return {}; }
  // It has thrown RankLeft. It must not be destroyed: who owns it leaves it where it is.
  virtual bool has_left_rank() const { return false; }
  // Who waits in it for other processes waits no more, and throws. Any thread.
  virtual void cancel() noexcept {}

  // Where the executor tells what finishes beside its steps; given once, before the first step.
  virtual void report_to(NewsSink sink) = 0;

  // Exchanges KV blocks with other engines from now on; at most once. The mover is the executor's
  // as long as both live. host: of another replica that does so, or null. Throws NotSupported where
  // it cannot, and what KvMover throws.
  virtual bool can_hand_over() const { return false; }
  virtual std::shared_ptr<KvMover> open_hand_over(const HandOverOptions& options,
                                                  std::shared_ptr<KvHost> host);

  // Background work makes later steps quicker. A call does some milliseconds of it, between two
  // steps, and returns false where nothing is left to do.
  virtual bool do_background_work() { return false; }
  // Likewise, for an idle engine only: the step that needs the result would do as much itself.
  virtual bool do_idle_work() { return false; }

  // The sample has ended: whatever is kept of it from step to step may go.
  virtual void forget(RequestId /*request_id*/, int32_t /*sample_index*/) {}
  // While no request is unfinished: throws InternalError if something is still kept of one.
  virtual void check_idle() const {}

  // The model that guesses tokens of its steps; null: it has none.
  virtual DraftModel* draft_model() { return nullptr; }
  virtual HeadModel* head_model() { return nullptr; }  // likewise, on its hidden states
  // What guesses tokens of its steps, in the place of the registry's drafter; null: nothing.
  virtual std::unique_ptr<Drafter> make_drafter();
  // Rows of a step up to which guesses change no bit of a row; 0: any number.
  virtual int64_t max_exact_rows() const { return 0; }
  // After wait(): [L, T, E] f32, the states of the step's wanted layers; null where it has none.
  virtual const Tensor* wanted_states() const { return nullptr; }

  virtual int64_t vocab_size() const = 0;
  virtual int64_t hidden_size() const = 0;  // of the vectors that tokens are
  // What does the work, for the log: "LlamaForCausalLM float32 on cpu/avx2, 2 threads".
  virtual std::string description() const = 0;
  virtual MemoryUse memory_use() const = 0;
  // Its own counters; the others are left alone.
  virtual void fill_metrics(EngineMetrics& /*metrics*/) const {}
  // What counts the rows that experts are given; null: there are none.
  virtual std::shared_ptr<ExpertLoads> expert_loads() const { return nullptr; }
  // Between two steps: keeps experts that stand whole on ranks balanced from now on. Throws
  // InvalidArgument, and NotSupported where there are none.
  virtual std::shared_ptr<const ExpertBalancer> balance_experts(const ExpertBalanceOptions&);
  // What was not as it should be when it was made, and did no harm; empty: nothing.
  virtual std::string warning() const { return {}; }
  // What rank 0 exchanges with other processes; null: there are none.
  virtual std::shared_ptr<const ExchangeLog> exchange_log() const { return nullptr; }

  // Gives a part's memory back to the system, or takes it again: the KV cache comes back empty, the
  // weights as they are on disk now. launch() needs both parts. Nothing happens if the part is
  // gone, or there, already. restore() throws what loading throws, and InvalidArgument if the
  // checkpoint's shapes have changed; the part is still gone then.
  virtual void release(MemoryPart part) = 0;
  virtual void restore(MemoryPart part) = 0;
};

}  // namespace llmserve
