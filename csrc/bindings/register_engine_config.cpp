#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "api/engine_config.h"
#include "bindings/config_keywords.h"
#include "bindings/register.h"
#include "core/error.h"
#include "engine/config_resolver.h"

namespace py = pybind11;

namespace llmserve {
namespace {

// Made from keywords, of any field; what Python reads of it are attributes.
template <class Config>
py::class_<Config> register_config(py::module_& module, const char* name) {
  return py::class_<Config>(module, name)
      .def(py::init([](const py::kwargs& fields) { return from_keywords<Config>(fields); }))
      .def("validate", &Config::validate);
}

void register_config_request(py::module_& module) {
  py::class_<ConfigRequest>(module, "ConfigRequest").def(py::init([](const py::kwargs& settings) {
    return from_keywords<ConfigRequest>(
        settings, [](ConfigRequest& request) -> EngineConfig& { return request.settings; },
        [](ConfigRequest& request) -> ParallelConfig& { return request.settings.parallel; },
        [](ConfigRequest& request) -> CacheConfig& { return request.settings.cache; },
        [](ConfigRequest& request) -> SchedulerConfig& { return request.settings.scheduler; },
        [](ConfigRequest& request) -> PackedCacheConfig& { return request.settings.packed_cache; });
  }));
}

}  // namespace

void register_engine_config(py::module_& module) {
  py::class_<CacheGroupSpec>(module, "CacheGroupSpec")
      .def(py::init([](int32_t window, int32_t num_layers, int64_t num_kv_heads, int64_t key_dim,
                       int64_t value_dim, bool values_in_keys, int64_t state_bytes) {
             return CacheGroupSpec{.window = window,
                                   .num_layers = num_layers,
                                   .num_kv_heads = num_kv_heads,
                                   .key_dim = key_dim,
                                   .value_dim = value_dim,
                                   .values_in_keys = values_in_keys,
                                   .state_bytes = state_bytes};
           }),
           py::kw_only(), py::arg("window") = 0, py::arg("num_layers") = 1,
           py::arg("num_kv_heads") = 0, py::arg("key_dim") = 0, py::arg("value_dim") = 0,
           py::arg("values_in_keys") = false, py::arg("state_bytes") = 0)
      .def_readonly("window", &CacheGroupSpec::window)
      .def_readonly("num_layers", &CacheGroupSpec::num_layers)
      .def_readonly("num_kv_heads", &CacheGroupSpec::num_kv_heads)
      .def_readonly("key_dim", &CacheGroupSpec::key_dim)
      .def_readonly("value_dim", &CacheGroupSpec::value_dim)
      .def_readonly("values_in_keys", &CacheGroupSpec::values_in_keys)
      .def_readonly("state_bytes", &CacheGroupSpec::state_bytes)
      .def(py::self == py::self);
  register_config<CacheConfig>(module, "CacheConfig")
      .def_readonly("block_size", &CacheConfig::block_size)
      .def_readonly("num_blocks", &CacheConfig::num_blocks);
  register_config<SchedulerConfig>(module, "SchedulerConfig")
      .def_readonly("policy", &SchedulerConfig::policy)
      .def_readonly("max_num_batched_tokens", &SchedulerConfig::max_num_batched_tokens)
      .def_readonly("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_readonly("max_model_len", &SchedulerConfig::max_model_len)
      .def_readonly("min_spread_tokens", &SchedulerConfig::min_spread_tokens)
      .def_readwrite("eos_token_ids", &SchedulerConfig::eos_token_ids);
  register_config<ParallelConfig>(module, "ParallelConfig")
      .def_readonly("tensor_parallel_size", &ParallelConfig::tensor)
      .def_readonly("enable_expert_parallel", &ParallelConfig::has_whole_experts)
      .def_readonly("decode_context_parallel_size", &ParallelConfig::decode_context)
      .def_readonly("tensor_parallel_cut", &ParallelConfig::cut)
      .def_readonly("pipeline_parallel_size", &ParallelConfig::pipeline)
      .def_readonly("data_parallel_size", &ParallelConfig::data)
      .def_readonly("nnodes", &ParallelConfig::nodes)
      .def_readonly("node_rank", &ParallelConfig::node);
  register_config<SpeculationConfig>(module, "SpeculationConfig")
      .def_readonly("method", &SpeculationConfig::method)
      .def_readonly("model", &SpeculationConfig::model)
      .def_readonly("num_speculative_tokens", &SpeculationConfig::num_speculative_tokens);
  register_config_request(module);
  register_config<EngineConfig>(module, "EngineConfig")
      .def_readonly("model_path", &EngineConfig::model_path)
      .def_readonly("device", &EngineConfig::device)
      .def_property_readonly(
          "dtype", [](const EngineConfig& config) { return std::string(name(config.dtype)); })
      .def_property_readonly("kv_cache_dtype",
                             [](const EngineConfig& config) {
                               return std::string(kv_cache_dtype_name(config.kv_cache_dtype));
                             })
      .def_readonly("num_threads", &EngineConfig::num_threads)
      .def_readonly("parallel", &EngineConfig::parallel)
      .def_readonly("cache", &EngineConfig::cache)
      .def_readonly("scheduler", &EngineConfig::scheduler)
      .def_readonly("speculation", &EngineConfig::speculation)
      .def_readonly("max_logprobs", &EngineConfig::max_logprobs);
}

}  // namespace llmserve
