// The memory plan and the arithmetic of the KV pool, for LLM.plan and the calculators.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/model_records.h"
#include "bindings/register.h"
#include "core/error.h"
#include "engine/memory_planner.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

void register_kv_pool(py::module_& module) {
  py::class_<KvCacheDType>(module, "KvCacheDType")
      .def_property_readonly("name", [](const KvCacheDType& row) { return row.name; })
      .def_readonly("bits", &KvCacheDType::bits)
      .def_readonly("is_supported", &KvCacheDType::is_supported);
  module.def(
      "kv_cache_dtypes",
      [] {
        const auto rows = kv_cache_dtypes();
        return std::vector<KvCacheDType>(rows.begin(), rows.end());
      },
      "Every element type of a KV cache: those that run, and those that are only planned with.");

  module.def(
      "kv_bytes_per_token",
      [](const std::vector<CacheGroupSpec>& groups, const std::string& dtype, bool with_scales) {
        return kv_bytes_per_token(groups, find_kv_cache_dtype(dtype), with_scales);
      },
      "groups"_a, "dtype"_a, "with_scales"_a = true,
      "Bytes that one token takes in a KV cache of these groups.");

  py::class_<KvPool>(module, "KvPool")
      .def(py::init(&KvPool::of_bytes), "num_bytes"_a, "bytes_per_token"_a, "block_size"_a = 16,
           "The largest pool of whole blocks in `num_bytes`.")
      .def_readonly("bytes_per_token", &KvPool::bytes_per_token)
      .def_readonly("block_size", &KvPool::block_size)
      .def_readonly("num_blocks", &KvPool::num_blocks)
      .def_property_readonly("num_bytes", &KvPool::num_bytes)
      .def_property_readonly("num_tokens", &KvPool::num_tokens)
      .def_readonly("groups", &KvPool::groups)
      .def(
          "sequence_bytes",
          [](const KvPool& pool, int64_t context) {
            return pool.blocks_for(context) * pool.block_bytes();
          },
          "context"_a, "Bytes that one sequence takes at most on its way to `context` tokens.")
      .def(
          "num_users",
          [](const KvPool& pool, int64_t context) {
            if (context < 1)
              throw InvalidArgument(concat("a context has at least 1 token, got ", context));
            return pool.num_users(context);
          },
          "context"_a, "Sequences of `context` tokens that lie in the pool at once, sharing none.");
}

}  // namespace

void register_memory_plan(py::module_& module) {
  register_kv_pool(module);
  py::class_<MachineMemory>(module, "MachineMemory")
      .def_readonly("total_bytes", &MachineMemory::total_bytes)
      .def_readonly("available_bytes", &MachineMemory::available_bytes)
      .def_readonly("reserved_bytes", &MachineMemory::reserved_bytes)
      .def_readonly("bounded_by", &MachineMemory::bounded_by);
  py::class_<RankPlan>(module, "RankPlan")
      .def_readonly("num_threads", &RankPlan::num_threads)
      .def_readonly("weight_bytes", &RankPlan::weight_bytes)
      .def_readonly("workspace_bytes", &RankPlan::workspace_bytes)
      .def_readonly("kv_cache_bytes", &RankPlan::kv_cache_bytes)
      .def_readonly("first_layer", &RankPlan::first_layer)
      .def_readonly("num_layers", &RankPlan::num_layers);
  py::class_<MemoryPlan>(module, "MemoryPlan")
      .def_readonly("ranks", &MemoryPlan::ranks)
      .def_readonly("config", &MemoryPlan::config)
      .def_readonly("architecture", &MemoryPlan::architecture)
      .def_readonly("format", &MemoryPlan::format)
      .def_property_readonly("weights",
                             [](const MemoryPlan& plan) { return to_dict(plan.weights); })
      .def_readonly("workspace_bytes", &MemoryPlan::workspace_bytes)
      .def_readonly("draft_architecture", &MemoryPlan::draft_architecture)
      .def_property_readonly(
          "draft_weight_bytes",
          [](const MemoryPlan& plan) { return plan.draft_weights.total_bytes(); })
      .def_readonly("draft_workspace_bytes", &MemoryPlan::draft_workspace_bytes)
      .def_readonly("draft_kv_bytes", &MemoryPlan::draft_kv_bytes)
      .def_readonly("state_bytes", &MemoryPlan::state_bytes)
      .def_property_readonly("cache_groups",
                             [](const MemoryPlan& self) { return self.config.cache.groups; })
      .def_readonly("machine", &MemoryPlan::machine)
      .def_readonly("memory_utilization", &MemoryPlan::memory_utilization)
      .def_readonly("pool", &MemoryPlan::pool)
      .def_property_readonly("kv_cache_bytes", &MemoryPlan::kv_cache_bytes)
      .def_property_readonly("pool_bound",
                             [](const MemoryPlan& plan) { return name(plan.pool_bound); })
      .def_readonly("pool_by_dtype", &MemoryPlan::pool_by_dtype)
      .def_readonly("refusal", &MemoryPlan::refusal);
  module.def(
      "plan_memory",
      [](const ConfigRequest& request) { return plan_memory(request, open_for_plan(request)); },
      py::arg("request"), py::call_guard<py::gil_scoped_release>(),
      "What an engine of this ConfigRequest will take; loads nothing. What does not fit is "
      "a plan with a refusal.");
  module.def(
      "resolve_config", &resolve_config, py::arg("request"), py::arg("checkpoint"),
      py::call_guard<py::gil_scoped_release>(),
      "The complete EngineConfig: every setting that depends on the model or the machine gets its "
      "number. `checkpoint` is request.model, opened; nothing is loaded.");
}

}  // namespace llmserve
