// RequestBook has all unfinished requests and their sequences: who waits, who runs, and how each
// moves on. RequestBook alone changes a sequence's state, by the table of sequence_state.h. With
// the state it changes what the sequence owns: its place in the queue, its seat and its blocks.
//
// A sequence that ends while a step in flight runs it keeps its blocks until that step's commit.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "api/engine_config.h"
#include "api/engine_metrics.h"
#include "kv_cache/kv_cache_manager.h"
#include "scheduler/outbox.h"
#include "scheduler/policy.h"
#include "scheduler/running_set.h"
#include "scheduler/sequence.h"
#include "scheduler/waiting_queue.h"
#include "text/vocabulary.h"

namespace llmserve {

struct RequestEntry {
  RequestContext context;
  std::vector<std::unique_ptr<Sequence>> sequences;  // unfinished, or in a step in flight
  // It has left another scheduler, where a step that ran it could not be executed.
  bool has_failed = false;
};

using RequestEntries = std::unordered_map<RequestId, RequestEntry>;
// A request on its way from one book to another: what its parts refer to of each other stays where
// it is in memory.
using LeavingRequest = RequestEntries::node_type;

// The error of a sequence whose logits at this position are NaN or infinite.
std::string not_finite_error(int64_t position);

class RequestBook {
 public:
  // All outlive the book; `vocabulary` may be null.
  RequestBook(const SchedulerConfig& config, const Vocabulary* vocabulary, SchedulingPolicy& policy,
              KvCacheManager& kv_cache, Outbox& outbox)
      : config_(config),
        vocabulary_(vocabulary),
        policy_(policy),
        kv_cache_(kv_cache),
        outbox_(outbox),
        running_(config.max_num_seqs) {}

  // Queues a request that RequestAdmission has admitted. Throws InvalidArgument if its id is in use
  // and ResourceExhausted if the queue is full. Nothing changed then.
  void add(Request request);
  // Takes a request out, with all that its sequences have come to; their blocks go back.
  // Precondition: it is there, and none of them is in a step in flight.
  LeavingRequest leave(RequestId id);
  // Queues a request that has left another book of the same configuration, behind those that are
  // here. It goes on as one that was preempted: its tokens are computed again.
  void enter(LeavingRequest request);
  std::vector<RequestId> ids() const;  // in the order of arrival
  bool is_empty() const { return requests_.empty(); }
  RequestEntry* find(RequestId id);
  // Null where the sequence has ended.
  Sequence* find(RequestId id, int32_t sample_index);
  int64_t num_added() const { return next_order_; }

  RunningSet& running() { return running_; }
  const RunningSet& running() const { return running_; }
  const WaitingQueue& waiting() const { return waiting_; }
  // Asks the policy for new service keys, where keys_change().
  void reorder();

  // Takes the sequence out of the queue. It has a seat and the blocks of a prefix of
  // num_hit_tokens.
  void start(Sequence& sequence, SequenceEvent event, int64_t num_hit_tokens);
  void finish_load(Sequence& sequence, bool is_done);
  // Makes another sequence with the tokens and the blocks that `parent` has now. The new sequence
  // runs, but has no seat before place_forks().
  Sequence& fork(Sequence& parent, int32_t sample_index);
  // Gives forks a seat while there are seats. The other forks queue, and will start over from the
  // prefix cache.
  void place_forks();
  // Forks of the current commit, in the order in which they were made.
  const std::vector<Sequence*>& forks() const { return forks_; }

  void hold(Sequence& sequence) { move_on(sequence, SequenceEvent::kHold); }
  // A held beam, which may have been preempted since, runs again.
  void advance(Sequence& sequence);
  // The sequence gives its blocks and its seat back, and queues.
  void preempt(Sequence& sequence);
  // Ends a sequence with one last event for each sample whose tokens would have come from it.
  void finish(Sequence& sequence, FinishReason reason, const std::string& error);
  // Ends all sequences of a request.
  void finish(RequestEntry& entry, FinishReason reason, const std::string& error);
  // Ends a sequence whose last event has been written.
  void retire(Sequence& sequence, TokenEvent& event);
  // Ends a sequence without an event. Its place is free, and so are its blocks unless a step in
  // flight runs it.
  void drop(Sequence& sequence);
  // Guesses beside `drafts` go, and their blocks.
  void drop_branches(Sequence& sequence);
  // The peer that its blocks go to may have those that are computed. Precondition: it has one.
  void send_computed(Sequence& sequence);
  // The last step in flight that ran the sequence, or a void part of it, is over.
  void leave_flight(Sequence& sequence);
  // Counts a request whose last event the caller writes itself.
  void count_finished(const Request& request);
  // Cancels what goes to peers: what has been computed is not to be trusted.
  void cancel_sends();
  // Frees ended sequences that nothing refers to, and their requests.
  void drop_ended();
  // Ends all sequences with kError. Precondition: no step is in flight.
  void fail(const std::string& reason);

  void reset_prefix_cache();

  // Sets the counters of requests and sequences; the others are left alone.
  void fill_metrics(EngineMetrics& metrics) const;
  int64_t num_transitions(SequenceState state, SequenceEvent event) const {
    return num_transitions_[static_cast<size_t>(state)][static_cast<size_t>(event)];
  }
  std::vector<const Sequence*> sequences() const;
  std::vector<const Sequence*> ended() const;
  // Throws InternalError unless sequences, queue, seats and blocks agree.
  void check_integrity() const;

 private:
  void move_on(Sequence& sequence, SequenceEvent event);
  std::unique_ptr<Sequence> make_sequence(RequestContext& context, int32_t sample_index) const;
  void resume(Sequence& sequence) const;
  void send_to_queue(Sequence& sequence);
  void withdraw(Sequence& sequence);
  void let_go(Sequence& sequence);
  void check_sequence(const Sequence& sequence) const;

  const SchedulerConfig& config_;
  const Vocabulary* const vocabulary_;
  SchedulingPolicy& policy_;
  KvCacheManager& kv_cache_;
  Outbox& outbox_;

  RequestEntries requests_;
  WaitingQueue waiting_;
  RunningSet running_;
  std::vector<Sequence*> forks_;
  std::vector<Sequence*> ended_;  // to be dropped
  int64_t next_order_ = 0;
  int64_t num_finished_ = 0;  // requests
  int64_t num_aborted_ = 0;
  int64_t num_preemptions_ = 0;
  int64_t num_prompt_tokens_ = 0;
  std::array<std::array<int64_t, kNumSequenceEvents>, kNumSequenceStates> num_transitions_{};
};

}  // namespace llmserve
