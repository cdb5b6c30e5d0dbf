// The KV pool's bookkeeping by itself, for teaching and tools: `llmserve.BlockAllocator`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/register.h"
#include "core/error.h"
#include "kv_cache/kv_cache_manager.h"

namespace py = pybind11;

namespace llmserve {
namespace {

using Key = std::variant<int64_t, std::string>;

std::string describe(const Key& key) {
  if (const auto* number = std::get_if<int64_t>(&key)) return std::to_string(*number);
  return concat("'", std::get<std::string>(key), "'");
}

class NamedTables {
 public:
  NamedTables(int32_t num_blocks, int32_t block_size)
      : kv_cache_(
            {.block_size = block_size, .num_blocks = num_blocks, .enable_prefix_caching = false}) {}

  const KvCacheManager& kv_cache() const { return kv_cache_; }

  std::vector<int32_t> allocate(const Key& key, int64_t num_tokens) {
    if (num_tokens < 1) {
      throw InvalidArgument(concat("num_tokens must be at least 1, got ", num_tokens));
    }
    const auto found = tables_.find(key);
    const Entry empty;
    const Entry& entry = found == tables_.end() ? empty : found->second;
    const int64_t capacity = int64_t{kv_cache_.num_blocks()} * kv_cache_.block_size();
    if (num_tokens > capacity - entry.num_tokens ||
        !kv_cache_.can_allocate(entry.table, entry.num_tokens, num_tokens)) {
      throw ResourceExhausted(concat("request ", describe(key), " needs room for ", num_tokens,
                                     " more tokens after ", entry.num_tokens, ", but of ",
                                     kv_cache_.num_blocks(), " blocks of ", kv_cache_.block_size(),
                                     " tokens ", kv_cache_.num_free_blocks(),
                                     " are free; free another request or use a larger pool"));
    }
    Entry& grown = tables_[key];
    kv_cache_.allocate(grown.table, grown.num_tokens, num_tokens, copies_);
    grown.num_tokens += num_tokens;
    return grown.table.blocks[0];
  }

  void free(const Key& key) {
    kv_cache_.release(at(key).table);
    tables_.erase(key);
  }

  void fork(const Key& parent, const Key& child) {
    const Entry& source = at(parent);
    if (tables_.contains(child)) {
      throw InvalidArgument(concat("request ", describe(child), " has blocks already"));
    }
    Entry& forked = tables_[child];
    kv_cache_.fork(source.table, forked.table);
    forked.num_tokens = source.num_tokens;
  }

  std::vector<int32_t> block_table(const Key& key) { return at(key).table.blocks[0]; }
  int64_t num_tokens(const Key& key) { return at(key).num_tokens; }

  int32_t ref_count(int32_t block) const {
    if (block < 0 || block >= kv_cache_.num_blocks()) {
      throw InvalidArgument(
          concat("block must be in [0, ", kv_cache_.num_blocks(), "), got ", block));
    }
    return kv_cache_.ref_count(block);
  }

  std::vector<std::pair<int32_t, int32_t>> take_copies() {
    std::vector<std::pair<int32_t, int32_t>> copies;
    for (const BlockCopy& copy : std::exchange(copies_, {})) {
      copies.emplace_back(copy.source, copy.destination);
    }
    return copies;
  }

  double usage() const {
    return static_cast<double>(kv_cache_.num_used_blocks()) / kv_cache_.num_blocks();
  }

  // A block that several requests share is as full as the longest of them makes it.
  double waste() const {
    std::map<int32_t, int64_t> filled;
    for (const auto& [key, entry] : tables_) {
      int64_t left = entry.num_tokens;
      for (const int32_t block : entry.table.blocks[0]) {
        filled[block] = std::max(filled[block], std::min<int64_t>(left, kv_cache_.block_size()));
        left -= kv_cache_.block_size();
      }
    }
    if (filled.empty()) return 0;
    int64_t num_empty = static_cast<int64_t>(filled.size()) * kv_cache_.block_size();
    const auto num_slots = static_cast<double>(num_empty);
    for (const auto& [block, count] : filled) num_empty -= count;
    return static_cast<double>(num_empty) / num_slots;
  }

  void check_integrity() const {
    std::vector<const BlockTable*> tables;
    for (const auto& [key, entry] : tables_) tables.push_back(&entry.table);
    kv_cache_.check_integrity(tables);
  }

 private:
  struct Entry {
    BlockTable table;
    int64_t num_tokens = 0;
  };

  Entry& at(const Key& key) {
    const auto found = tables_.find(key);
    if (found == tables_.end()) {
      throw InvalidArgument(concat("request ", describe(key), " has no blocks"));
    }
    return found->second;
  }

  KvCacheManager kv_cache_;
  std::map<Key, Entry> tables_;
  std::vector<BlockCopy> copies_;
};

}  // namespace

void register_block_allocator(py::module_& module) {
  py::class_<NamedTables>(module, "BlockAllocator", R"doc(
Paged KV bookkeeping: which blocks of a pool hold which request's tokens.

The same C++ code that serves requests, without a model. Token p of a request is in block
``get_block_table(request_id)[p // block_size]``. Not thread-safe.

>>> from llmserve import BlockAllocator
>>> pool = BlockAllocator(num_blocks=4, block_size=16)
>>> len(pool.allocate("a", 17)), pool.num_free_blocks
(2, 2)
>>> pool.free("a"); pool.num_free_blocks
4
)doc")
      .def(py::init<int32_t, int32_t>(), py::arg("num_blocks"), py::arg("block_size") = 16)
      .def("allocate", &NamedTables::allocate, py::arg("request_id"), py::arg("num_tokens"),
           "Room for num_tokens (more) tokens of a request; returns its whole block table. Raises "
           "ResourceExhausted, with nothing changed, when the pool has too few free blocks.")
      .def("free", &NamedTables::free, py::arg("request_id"),
           "Gives a request's blocks back; those that a fork shares stay its own.")
      .def("fork", &NamedTables::fork, py::arg("parent_id"), py::arg("child_id"),
           "A new request that shares all blocks of another. Writing to a shared block, by "
           "allocate() of either, first copies it: see take_copies().")
      .def("get_block_table", &NamedTables::block_table, py::arg("request_id"),
           "Block ids in the order of positions. Raises InvalidArgument for an unknown request.")
      .def("num_tokens", &NamedTables::num_tokens, py::arg("request_id"),
           "Tokens that the request has room for.")
      .def("ref_count", &NamedTables::ref_count, py::arg("block"),
           "Requests that refer to a block.")
      .def("take_copies", &NamedTables::take_copies,
           "The (source, destination) blocks copied on write since the last call, in order.")
      .def("check_integrity", &NamedTables::check_integrity,
           "Raises InternalError unless free and referenced blocks add up to the pool and every "
           "reference has its holder.")
      .def_property_readonly(
          "num_free_blocks",
          [](const NamedTables& self) { return self.kv_cache().num_free_blocks(); })
      .def_property_readonly(
          "num_used_blocks",
          [](const NamedTables& self) { return self.kv_cache().num_used_blocks(); })
      .def_property_readonly("usage", &NamedTables::usage,
                             "Share of the pool's blocks that are in use, 0 to 1.")
      .def_property_readonly("waste", &NamedTables::waste,
                             "Share of the token slots of those blocks that hold no token, 0 to 1.")
      .def_property_readonly("num_blocks",
                             [](const NamedTables& self) { return self.kv_cache().num_blocks(); })
      .def_property_readonly("block_size",
                             [](const NamedTables& self) { return self.kv_cache().block_size(); });
}

}  // namespace llmserve
