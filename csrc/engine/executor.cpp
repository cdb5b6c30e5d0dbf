#include "engine/executor.h"

#include "core/error.h"
#include "speculation/drafter.h"

namespace llmserve {

MemoryUse& MemoryUse::operator+=(const MemoryUse& other) {
  for (const auto field :
       {&MemoryUse::weight_bytes, &MemoryUse::mapped_bytes, &MemoryUse::workspace_bytes,
        &MemoryUse::kv_cache_bytes, &MemoryUse::pool_used_bytes, &MemoryUse::pool_used_high_bytes,
        &MemoryUse::pool_reserved_bytes, &MemoryUse::pool_reserved_high_bytes,
        &MemoryUse::graph_bytes})
    this->*field += other.*field;
  return *this;
}

MemoryPart parse_memory_part(std::string_view name) {
  if (name == "weights") return MemoryPart::kWeights;
  if (name == "kv_cache") return MemoryPart::kKvCache;
  throw InvalidArgument(concat("tags must be of 'weights' and 'kv_cache', got '", name, "'"));
}

std::shared_ptr<KvMover> Executor::open_hand_over(const HandOverOptions& /*options*/,
                                                  std::shared_ptr<KvHost> /*host*/) {
  throw NotSupported(concat(description(), " exchanges no KV blocks with other engines"));
}

std::shared_ptr<const ExpertBalancer> Executor::balance_experts(const ExpertBalanceOptions&) {
  throw NotSupported(concat("enable_eplb: ", description(), " has no experts; leave it out"));
}

std::unique_ptr<Drafter> Executor::make_drafter() { return nullptr; }

}  // namespace llmserve
