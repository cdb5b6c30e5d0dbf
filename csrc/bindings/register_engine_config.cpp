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
        [](ConfigRequest& request) -> CacheConfig& { return request.settings.cache; },
        [](ConfigRequest& request) -> SchedulerConfig& { return request.settings.scheduler; },
        [](ConfigRequest& request) -> PackedCacheConfig& { return request.settings.packed_cache; });
  }));
}

}  // namespace

void register_engine_config(py::module_& module) {
  py::class_<CacheGroupSpec>(module, "CacheGroupSpec")
      .def(py::init([](int32_t window) { return CacheGroupSpec{.window = window}; }), py::kw_only(),
           py::arg("window") = 0)
      .def_readonly("window", &CacheGroupSpec::window)
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
      .def_readonly("cache", &EngineConfig::cache)
      .def_readonly("scheduler", &EngineConfig::scheduler)
      .def_readonly("max_logprobs", &EngineConfig::max_logprobs);
}

}  // namespace llmserve
