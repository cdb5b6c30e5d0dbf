// Routing: which replica a request goes to.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/block_events.h"
#include "bindings/field_repr.h"
#include "bindings/from_kwargs.h"
#include "bindings/register.h"
#include "core/error.h"
#include "routing/router.h"
#include "routing/work.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

// Hashes cross as bytes, 32 a block.
constexpr size_t kHashBytes = sizeof(TokenHash);

std::vector<TokenHash> hashes_of(const py::bytes& bytes) {
  const std::string_view view(bytes);
  if (view.size() % kHashBytes != 0)
    throw InvalidArgument(
        concat("hashes must be ", kHashBytes, " bytes each, got ", view.size(), " in all"));
  std::vector<TokenHash> hashes(view.size() / kHashBytes);
  if (!hashes.empty()) std::memcpy(hashes.data(), view.data(), view.size());
  return hashes;
}

std::vector<TokenHash> chain(const std::vector<int32_t>& tokens, int64_t block_size,
                             const std::string& salt) {
  if (block_size < 1)
    throw InvalidArgument(concat("block_size must be positive, got ", block_size));
  std::vector<TokenHash> hashes;
  TokenHash parent = root_hash(salt);
  const size_t size = static_cast<size_t>(block_size);
  for (size_t begin = 0; begin + size <= tokens.size(); begin += size) {
    parent = chain_hash(parent, std::span(tokens).subspan(begin, size));
    hashes.push_back(parent);
  }
  return hashes;
}

BlockEventBatch batch_of(int64_t sequence,
                         const std::vector<std::pair<std::string, py::bytes>>& events) {
  BlockEventBatch batch{.sequence = sequence};
  for (const auto& [kind, bytes] : events) {
    if (kind == "cleared") {
      batch.events.push_back({.kind = BlockEvent::Kind::kCleared});
      continue;
    }
    if (kind != "stored" && kind != "removed")
      throw InvalidArgument(
          concat("an event must be \"stored\", \"removed\" or \"cleared\", got \"", kind, '"'));
    const auto as = kind == "stored" ? BlockEvent::Kind::kStored : BlockEvent::Kind::kRemoved;
    for (const TokenHash& hash : hashes_of(bytes)) batch.events.push_back({as, hash});
  }
  return batch;
}

}  // namespace

void register_router(py::module_& module) {
  py::class_<RouterConfig>(module, "RouterConfig")
      .def(py::init(&from_kwargs<RouterConfig>))
      .def("__repr__", &field_repr)
      .def_readwrite("policy", &RouterConfig::policy)
      .def_readwrite("block_size", &RouterConfig::block_size)
      .def_readwrite("attention_tokens", &RouterConfig::attention_tokens)
      .def_readwrite("decode_work", &RouterConfig::decode_work)
      .def_readwrite("max_tenant_share", &RouterConfig::max_tenant_share)
      .def_readwrite("seed", &RouterConfig::seed);
  py::class_<Route>(module, "Route")
      .def("__repr__", &field_repr)
      .def_readonly("id", &Route::id)
      .def_readonly("replica", &Route::replica)
      .def_readonly("num_cached_tokens", &Route::num_cached_tokens)
      .def_readonly("cost", &Route::cost);
  py::class_<ReplicaLoad>(module, "ReplicaLoad")
      .def("__repr__", &field_repr)
      .def_readonly("name", &ReplicaLoad::name)
      .def_readonly("is_ready", &ReplicaLoad::is_ready)
      .def_readonly("num_requests", &ReplicaLoad::num_requests)
      .def_readonly("num_tokens", &ReplicaLoad::num_tokens)
      .def_readonly("prefill_work", &ReplicaLoad::prefill_work)
      .def_readonly("decode_work", &ReplicaLoad::decode_work)
      .def_readonly("num_blocks", &ReplicaLoad::num_blocks)
      .def_readonly("num_routed", &ReplicaLoad::num_routed)
      .def_readonly("num_hit_tokens", &ReplicaLoad::num_hit_tokens);
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Router>(module, "Router")
      .def(py::init<const RouterConfig&>(), "config"_a)
      .def(
          "add_replica",
          [](Router& router, const std::string& name, int64_t max_tokens, double speed,
             int64_t assumed_blocks) {
            return router.add_replica({.name = name,
                                       .max_tokens = max_tokens,
                                       .speed = speed,
                                       .assumed_blocks = assumed_blocks});
          },
          "name"_a, py::kw_only(), "max_tokens"_a = 0, "speed"_a = 1.0, "assumed_blocks"_a = 0)
      .def("set_ready", &Router::set_ready, "replica"_a, "is_ready"_a)
      .def("remove_replica", &Router::remove_replica, "replica"_a)
      .def(
          "choose",
          [](Router& router, const py::bytes& hashes, int64_t num_prompt_tokens,
             int64_t max_new_tokens, const std::string& tenant,
             const std::vector<int32_t>& excluded) {
            const std::vector<TokenHash> chain = hashes_of(hashes);
            return router.choose({.hashes = chain,
                                  .num_prompt_tokens = num_prompt_tokens,
                                  .max_new_tokens = max_new_tokens,
                                  .tenant = tenant,
                                  .excluded = excluded});
          },
          "hashes"_a, "num_prompt_tokens"_a, py::kw_only(), "max_new_tokens"_a = 0, "tenant"_a = "",
          "excluded"_a = std::vector<int32_t>{})
      .def("started", &Router::started, "id"_a, Unlocked())
      .def("grew", &Router::grew, "id"_a, "num_tokens"_a, Unlocked())
      .def("finish", &Router::finish, "id"_a, Unlocked())
      .def(
          "apply",
          [](Router& router, int32_t replica, int64_t sequence,
             const std::vector<std::pair<std::string, py::bytes>>& events) {
            return router.apply(replica, batch_of(sequence, events));
          },
          "replica"_a, "sequence"_a, "events"_a)
      .def(
          "restore",
          [](Router& router, int32_t replica, int64_t sequence, const py::bytes& hashes) {
            router.restore(replica, {.sequence = sequence, .hashes = hashes_of(hashes)});
          },
          "replica"_a, "sequence"_a, "hashes"_a)
      .def("loads", &Router::loads);
  module.def(
      "hash_blocks",
      [](const std::vector<int32_t>& token_ids, int64_t block_size, const std::string& salt) {
        return bytes_of_hashes(chain(token_ids, block_size, salt));
      },
      "token_ids"_a, "block_size"_a, "salt"_a = "",
      "The chained hashes of a prompt's full blocks, 32 bytes each.");
  module.def(
      "hash_text_blocks",
      [](const py::bytes& text, int64_t block_size, const std::string& salt) {
        const std::string_view bytes(text);
        return bytes_of_hashes(chain({bytes.begin(), bytes.end()}, block_size, salt));
      },
      "text"_a, "block_size"_a, "salt"_a = "",
      "The same of a text's bytes, for who has no tokenizer.");
  module.def("prefill_work", &prefill_work, "begin"_a, "end"_a, "attention_tokens"_a);
  module.def("attention_dot_products", &attention_dot_products, "num_tokens"_a);
  module.def(
      "balance_prompts",
      [](const std::vector<int64_t>& num_tokens, int32_t num_workers) {
        return balance_prompts(num_tokens, num_workers);
      },
      "num_tokens"_a, "num_workers"_a);
  module.def("supported_router_policies", [] {
    std::vector<std::pair<std::string, std::string>> rows;
    for (const RouterPolicy& policy : router_policy_registry())
      rows.emplace_back(policy.name, policy.summary);
    return rows;
  });
}

}  // namespace llmserve
