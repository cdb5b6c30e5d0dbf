#include "routing/router.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "routing/work.h"

namespace llmserve {

void RouterConfig::validate() const {
  find_router_policy(policy);
  if (block_size < 1)
    throw InvalidArgument(concat("block_size must be positive, got ", block_size));
  if (!(attention_tokens > 0))
    throw InvalidArgument(concat("attention_tokens must be positive, got ", attention_tokens));
  if (!(decode_work >= 0) || std::isinf(decode_work))
    throw InvalidArgument(concat("decode_work must be finite and not negative, got ", decode_work));
  if (!(max_tenant_share > 0 && max_tenant_share <= 1))
    throw InvalidArgument(concat("max_tenant_share must be in (0, 1], got ", max_tenant_share));
}

void ReplicaSpec::validate() const {
  if (name.empty()) throw InvalidArgument("a replica needs a name");
  if (max_tokens < 0)
    throw InvalidArgument(concat("max_tokens must not be negative, got ", max_tokens));
  if (!(speed > 0) || std::isinf(speed))
    throw InvalidArgument(concat("speed must be finite and positive, got ", speed));
  if (assumed_blocks < 0)
    throw InvalidArgument(concat("assumed_blocks must not be negative, got ", assumed_blocks));
}

Router::Router(const RouterConfig& config)
    : config_((config.validate(), config)),
      policy_(find_router_policy(config.policy)),
      draws_(config.seed) {}

int32_t Router::add_replica(const ReplicaSpec& spec) {
  spec.validate();
  const std::lock_guard lock(mutex_);
  const auto has_name = [&](const Replica& x) { return x.is_there && x.spec.name == spec.name; };
  if (std::any_of(replicas_.begin(), replicas_.end(), has_name))
    throw InvalidArgument(concat("there is a replica \"", spec.name, "\" already"));
  auto place = std::find_if(replicas_.begin(), replicas_.end(),
                            [](const Replica& x) { return !x.is_there; });
  if (place == replicas_.end()) {
    if (std::ssize(replicas_) == kMaxReplicas)
      throw ResourceExhausted(concat("a router has at most ", kMaxReplicas, " replicas"));
    place = replicas_.emplace(replicas_.end());
  }
  *place = Replica{.spec = spec, .is_there = true, .is_ready = true};
  if (spec.assumed_blocks > 0) place->assumed.emplace(spec.assumed_blocks);
  return static_cast<int32_t>(place - replicas_.begin());
}

void Router::set_ready(int32_t replica, bool is_ready) {
  const std::lock_guard lock(mutex_);
  find(replica).is_ready = is_ready;
}

std::vector<uint64_t> Router::remove_replica(int32_t replica) {
  const std::lock_guard lock(mutex_);
  Replica& gone = find(replica);
  std::vector<uint64_t> ids;
  for (auto it = reservations_.begin(); it != reservations_.end();) {
    if (it->second.replica != replica) {
      ++it;
      continue;
    }
    ids.push_back(it->first);
    release(it->second);
    it = reservations_.erase(it);
  }
  index_.clear(replica);
  gone = Replica{};
  return ids;
}

std::optional<Route> Router::choose(const RouteRequest& request) {
  if (request.num_prompt_tokens < 0 || request.max_new_tokens < 0)
    throw InvalidArgument("num_prompt_tokens and max_new_tokens must not be negative");
  const std::lock_guard lock(mutex_);
  const int64_t num_tokens = request.num_prompt_tokens + request.max_new_tokens;
  if (has_its_share(request.tenant, num_tokens)) return std::nullopt;
  matches_.resize(replicas_.size());
  index_.match(request.hashes, matches_);
  candidates_.clear();
  for (int32_t i = 0; i < std::ssize(replicas_); ++i) {
    const Replica& replica = replicas_[static_cast<size_t>(i)];
    const bool is_excluded =
        std::find(request.excluded.begin(), request.excluded.end(), i) != request.excluded.end();
    if (!replica.is_there || !replica.is_ready || is_excluded || !has_room(replica, num_tokens))
      continue;
    const int64_t cached = cached_tokens(request, matches_[static_cast<size_t>(i)]);
    const double added = prefill_work(cached, request.num_prompt_tokens, config_.attention_tokens);
    candidates_.push_back(
        {.replica = i,
         .num_cached_tokens = cached,
         .cost = (replica.prefill_work + replica.decode_work + added) / replica.spec.speed,
         .num_requests = replica.num_requests,
         .num_routed = replica.num_routed});
  }
  if (candidates_.empty()) return std::nullopt;
  const Candidate chosen = candidates_[policy_.choose(candidates_, draws_)];
  reserve(request, chosen);
  return Route{.id = next_id_++,
               .replica = chosen.replica,
               .num_cached_tokens = chosen.num_cached_tokens,
               .cost = chosen.cost};
}

void Router::reserve(const RouteRequest& request, const Candidate& chosen) {
  const Reservation reservation{
      .replica = chosen.replica,
      .num_tokens = request.num_prompt_tokens + request.max_new_tokens,
      .prefill_work = prefill_work(chosen.num_cached_tokens, request.num_prompt_tokens,
                                   config_.attention_tokens),
      .num_left = request.max_new_tokens,
      .tenant = request.tenant};
  reservations_.emplace(next_id_, reservation);
  Replica& replica = replicas_[static_cast<size_t>(chosen.replica)];
  ++replica.num_requests;
  replica.num_tokens += reservation.num_tokens;
  replica.prefill_work += reservation.prefill_work;
  replica.decode_work += config_.decode_work * static_cast<double>(reservation.num_left);
  ++replica.num_routed;
  replica.num_hit_tokens += chosen.num_cached_tokens;
  tenant_tokens_[request.tenant] += reservation.num_tokens;
  if (replica.assumed) assume(chosen.replica, request.hashes);
}

void Router::started(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(id);
  if (found == reservations_.end()) return;
  replicas_[static_cast<size_t>(found->second.replica)].prefill_work -=
      std::exchange(found->second.prefill_work, 0.0);
}

void Router::grew(uint64_t id, int64_t num_tokens) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(id);
  if (found == reservations_.end()) return;
  Reservation& reservation = found->second;
  const int64_t count = std::clamp<int64_t>(num_tokens, 0, reservation.num_left);
  reservation.num_left -= count;
  replicas_[static_cast<size_t>(reservation.replica)].decode_work -=
      config_.decode_work * static_cast<double>(count);
}

void Router::finish(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(id);
  if (found == reservations_.end()) return;
  release(found->second);
  reservations_.erase(found);
}

void Router::release(const Reservation& reservation) {
  Replica& replica = replicas_[static_cast<size_t>(reservation.replica)];
  --replica.num_requests;
  replica.num_tokens -= reservation.num_tokens;
  replica.prefill_work -= reservation.prefill_work;
  replica.decode_work -= config_.decode_work * static_cast<double>(reservation.num_left);
  // Sums of floats in another order leave something behind.
  if (replica.num_requests == 0) replica.prefill_work = replica.decode_work = 0.0;
  const auto tenant = tenant_tokens_.find(reservation.tenant);
  tenant->second -= reservation.num_tokens;
  if (tenant->second == 0) tenant_tokens_.erase(tenant);
}

bool Router::has_room(const Replica& replica, int64_t num_tokens) const {
  const int64_t limit = replica.spec.max_tokens;
  return limit == 0 || replica.num_tokens + num_tokens <= limit;
}

bool Router::has_its_share(const std::string& tenant, int64_t num_tokens) const {
  if (config_.max_tenant_share == 1.0) return false;
  const auto own = tenant_tokens_.find(tenant);
  const int64_t reserved = own == tenant_tokens_.end() ? 0 : own->second;
  const size_t num_others = tenant_tokens_.size() - (own == tenant_tokens_.end() ? 0 : 1);
  if (num_others == 0 || reserved == 0) return false;
  int64_t limit = 0;
  for (const Replica& replica : replicas_) {
    if (!replica.is_there || !replica.is_ready) continue;
    if (replica.spec.max_tokens == 0) return false;  // there is always room
    limit += replica.spec.max_tokens;
  }
  return static_cast<double>(reserved + num_tokens) >
         config_.max_tenant_share * static_cast<double>(limit);
}

int64_t Router::cached_tokens(const RouteRequest& request, int32_t num_blocks) const {
  // The last token of a prompt runs in any case.
  return std::min(num_blocks * config_.block_size,
                  std::max<int64_t>(request.num_prompt_tokens - 1, 0));
}

bool Router::apply(int32_t replica, const BlockEventBatch& batch, std::vector<BlockEvent>* of_all) {
  const std::lock_guard lock(mutex_);
  Replica& from = find(replica);
  if (batch.sequence <= from.sequence) return true;
  if (batch.sequence != from.sequence + 1) return false;
  from.sequence = batch.sequence;
  using Kind = BlockEvent::Kind;
  for (const BlockEvent& event : batch.events) {
    if (event.kind == Kind::kCleared) {
      const std::vector<TokenHash> gone = index_.clear(replica);
      if (of_all == nullptr) continue;
      for (const TokenHash& hash : gone) of_all->push_back({Kind::kRemoved, hash});
      continue;
    }
    const bool changes_all = event.kind == Kind::kStored ? index_.store(replica, event.hash)
                                                         : index_.remove(replica, event.hash);
    if (changes_all && of_all != nullptr) of_all->push_back(event);
  }
  return true;
}

std::vector<TokenHash> Router::held_blocks() const {
  const std::lock_guard lock(mutex_);
  return index_.hashes();
}

void Router::restore(int32_t replica, const BlockSnapshot& snapshot) {
  const std::lock_guard lock(mutex_);
  Replica& from = find(replica);
  index_.clear(replica);
  for (const TokenHash& hash : snapshot.hashes) index_.store(replica, hash);
  from.sequence = snapshot.sequence;
}

void Router::assume(int32_t replica, std::span<const TokenHash> hashes) {
  std::vector<TokenHash> stored;
  std::vector<TokenHash> removed;
  replicas_[static_cast<size_t>(replica)].assumed->use(hashes, stored, removed);
  for (const TokenHash& hash : stored) index_.store(replica, hash);
  for (const TokenHash& hash : removed) index_.remove(replica, hash);
}

std::vector<ReplicaLoad> Router::loads() const {
  const std::lock_guard lock(mutex_);
  std::vector<ReplicaLoad> loads;
  for (int32_t i = 0; i < std::ssize(replicas_); ++i) {
    const Replica& replica = replicas_[static_cast<size_t>(i)];
    if (!replica.is_there) continue;
    loads.push_back({.name = replica.spec.name,
                     .is_ready = replica.is_ready,
                     .num_requests = replica.num_requests,
                     .num_tokens = replica.num_tokens,
                     .prefill_work = replica.prefill_work,
                     .decode_work = replica.decode_work,
                     .num_blocks = index_.num_blocks(i),
                     .num_routed = replica.num_routed,
                     .num_hit_tokens = replica.num_hit_tokens});
  }
  return loads;
}

Router::Replica& Router::find(int32_t replica) {
  if (replica < 0 || replica >= std::ssize(replicas_) ||
      !replicas_[static_cast<size_t>(replica)].is_there)
    throw InvalidArgument(concat("there is no replica ", replica));
  return replicas_[static_cast<size_t>(replica)];
}

}  // namespace llmserve
