// The control plane for tests and benchmarks: `llmserve._core_testing`. Text, hashes and the cache
// here; the scheduler in register_testing_scheduler.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/mix.h"
#include "core/token_hash.h"
#include "kv_cache/kv_cache_manager.h"
#include "testing/register.h"
#include "testing/token_oracle.h"
#include "text/stop_checker.h"

namespace py = pybind11;

namespace llmserve {
namespace {

using Tokens = std::vector<int32_t>;

py::bytes to_bytes(const TokenHash& hash) {
  return py::bytes(reinterpret_cast<const char*>(hash.bytes.data()), hash.bytes.size());
}

TokenHash to_hash(const std::string& digest) {
  if (digest.size() != 32) throw py::value_error("a token hash has 32 bytes");
  TokenHash hash;
  std::copy(digest.begin(), digest.end(), hash.bytes.begin());
  return hash;
}

// A stop checker with what it refers to.
struct OwnedStopChecker {
  OwnedStopChecker(const std::vector<std::string>& bytes_by_id, const Tokens& special_token_ids,
                   const std::vector<std::string>& stop, StopChecker::Options options)
      : vocabulary(bytes_by_id, special_token_ids),
        stops(stop),
        checker(vocabulary, stops, options) {}
  Vocabulary vocabulary;
  StopStrings stops;
  StopChecker checker;
};

void register_text(py::module_& testing) {
  py::class_<OwnedStopChecker>(testing, "StopChecker")
      .def(py::init([](const std::vector<std::string>& bytes_by_id,
                       const std::vector<std::string>& stop, const Tokens& special_token_ids,
                       bool skip_special_tokens, bool spaces_between_special_tokens,
                       bool include_stop_str_in_output) {
             return std::make_unique<OwnedStopChecker>(
                 bytes_by_id, special_token_ids, stop,
                 StopChecker::Options{skip_special_tokens, spaces_between_special_tokens,
                                      include_stop_str_in_output});
           }),
           py::arg("bytes_by_id"), py::kw_only(), py::arg("stop") = std::vector<std::string>(),
           py::arg("special_token_ids") = Tokens(), py::arg("skip_special_tokens") = true,
           py::arg("spaces_between_special_tokens") = true,
           py::arg("include_stop_str_in_output") = false)
      .def(
          "append",
          [](OwnedStopChecker& self, int32_t token_id, bool can_stop) {
            std::string text;
            const auto stop = self.checker.append(token_id, can_stop, text);
            return std::make_pair(py::bytes(text), stop);
          },
          py::arg("token_id"), py::arg("can_stop") = true)
      .def("flush", [](OwnedStopChecker& self) {
        std::string text;
        const auto stop = self.checker.flush(text);
        return std::make_pair(py::bytes(text), stop);
      });
}

void register_hashes(py::module_& testing) {
  testing.def("sha256", [](const std::vector<std::string>& pieces) {
    Sha256 sha;
    for (const std::string& piece : pieces) {
      sha.update({reinterpret_cast<const uint8_t*>(piece.data()), piece.size()});
    }
    return to_bytes(sha.finish());
  });
  testing.def("root_hash", [](const std::string& salt) { return to_bytes(root_hash(salt)); });
  testing.def("chain_hash", [](const std::string& parent, const Tokens& token_ids) {
    return to_bytes(chain_hash(to_hash(parent), token_ids));
  });
  testing.def("sample_seed", &sample_seed);
}

void register_prefix_cache(py::module_& testing) {
  py::class_<PrefixCache>(testing, "PrefixCache")
      .def(py::init<int32_t, int32_t>(), py::arg("num_blocks"), py::arg("block_size"))
      .def("find",
           [](const PrefixCache& self, const std::string& hash, int32_t parent,
              const Tokens& token_ids) { return self.find(to_hash(hash), parent, token_ids); })
      .def("insert",
           [](PrefixCache& self, const std::string& hash, int32_t block, int32_t parent,
              const Tokens& token_ids) { self.insert(to_hash(hash), block, parent, token_ids); })
      .def("add_evictable", &PrefixCache::add_evictable)
      .def("remove_evictable", &PrefixCache::remove_evictable)
      .def("evict", &PrefixCache::evict)
      .def("clear", &PrefixCache::clear)
      .def("check_integrity", &PrefixCache::check_integrity)
      .def_property_readonly("num_evictable", &PrefixCache::num_evictable)
      .def_property_readonly("num_held", &PrefixCache::num_held);
}

using Copies = std::vector<std::pair<int32_t, int32_t>>;

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
      .def_property_readonly("num_hashed",
                             [](const BlockTable& self) { return self.hashes.size(); });
  py::class_<KvCacheManager>(testing, "KvCacheManager")
      .def(py::init([](int32_t num_blocks, int32_t block_size, bool enable_prefix_caching,
                       bool forge_collisions, const Tokens& windows, int64_t max_step_tokens) {
             return std::make_unique<KvCacheManager>(
                 CacheConfig{block_size, num_blocks, enable_prefix_caching,
                             groups_of_windows(windows)},
                 forge_collisions ? &forged_hash : &chain_hash, max_step_tokens);
           }),
           py::arg("num_blocks"), py::arg("block_size"), py::kw_only(),
           py::arg("enable_prefix_caching") = true, py::arg("forge_collisions") = false,
           py::arg("windows") = Tokens{0}, py::arg("max_step_tokens") = KvCacheManager::kUnbounded)
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
      .def("num_blocks_for", &KvCacheManager::num_blocks_for)
      .def("check_table", &KvCacheManager::check_table)
      .def("can_allocate", &KvCacheManager::can_allocate)
      .def("num_needed", &KvCacheManager::num_needed)
      .def("allocate", &allocate)
      .def("commit",
           [](KvCacheManager& self, BlockTable& table, const Tokens& token_ids,
              int64_t num_computed) {
             self.commit(table, token_ids, num_computed);
             self.give_back_replaced();
           })
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

void register_testing_control(py::module_& testing) {
  register_text(testing);
  register_hashes(testing);
  register_prefix_cache(testing);
  register_kv_cache(testing);
}

}  // namespace llmserve
