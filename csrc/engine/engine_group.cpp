#include "engine/engine_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <limits>
#include <utility>

#include "core/error.h"
#include "engine/expert_loads.h"
#include "engine/kv_mover.h"
#include "layers/expert_balancer.h"

namespace llmserve {
namespace {

// Tokens that an answer is expected to have, of those that may go on for long: most end by
// themselves, and what is reserved for them is not to keep others from the prefixes they share.
constexpr int64_t kExpectedAnswer = 256;

// Of one replica. The queue's bound is of all together.
EngineConfig config_of(const EngineConfig& config, int32_t replica) {
  EngineConfig own = config;
  own.parallel.replica = replica;
  if (config.parallel.data > 1) own.scheduler.max_num_queued_reqs = 0;
  return own;
}

RouterConfig router_config(const EngineConfig& config) {
  RouterConfig router;
  router.block_size = config.cache.block_size;
  router.seed = config.seed;
  return router;
}

// Of the prompt's full blocks, as the replicas' prefix caches have them.
std::vector<TokenHash> hash_prompt(const Request& request, const CacheConfig& cache) {
  std::vector<TokenHash> hashes;
  if (!cache.enable_prefix_caching || request.prompt_embeds) return hashes;
  TokenHash parent = request.adapter ? root_hash(request.cache_salt, {&request.adapter->digest, 1})
                                     : root_hash(request.cache_salt);
  const std::span<const int32_t> tokens = request.prompt_token_ids;
  const size_t size = static_cast<size_t>(cache.block_size);
  for (size_t begin = 0; begin + size <= tokens.size(); begin += size) {
    parent = chain_hash(parent, tokens.subspan(begin, size));
    hashes.push_back(parent);
  }
  return hashes;
}

RouteRequest route_request(const Request& request, std::span<const TokenHash> hashes) {
  int64_t num_answers = request.params.n;
  if (request.pooling) num_answers = 0;
  if (request.beam_search) num_answers = request.beam_search->beam_width;
  const int64_t longest = request.params.ignore_eos ? request.params.max_tokens : kExpectedAnswer;
  const int64_t max_tokens = std::clamp<int64_t>(request.params.max_tokens, 0, longest);
  return {.hashes = hashes,
          .num_prompt_tokens =
              std::ssize(request.prompt_token_ids) + std::ssize(request.resumed_token_ids),
          .max_new_tokens = num_answers * max_tokens,
          .tenant = request.tenant};
}

// All of its fields are counters or gauges, which add up.
EngineMetrics sum(const EngineMetrics& a, const EngineMetrics& b) {
  using Fields = std::array<int64_t, sizeof(EngineMetrics) / sizeof(int64_t)>;
  Fields fields = std::bit_cast<Fields>(a);
  const Fields others = std::bit_cast<Fields>(b);
  for (size_t i = 0; i < fields.size(); ++i) fields[i] += others[i];
  return std::bit_cast<EngineMetrics>(fields);
}

void add(EngineHistograms& to, const EngineHistograms& from) {
  for (size_t i = 0; i < to.histograms.size(); ++i) {
    Histogram& histogram = to.histograms[i];
    for (size_t j = 0; j < histogram.counts.size(); ++j)
      histogram.counts[j] += from.histograms[i].counts[j];
    histogram.sum += from.histograms[i].sum;
  }
  for (size_t i = 0; i < to.num_finished.size(); ++i) to.num_finished[i] += from.num_finished[i];
  to.num_cached_prompt_tokens += from.num_cached_prompt_tokens;
}

std::vector<std::unique_ptr<Executor>> list_of(std::unique_ptr<Executor> executor) {
  std::vector<std::unique_ptr<Executor>> list;
  list.push_back(std::move(executor));
  return list;
}

void add_rows(const std::vector<int64_t>& rows, std::vector<int64_t>& sums) {
  sums.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) sums[i] += rows[i];
}

}  // namespace

EngineGroup::EngineGroup(const EngineConfig& config, const std::optional<Vocabulary>& vocabulary,
                         std::vector<std::unique_ptr<Executor>> executors,
                         const std::optional<Vocabulary>& draft_vocabulary)
    : config_(config),
      process_id_(getpid()),
      router_(router_config(config)),
      num_taken_over_(executors.size()),
      num_batches_(executors.size()),
      block_events_((int64_t{config.cache.num_blocks} + config.cache.lower_tier.num_blocks) *
                    std::ssize(executors)) {
  check_internal(std::ssize(executors) == config.parallel.data, "each replica has an executor");
  const bool has_listener = executors.size() > 1;
  for (size_t i = 0; i < executors.size(); ++i)
    router_.add_replica({.name = concat("replica ", i)});
  for (size_t i = 0; i < executors.size(); ++i)
    engines_.push_back(std::make_unique<Engine>(
        config_of(config, static_cast<int32_t>(i)), vocabulary, std::move(executors[i]),
        draft_vocabulary,
        EngineLinks{.events = &events_, .listener = has_listener ? this : nullptr}));
}

EngineGroup::EngineGroup(const EngineConfig& config, const std::optional<Vocabulary>& vocabulary,
                         std::unique_ptr<Executor> executor)
    : EngineGroup(config, vocabulary, list_of(std::move(executor))) {}

EngineGroup::~EngineGroup() { close(); }

bool EngineGroup::is_of_this_process() const { return process_id_ == getpid(); }

Engine& EngineGroup::replica(int64_t idx) const {
  if (idx < 0 || idx >= std::ssize(engines_))
    throw InvalidArgument(
        concat("there is no replica ", idx, "; they are 0 to ", engines_.size() - 1));
  return *engines_[static_cast<size_t>(idx)];
}

std::vector<RequestId> EngineGroup::add_requests(std::vector<Request> requests) {
  if (!are_several()) return first().add_requests(std::move(requests));
  std::vector<const Request*> pointers;
  for (const Request& request : requests) pointers.push_back(&request);
  first().check(pointers);  // from here on no engine refuses one, so that all enter or none
  std::vector<std::vector<TokenHash>> hashes;
  std::vector<RouteRequest> routes;
  for (const Request& request : requests) hashes.push_back(hash_prompt(request, config_.cache));
  for (size_t i = 0; i < requests.size(); ++i)
    routes.push_back(route_request(requests[i], hashes[i]));

  const std::lock_guard lock(mutex_);
  if (is_sleeping()) throw InvalidArgument("the engine is asleep; call wake_up() first");
  if (std::ssize(requests) > room())
    throw QueueFull(describe_full_queue(num_waiting(), std::ssize(requests),
                                        config_.scheduler.max_num_queued_reqs));
  std::vector<RequestId> ids;
  for (Request& request : requests) {
    request.id = next_id_ + std::ssize(ids);
    ids.push_back(request.id);
  }
  next_id_ += std::ssize(ids);
  try {
    place(std::move(requests), routes);
  } catch (...) {
    drop(ids);
    throw;
  }
  return ids;
}

// What an engine that has stopped cannot take goes to the others.
void EngineGroup::place(std::vector<Request> requests, std::span<const RouteRequest> routes) {
  std::vector<std::vector<Request>> shares(engines_.size());
  std::vector<int32_t> chosen;
  for (size_t i = 0; i < requests.size(); ++i) chosen.push_back(choose(requests[i], routes[i]));
  for (size_t i = 0; i < requests.size(); ++i)
    shares[static_cast<size_t>(chosen[i])].push_back(std::move(requests[i]));
  for (size_t r = 0; r < shares.size(); ++r) {
    if (shares[r].empty()) continue;
    try {
      engines_[r]->add_numbered(shares[r]);
    } catch (const DeviceError&) {
      router_.set_ready(static_cast<int32_t>(r), false);
      std::vector<RouteRequest> again;
      for (const Request& request : shares[r]) {
        router_.finish(places_.at(request.id).route_id);
        const auto at = std::ranges::find(chosen, static_cast<int32_t>(r));
        const auto idx = static_cast<size_t>(at - chosen.begin());
        again.push_back(routes[idx]);
        *at = -1;
      }
      place(std::move(shares[r]), again);
    }
  }
}

int32_t EngineGroup::choose(const Request& request, const RouteRequest& route) {
  const std::optional<Route> found = router_.choose(route);
  if (!found) throw DeviceError("the engine has stopped: " + failure_);
  places_[request.id] = {.replica = found->replica, .route_id = found->id};
  return found->replica;
}

void EngineGroup::drop(std::span<const RequestId> ids) {
  for (const RequestId id : ids) {
    const auto found = places_.find(id);
    if (found == places_.end()) continue;
    router_.finish(found->second.route_id);
    engines_[static_cast<size_t>(found->second.replica)]->abort(id);
    places_.erase(found);
  }
}

int64_t EngineGroup::num_waiting() const {
  int64_t count = 0;
  for (const auto& engine : engines_) count += engine->num_waiting();
  return count;
}

int64_t EngineGroup::room() const {
  const int32_t limit = config_.scheduler.max_num_queued_reqs;
  return limit == 0 ? std::numeric_limits<int64_t>::max()
                    : std::max<int64_t>(limit - num_waiting(), 0);
}

int64_t EngineGroup::wait_for_room(double timeout_s) {
  if (!are_several()) return first().wait_for_room(timeout_s);
  std::unique_lock lock(mutex_);
  room_made_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return room() > 0; });
  return room();
}

void EngineGroup::abort(RequestId id) {
  if (!are_several()) return first().abort(id);
  const std::lock_guard lock(mutex_);
  const auto found = places_.find(id);
  if (found != places_.end()) engines_[static_cast<size_t>(found->second.replica)]->abort(id);
}

void EngineGroup::sleep(int32_t level) {
  size_t num_asleep = 0;
  try {
    for (; num_asleep < engines_.size(); ++num_asleep) engines_[num_asleep]->sleep(level);
  } catch (...) {
    for (size_t i = 0; i < num_asleep; ++i)
      engines_[i]->wake_up({MemoryPart::kWeights, MemoryPart::kKvCache});
    throw;
  }
}

void EngineGroup::wake_up(const std::vector<MemoryPart>& parts) {
  for (const auto& engine : engines_) engine->wake_up(parts);
}

bool EngineGroup::is_sleeping() const {
  return std::ranges::any_of(engines_, [](const auto& engine) { return engine->is_sleeping(); });
}

void EngineGroup::allow_seats(int32_t num_seats) {
  for (const auto& engine : engines_) engine->allow_seats(num_seats);
}

void EngineGroup::reset_prefix_cache() {
  for (const auto& engine : engines_) engine->reset_prefix_cache();
}

std::optional<std::vector<BlockEventBatch>> EngineGroup::block_events(int64_t sequence) {
  return are_several() ? block_events_.since(sequence) : first().block_events(sequence);
}

BlockSnapshot EngineGroup::block_snapshot() {
  if (!are_several()) return first().block_snapshot();
  const std::lock_guard lock(blocks_mutex_);
  return block_events_.snapshot(router_.held_blocks());
}

KvPeer EngineGroup::open_hand_over(const HandOverOptions& options) {
  KvPeer self = first().open_hand_over(options);
  for (size_t i = 1; i < engines_.size(); ++i)
    engines_[i]->open_hand_over(options, first().hand_over_host());
  return self;
}

int32_t EngineGroup::add_peer(const KvPeer& peer) {
  const std::lock_guard lock(peers_mutex_);
  const int32_t number = first().add_peer(peer);
  for (size_t i = 1; i < engines_.size(); ++i)
    check_internal(engines_[i]->add_peer(peer) == number, "a peer has one number");
  return number;
}

std::string EngineGroup::take_hand_over_failure() {
  for (const auto& engine : engines_)
    if (std::string failure = engine->take_hand_over_failure(); !failure.empty()) return failure;
  return {};
}

std::vector<double> EngineGroup::stood_still_s() const {
  std::vector<double> seconds;
  for (const auto& engine : engines_) seconds.push_back(engine->stood_still_s());
  return seconds;
}

bool EngineGroup::has_left_thread() const {
  return std::ranges::any_of(engines_,
                             [](const auto& engine) { return engine->has_left_thread(); });
}

EngineMetrics EngineGroup::metrics() const {
  EngineMetrics metrics = first().metrics();
  for (size_t i = 1; i < engines_.size(); ++i) metrics = sum(metrics, engines_[i]->metrics());
  metrics.num_lines = events_.num_lines();
  metrics.line_us = events_.line_us();
  return metrics;
}

EngineHistograms EngineGroup::histograms() const {
  EngineHistograms histograms = first().histograms();
  for (size_t i = 1; i < engines_.size(); ++i) add(histograms, engines_[i]->histograms());
  return histograms;
}

std::string EngineGroup::failure() const {
  if (!are_several()) return first().failure();
  for (const auto& engine : engines_)
    if (engine->failure().empty()) return {};
  const std::lock_guard lock(mutex_);
  return failure_;
}

MemoryUse EngineGroup::memory_use() const {
  MemoryUse use;
  for (const auto& engine : engines_) use += engine->memory_use();
  return use;
}

bool EngineGroup::start_expert_loads() {
  for (const auto& engine : engines_) {
    if (!engine->expert_loads()) return false;
    engine->expert_loads()->start();
  }
  return true;
}

std::map<int64_t, std::vector<int64_t>> EngineGroup::expert_rows() const {
  std::map<int64_t, std::vector<int64_t>> rows;
  for (const auto& engine : engines_) {
    if (!engine->expert_loads()) continue;
    for (const ExpertLoads::Layer& layer : engine->expert_loads()->layers())
      add_rows(layer.rows, rows[layer.layer_idx]);
  }
  return rows;
}

void EngineGroup::balance_experts(const ExpertBalanceOptions& options) {
  for (const auto& engine : engines_) engine->balance_experts(options);
}

std::map<int64_t, std::vector<int64_t>> EngineGroup::expert_rank_rows() const {
  std::map<int64_t, std::vector<int64_t>> rows;
  for (const auto& engine : engines_) {
    const std::shared_ptr<const ExpertBalancer> balancer = engine->expert_balancer();
    if (!balancer) continue;
    for (const ExpertBalancer::RankRows& layer : balancer->rank_rows())
      add_rows(layer.rows, rows[layer.layer_idx]);
  }
  return rows;
}

std::string EngineGroup::take_notice() {
  {
    const std::lock_guard lock(mutex_);
    if (!notice_.empty()) return std::exchange(notice_, {});
  }
  for (const auto& engine : engines_)
    if (std::string notice = engine->take_notice(); !notice.empty()) return notice;
  return {};
}

std::vector<StepRecord> EngineGroup::trace() const {
  std::vector<StepRecord> steps = first().trace();
  for (size_t i = 1; i < engines_.size(); ++i) {
    std::vector<StepRecord> own = engines_[i]->trace();
    std::ranges::move(own, std::back_inserter(steps));
  }
  if (are_several()) std::ranges::stable_sort(steps, {}, &StepRecord::start_us);
  return steps;
}

std::vector<RequestRecord> EngineGroup::request_records() const {
  std::vector<RequestRecord> records = first().request_records();
  for (size_t i = 1; i < engines_.size(); ++i)
    std::ranges::move(engines_[i]->request_records(), std::back_inserter(records));
  if (are_several()) std::ranges::sort(records, {}, &RequestRecord::request_id);
  return records;
}

std::optional<RequestRecord> EngineGroup::request_record(RequestId id) const {
  for (const auto& engine : engines_)
    if (std::optional<RequestRecord> record = engine->request_record(id)) return record;
  return std::nullopt;
}

int64_t EngineGroup::num_taken_over(int64_t idx) const {
  replica(idx);
  const std::lock_guard lock(mutex_);
  return num_taken_over_[static_cast<size_t>(idx)];
}

std::vector<ReplicaLoad> EngineGroup::loads() const {
  return are_several() ? router_.loads() : std::vector<ReplicaLoad>();
}

void EngineGroup::close() {
  for (const auto& engine : engines_) engine->close();
  events_.close();
}

void EngineGroup::take_result(int32_t /*replica*/, const StepResult& result) {
  {
    const std::lock_guard lock(mutex_);
    for (const TokenProgress& progress : result.progress) {
      const auto found = places_.find(progress.request_id);
      if (found == places_.end()) continue;
      if (!std::exchange(found->second.has_started, true)) router_.started(found->second.route_id);
      router_.grew(found->second.route_id, progress.num_tokens);
    }
    for (const TokenEvent& event : result.events) {
      const auto found = places_.find(event.request_id);
      if (!event.is_request_finished || found == places_.end()) continue;
      router_.finish(found->second.route_id);
      places_.erase(found);
    }
  }
  room_made_.notify_all();
}

void EngineGroup::take_blocks(int32_t replica, const std::vector<BlockEvent>& events) {
  const std::lock_guard lock(blocks_mutex_);
  all_events_.clear();
  int64_t& count = num_batches_[static_cast<size_t>(replica)];
  router_.apply(replica, {.sequence = ++count, .events = events}, &all_events_);
  if (block_events_.is_on()) block_events_.push(all_events_);
}

void EngineGroup::note_stop(int32_t replica, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  router_.set_ready(replica, false);
  failure_ = reason;
  notice_ = concat("replica ", replica, " of ", config_.parallel.data, " has stopped: ", reason,
                   "; the others go on with what it ran");
}

// An abort that has reached the engine that they leave goes after them: who calls abort() next
// finds them where they are then.
void EngineGroup::move(int32_t replica, std::vector<MovingRequest>& requests) {
  const std::lock_guard lock(mutex_);
  std::vector<MovingRequest> left;
  for (MovingRequest& moving : requests)
    if (!move(replica, moving)) left.push_back(std::move(moving));
  requests = std::move(left);
  for (const RequestId id : engines_[static_cast<size_t>(replica)]->pending_aborts()) {
    const auto found = places_.find(id);
    if (found != places_.end() && found->second.replica != replica)
      engines_[static_cast<size_t>(found->second.replica)]->abort(id);
  }
}

// False: none of the others takes it.
bool EngineGroup::move(int32_t replica, MovingRequest& moving) {
  const Request& request = moving.request.mapped().context.request;
  const auto place = places_.find(request.id);
  if (place == places_.end()) return false;
  const std::vector<TokenHash> hashes = hash_prompt(request, config_.cache);
  std::vector<int32_t> excluded{replica};
  RouteRequest route = route_request(request, hashes);
  route.excluded = excluded;
  while (const std::optional<Route> found = router_.choose(route)) {
    try {
      engines_[static_cast<size_t>(found->replica)]->take_over(moving);
    } catch (const Error&) {  // it has stopped, or is closed
      router_.finish(found->id);
      excluded.push_back(found->replica);
      route.excluded = excluded;
      continue;
    }
    router_.finish(place->second.route_id);
    place->second = {.replica = found->replica, .route_id = found->id};
    ++num_taken_over_[static_cast<size_t>(found->replica)];
    return true;
  }
  return false;
}

}  // namespace llmserve
