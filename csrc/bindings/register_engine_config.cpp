#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "api/engine_config.h"
#include "bindings/from_kwargs.h"
#include "bindings/register.h"
#include "core/error.h"
#include "engine/config_resolver.h"

namespace py = pybind11;

namespace llmserve {
namespace {

DType dtype_from_name(const std::string& text) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    if (text == name(dtype)) return dtype;
  }
  throw InvalidArgument("dtype must be float32 or bfloat16, got " + text);
}

void register_cache_config(py::module_& module) {
  py::class_<CacheConfig>(module, "CacheConfig")
      .def(py::init<>())
      .def_readwrite("block_size", &CacheConfig::block_size)
      .def_readwrite("num_blocks", &CacheConfig::num_blocks)
      .def_readwrite("enable_prefix_caching", &CacheConfig::enable_prefix_caching)
      .def_readwrite("windows", &CacheConfig::windows)
      .def("validate", &CacheConfig::validate);
}

void register_scheduler_config(py::module_& module) {
  py::class_<SchedulerConfig>(module, "SchedulerConfig")
      .def(py::init<>())
      .def_readwrite("policy", &SchedulerConfig::policy)
      .def_readwrite("max_num_batched_tokens", &SchedulerConfig::max_num_batched_tokens)
      .def_readwrite("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_readwrite("max_num_queued_reqs", &SchedulerConfig::max_num_queued_reqs)
      .def_readwrite("max_model_len", &SchedulerConfig::max_model_len)
      .def_readwrite("enable_chunked_prefill", &SchedulerConfig::enable_chunked_prefill)
      .def_readwrite("max_stall_us", &SchedulerConfig::max_stall_us)
      .def_readwrite("min_spread_tokens", &SchedulerConfig::min_spread_tokens)
      .def_readwrite("max_batch_delay_us", &SchedulerConfig::max_batch_delay_us)
      .def_readwrite("eos_token_ids", &SchedulerConfig::eos_token_ids)
      .def("validate", &SchedulerConfig::validate);
}

// The attributes are LLM's arguments.
void register_config_request(py::module_& module) {
  py::class_<ConfigRequest>(module, "ConfigRequest")
      .def(py::init(&from_kwargs<ConfigRequest>))
      .def_readwrite("model", &ConfigRequest::model)
      .def_readwrite("device", &ConfigRequest::device)
      .def_readwrite("dtype", &ConfigRequest::dtype)
      .def_readwrite("quantization", &ConfigRequest::quantization)
      .def_readwrite("kv_cache_dtype", &ConfigRequest::kv_cache_dtype)
      .def_readwrite("max_model_len", &ConfigRequest::max_model_len)
      .def_readwrite("block_size", &ConfigRequest::block_size)
      .def_readwrite("enable_prefix_caching", &ConfigRequest::enable_prefix_caching)
      .def_readwrite("kv_cache_memory_bytes", &ConfigRequest::kv_cache_memory_bytes)
      .def_readwrite("num_gpu_blocks_override", &ConfigRequest::num_blocks)
      .def_readwrite("gpu_memory_utilization", &ConfigRequest::memory_utilization)
      .def_readwrite("available_memory_bytes", &ConfigRequest::available_memory_bytes)
      .def_readwrite("max_num_batched_tokens", &ConfigRequest::max_num_batched_tokens)
      .def_readwrite("max_num_seqs", &ConfigRequest::max_num_seqs)
      .def_readwrite("max_num_queued_reqs", &ConfigRequest::max_num_queued_reqs)
      .def_readwrite("enable_chunked_prefill", &ConfigRequest::enable_chunked_prefill)
      .def_readwrite("max_stall_ms", &ConfigRequest::max_stall_ms)
      .def_readwrite("spreads_prompts", &ConfigRequest::spreads_prompts)
      .def_readwrite("scheduling_policy", &ConfigRequest::policy)
      .def_readwrite("num_threads", &ConfigRequest::num_threads)
      .def_readwrite("seed", &ConfigRequest::seed)
      .def_readwrite("max_logprobs", &ConfigRequest::max_logprobs)
      .def_readwrite("packed_cache_folder", &ConfigRequest::packed_cache_folder)
      .def_readwrite("packed_cache_bytes", &ConfigRequest::packed_cache_bytes)
      .def_readwrite("eos_token_ids", &ConfigRequest::eos_token_ids);
}

}  // namespace

void register_engine_config(py::module_& module) {
  register_cache_config(module);
  register_scheduler_config(module);
  register_config_request(module);
  py::class_<EngineConfig>(module, "EngineConfig")
      .def(py::init<>())
      .def_readwrite("model_path", &EngineConfig::model_path)
      .def_readwrite("device", &EngineConfig::device)
      .def_property(
          "dtype", [](const EngineConfig& config) { return std::string(name(config.dtype)); },
          [](EngineConfig& config, const std::string& text) {
            config.dtype = dtype_from_name(text);
          })
      .def_readwrite("quantization", &EngineConfig::quantization)
      .def_property(
          "kv_cache_dtype",
          [](const EngineConfig& config) {
            return std::string(kv_cache_dtype_name(config.kv_cache_dtype));
          },
          [](EngineConfig& config, const std::string& text) {
            config.kv_cache_dtype = kv_cache_dtype_from_name(text, config.dtype);
          })
      .def_readwrite("num_threads", &EngineConfig::num_threads)
      .def_readwrite("seed", &EngineConfig::seed)
      .def_readwrite("cache", &EngineConfig::cache)
      .def_readwrite("scheduler", &EngineConfig::scheduler)
      .def_readwrite("max_logprobs", &EngineConfig::max_logprobs)
      .def_readwrite("async_scheduling", &EngineConfig::async_scheduling)
      .def_readwrite("enforce_eager", &EngineConfig::enforce_eager)
      .def_readwrite("defer_packing", &EngineConfig::defer_packing)
      .def("validate", &EngineConfig::validate);

  module.def(
      "resolve_config", &resolve_config, py::arg("request"),
      py::call_guard<py::gil_scoped_release>(),
      "The complete EngineConfig: every setting that depends on the model or the machine gets its "
      "number. Reads config.json and the tensors' headers, loads nothing.");
}

}  // namespace llmserve
