// Chooses a replica for each request, and keeps in mind what it has given to whom.
//
// A replica's cost is the work that it has been given and has not finished, and what the request
// would add there: its prompt without the blocks that the replica has. So a cached prefix draws
// requests as long as the queue before them costs less than it saves. Choosing and reserving are
// one act, since requests that choose from the same numbers would all go the same way.
//
// Every call may come from any thread.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "api/block_events.h"
#include "routing/prefix_index.h"
#include "routing/router_policy.h"

namespace llmserve {

struct RouterConfig {
  std::string policy = "prefix";  // a name of router_policy_registry()
  int64_t block_size = 16;        // tokens of a block
  // A token's attention to so many others costs as much as all else of it.
  double attention_tokens = std::numeric_limits<double>::infinity();
  // Work of a generated token; of a token of a prompt it is 1. Weights are read for each step, and
  // so few rows cost more than their share.
  double decode_work = 1.0;
  // The part of all tokens of all replicas that one tenant may have reserved while another one has
  // any; 1: no limit.
  double max_tenant_share = 1.0;
  uint64_t seed = 0;  // of what is drawn

  void validate() const;  // throws InvalidArgument
};

struct ReplicaSpec {
  std::string name;
  int64_t max_tokens = 0;  // of requests at once, prompt and answer; 0: no limit
  double speed = 1.0;      // work a second, against the others'
  // Blocks that it is assumed to keep of what it was sent; 0: it tells by events.
  int64_t assumed_blocks = 0;

  void validate() const;  // throws InvalidArgument
};

struct RouteRequest {
  std::span<const TokenHash> hashes;  // of the prompt's full blocks
  int64_t num_prompt_tokens = 0;
  int64_t max_new_tokens = 0;
  std::string tenant;
  std::span<const int32_t> excluded;  // replicas that have failed it already
};

struct Route {
  uint64_t id = 0;  // of the reservation
  int32_t replica = 0;
  int64_t num_cached_tokens = 0;  // that the replica is thought to have
  double cost = 0.0;              // when it was chosen
};

// Where a router stands with a replica.
struct ReplicaLoad {
  std::string name;
  bool is_ready = false;
  int64_t num_requests = 0;
  int64_t num_tokens = 0;      // reserved
  double prefill_work = 0.0;   // of prompts that have not given their first token
  double decode_work = 0.0;    // of answers, as far as they may still go
  int64_t num_blocks = 0;      // that it is thought to have
  int64_t num_routed = 0;      // requests, of all time
  int64_t num_hit_tokens = 0;  // of their prompts
};

class Router {
 public:
  explicit Router(const RouterConfig& config);

  // Returns its number, which stays. Throws InvalidArgument on a name that is there, and
  // ResourceExhausted beyond kMaxReplicas at once.
  int32_t add_replica(const ReplicaSpec& spec);
  // It gets nothing more; what it has goes on. Of what it holds nothing is forgotten.
  void set_ready(int32_t replica, bool is_ready);
  // Gone: its blocks and reservations are forgotten. Returns the reservations, whose requests have
  // to be sent elsewhere. Its number may be given again.
  std::vector<uint64_t> remove_replica(int32_t replica);

  // None if no replica that is ready and not excluded has room, or the tenant has its share.
  std::optional<Route> choose(const RouteRequest& request);
  // The prompt has been computed: the first token is there. Unknown ids are passed over here and
  // below, since replicas go while answers come.
  void started(uint64_t id);
  // So many tokens more have come.
  void grew(uint64_t id, int64_t num_tokens);
  void finish(uint64_t id);

  // False if batches are missing before this one: take a snapshot and restore(). Batches that came
  // before are passed over. `of_all`: gets what the batch changed for all replicas together, of
  // which one may have had the block before, or still have it.
  bool apply(int32_t replica, const BlockEventBatch& batch,
             std::vector<BlockEvent>* of_all = nullptr);
  void restore(int32_t replica, const BlockSnapshot& snapshot);

  // All blocks that any replica holds.
  std::vector<TokenHash> held_blocks() const;

  std::vector<ReplicaLoad> loads() const;

 private:
  struct Replica {
    ReplicaSpec spec;
    bool is_there = false;
    bool is_ready = false;
    int64_t sequence = 0;  // of the last batch
    std::optional<AssumedCache> assumed;
    int64_t num_requests = 0;
    int64_t num_tokens = 0;
    double prefill_work = 0.0;
    double decode_work = 0.0;
    int64_t num_routed = 0;
    int64_t num_hit_tokens = 0;
  };
  struct Reservation {
    int32_t replica = 0;
    int64_t num_tokens = 0;
    double prefill_work = 0.0;  // 0 once it has started
    int64_t num_left = 0;       // tokens that may still come
    std::string tenant;
  };

  Replica& find(int32_t replica);
  bool has_room(const Replica& replica, int64_t num_tokens) const;
  bool has_its_share(const std::string& tenant, int64_t num_tokens) const;
  // Tokens of the prompt that need not run on a replica that has so many of its blocks.
  int64_t cached_tokens(const RouteRequest& request, int32_t num_blocks) const;
  void reserve(const RouteRequest& request, const Candidate& chosen);
  void release(const Reservation& reservation);
  void assume(int32_t replica, std::span<const TokenHash> hashes);

  const RouterConfig config_;
  const RouterPolicy& policy_;
  RouterDraws draws_;
  mutable std::mutex mutex_;
  std::vector<Replica> replicas_;
  PrefixIndex index_;
  // Of the request that is being placed:
  std::vector<int32_t> matches_;  // [replicas], in blocks
  std::vector<Candidate> candidates_;
  std::map<uint64_t, Reservation> reservations_;
  std::unordered_map<std::string, int64_t> tenant_tokens_;  // reserved
  uint64_t next_id_ = 1;
};

}  // namespace llmserve
