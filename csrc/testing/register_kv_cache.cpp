// The KV cache's bookkeeping for tests: `llmserve._core_testing`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/block_events.h"
#include "core/token_hash.h"
#include "kv_cache/kv_cache_manager.h"
#include "testing/cache_groups.h"
#include "testing/register.h"
#include "testing/token_oracle.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

using Tokens = std::vector<int32_t>;

TokenHash parse_hash(const std::string& digest) {
  if (digest.size() != 32) throw py::value_error("a token hash has 32 bytes");
  TokenHash hash;
  std::copy(digest.begin(), digest.end(), hash.bytes.begin());
  return hash;
}

void register_prefix_cache(py::module_& testing) {
  py::class_<PrefixCache>(testing, "PrefixCache")
      .def(py::init<int32_t, int32_t>(), py::arg("num_blocks"), py::arg("block_size"))
      .def("find",
           [](const PrefixCache& self, const std::string& hash, int32_t parent,
              const Tokens& token_ids) { return self.find(parse_hash(hash), parent, token_ids); })
      .def("insert",
           [](PrefixCache& self, const std::string& hash, int32_t block, int32_t parent,
              const Tokens& token_ids) { self.insert(parse_hash(hash), block, parent, token_ids); })
      .def("add_evictable", &PrefixCache::add_evictable)
      .def("remove_evictable", &PrefixCache::remove_evictable)
      .def("evict", &PrefixCache::evict)
      .def("clear", &PrefixCache::clear)
      .def("check_integrity", &PrefixCache::check_integrity)
      .def_property_readonly("num_evictable", &PrefixCache::num_evictable)
      .def_property_readonly("num_held", &PrefixCache::num_held);
}

using Copies = std::vector<std::pair<int32_t, int32_t>>;

std::vector<std::tuple<int32_t, int32_t, int32_t>> moves_of(const Transfer& transfer) {
  std::vector<std::tuple<int32_t, int32_t, int32_t>> moves;
  for (const BlockMove& move : transfer.moves)
    moves.emplace_back(move.group, move.source, move.destination);
  return moves;
}

void register_transfers(py::module_& testing) {
  py::class_<Transfer>(testing, "Transfer")
      .def_readonly("id", &Transfer::id)
      .def_property_readonly("is_load",
                             [](const Transfer& self) { return self.to == MemoryTier::kPool; })
      .def_property_readonly(
          "hand_over",
          [](const Transfer& self) -> std::optional<std::pair<int32_t, int64_t>> {
            if (!self.is_hand_over()) return std::nullopt;
            return std::pair(self.hand_over.peer, self.hand_over.id);
          },
          "(peer, id); None: with the lower tier.")
      .def_readonly("is_first", &Transfer::is_first)
      .def_readonly("is_last", &Transfer::is_last)
      .def_readonly("is_withdrawal", &Transfer::is_withdrawal)
      .def_property_readonly("moves", &moves_of);
}

Copies allocate(KvCacheManager& self, BlockTable& table, int64_t start, int64_t num_new_tokens) {
  std::vector<BlockCopy> copies;
  self.allocate(table, start, num_new_tokens, copies);
  Copies pairs;
  for (const BlockCopy& copy : copies) pairs.emplace_back(copy.source, copy.destination);
  return pairs;
}

// (blocks that the prefix cache has, owner of the table that computes the next one or None)
std::pair<Tokens, std::optional<int64_t>> find_prefix(const KvCacheManager& self, BlockTable& table,
                                                      const Tokens& token_ids) {
  const PrefixMatch match = self.find_prefix(table, token_ids);
  const Tokens blocks = match.blocks.empty() ? Tokens() : match.blocks.front();
  if (match.pending) return {blocks, match.pending->owner};
  return {blocks, std::nullopt};
}

void register_kv_cache(py::module_& testing) {
  testing.def(
      "check_cache_config",
      [](const std::vector<CacheGroupSpec>& groups, int32_t num_state_slots) {
        CacheConfig{.num_blocks = 1, .groups = groups, .num_state_slots = num_state_slots}
            .validate();
      },
      "groups"_a, "num_state_slots"_a);
  py::class_<BlockTable>(testing, "BlockTable")
      .def(py::init([](int64_t owner, const std::string& salt) {
             auto table = std::make_unique<BlockTable>();
             table->owner = owner;
             table->root = root_hash(salt);
             return table;
           }),
           py::arg("owner"), py::arg("salt") = "")
      .def_property_readonly("blocks",
                             [](const BlockTable& self) {
                               return self.blocks.empty() ? Tokens() : self.blocks.front();
                             })
      .def_readonly("groups", &BlockTable::blocks)
      .def_readonly("num_cached", &BlockTable::num_cached)
      .def_readonly("slots", &BlockTable::slots)
      .def_readonly("state_slot", &BlockTable::state_slot)
      .def_property_readonly("is_moving", &KvCacheManager::is_moving)
      .def_property_readonly("num_hashed",
                             [](const BlockTable& self) { return self.hashes.size(); });
  py::class_<KvCacheManager>(testing, "KvCacheManager")
      .def(py::init([](int32_t num_blocks, int32_t block_size, bool enable_prefix_caching,
                       bool forge_collisions, const Tokens& windows, int64_t max_step_tokens,
                       int32_t num_slots, int32_t max_stores, int32_t num_state_slots) {
             return std::make_unique<KvCacheManager>(
                 CacheConfig{.block_size = block_size,
                             .num_blocks = num_blocks,
                             .enable_prefix_caching = enable_prefix_caching,
                             .groups = groups_of_windows(windows, num_state_slots),
                             .lower_tier = {.num_blocks = num_slots, .max_stores = max_stores},
                             .num_state_slots = num_state_slots},
                 forge_collisions ? &forged_hash : &chain_hash, max_step_tokens);
           }),
           py::arg("num_blocks"), py::arg("block_size"), py::kw_only(),
           py::arg("enable_prefix_caching") = true, py::arg("forge_collisions") = false,
           py::arg("windows") = Tokens{0}, py::arg("max_step_tokens") = KvCacheManager::kUnbounded,
           py::arg("num_slots") = 0, py::arg("max_stores") = 64, py::arg("num_state_slots") = 0)
      .def("find_prefix", &find_prefix)
      .def("num_lacking",
           [](const KvCacheManager& self, BlockTable& table, const Tokens& token_ids) {
             return self.num_lacking(self.find_prefix(table, token_ids),
                                     static_cast<int64_t>(token_ids.size()));
           })
      .def("attach",
           [](KvCacheManager& self, BlockTable& table, const Tokens& token_ids) {
             self.attach(table, self.find_prefix(table, token_ids), token_ids);
           })
      .def("find_stored",
           [](const KvCacheManager& self, BlockTable& table, const Tokens& token_ids) {
             return self.find_prefix(table, token_ids).stored.num_blocks;
           })
      .def(
          "load",
          [](KvCacheManager& self, BlockTable& table, const Tokens& token_ids) {
            const StoredPrefix prefix = self.find_prefix(table, token_ids).stored;
            if (prefix.num_blocks == 0 || !self.has_state_slot(prefix.state_slot) ||
                self.num_lacking(prefix, std::ssize(token_ids)) > 0)
              return false;
            self.load(table, prefix, token_ids);
            return true;
          },
          "What the lower tier has more than the pool; False: nothing, or it does not fit.")
      .def("take_transfers",
           [](KvCacheManager& self) {
             std::vector<Transfer> transfers;
             self.take_transfers(transfers);
             return transfers;
           })
      .def("finish_transfer", &KvCacheManager::finish_transfer, py::return_value_policy::reference)
      .def_property_readonly("num_transfers", &KvCacheManager::num_transfers)
      .def("tell_blocks", &KvCacheManager::tell_blocks)
      .def("take_block_events",
           [](KvCacheManager& self) { return block_event_runs(self.take_block_events()); })
      .def("held_blocks",
           [](const KvCacheManager& self) { return bytes_of_hashes(self.held_blocks()); })
      .def_property_readonly("num_stored_blocks", &KvCacheManager::num_stored_blocks)
      .def("has_state_slot",
           [](const KvCacheManager& self, BlockTable& table, const Tokens& token_ids) {
             return self.has_state_slot(self.find_prefix(table, token_ids).state_slot);
           })
      .def("can_fork", [](const KvCacheManager& self) { return self.has_state_slot(kNoSlot); })
      .def("can_keep_state", &KvCacheManager::can_keep_state)
      .def("keep_state", [](KvCacheManager& self, BlockTable& table, const Tokens& token_ids,
                            int64_t num_tokens) { self.keep_state(table, token_ids, num_tokens); })
      .def("take_state_copies",
           [](KvCacheManager& self) {
             std::vector<StateCopy> copies;
             self.take_state_copies(copies);
             Copies pairs;
             for (const StateCopy& copy : copies) pairs.emplace_back(copy.source, copy.destination);
             return pairs;
           })
      .def_property_readonly("num_state_snapshots", &KvCacheManager::num_state_snapshots)
      .def_property_readonly("num_free_state_slots", &KvCacheManager::num_free_state_slots)
      .def("num_blocks_for", &KvCacheManager::num_blocks_for)
      .def("check_table", &KvCacheManager::check_table)
      .def("can_allocate", &KvCacheManager::can_allocate)
      .def("num_needed", &KvCacheManager::num_needed)
      .def("allocate", &allocate)
      .def(
          "commit",
          [](KvCacheManager& self, BlockTable& table, const Tokens& token_ids, int64_t num_computed,
             bool gives_back) {
            self.commit(table, token_ids, num_computed);
            if (gives_back) self.give_back_replaced();
          },
          py::arg("table"), py::arg("token_ids"), py::arg("num_computed"), py::kw_only(),
          py::arg("gives_back") = true,
          "gives_back: no step in flight reads the blocks that it replaces.")
      .def("give_back_replaced", py::overload_cast<>(&KvCacheManager::give_back_replaced))
      .def_property_readonly("replaced", &KvCacheManager::replaced)
      .def("fork", &KvCacheManager::fork)
      .def("release", &KvCacheManager::release)
      .def("reset_prefix_cache",
           [](KvCacheManager& self, const std::vector<BlockTable*>& tables) {
             self.reset_prefix_cache(tables);
           })
      .def("check_integrity",
           [](const KvCacheManager& self, const std::vector<BlockTable*>& tables) {
             self.check_integrity(std::vector<const BlockTable*>(tables.begin(), tables.end()));
           })
      .def("ref_count", &KvCacheManager::ref_count)
      .def_property_readonly("num_free_blocks", &KvCacheManager::num_free_blocks)
      .def_property_readonly("num_cached_blocks", &KvCacheManager::num_cached_blocks)
      .def_property_readonly("num_used_blocks", &KvCacheManager::num_used_blocks)
      .def_property_readonly("num_evictions", [](const KvCacheManager& self) {
        return self.counters().num_evictions;
      });
}

}  // namespace

void register_testing_kv_cache(py::module_& testing) {
  register_prefix_cache(testing);
  register_transfers(testing);
  register_kv_cache(testing);
}

}  // namespace llmserve
