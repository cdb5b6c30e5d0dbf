// What a checkpoint holds and what it will take, before anything is loaded.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "api/engine_config.h"
#include "bindings/model_records.h"
#include "bindings/register.h"
#include "core/error.h"
#include "io/packed_cache.h"
#include "io/text_part.h"
#include "layers/quantized/quantization_method.h"
#include "models/config_reader.h"
#include "models/model_loader.h"
#include "models/registry.h"
#include "quant/quant_format.h"
#include "scheduler/policy.h"
#include "speculation/registry.h"

namespace py = pybind11;

namespace llmserve {
namespace {

struct InspectOptions {
  std::string device;
  std::string dtype;
  std::string quantization;
  std::string kv_cache_dtype;
  int64_t max_model_len = 0;
  int64_t max_tokens = 0;
  int64_t max_logit_rows = 0;
};

struct Inspection {
  Checkpoint checkpoint;
  ModelConfig config;
  DType dtype;
  DType kv_cache_dtype;
  ModelPlan plan;
};

Inspection inspect(const std::string& path, const InspectOptions& options) {
  Checkpoint checkpoint = open_checkpoint(path);
  ModelConfig config = read_model_config(checkpoint.config(), options.max_model_len);
  const DType dtype = resolve_dtype(options.dtype, checkpoint);
  const DType cache_dtype = kv_cache_dtype_from_name(options.kv_cache_dtype, dtype);
  const std::unique_ptr<Backend> backend = make_backend(options.device, {});
  ModelPlan plan = plan_model(checkpoint, config, *backend,
                              {.format = resolve_weight_format(dtype, options.quantization),
                               .kv_cache_dtype = cache_dtype,
                               .max_tokens = options.max_tokens,
                               .max_logit_rows = options.max_logit_rows});
  return {std::move(checkpoint), std::move(config), dtype, cache_dtype, std::move(plan)};
}

py::dict to_dict(const Inspection& inspection) {
  const auto& [checkpoint, config, dtype, cache_dtype, model_plan] = inspection;
  int64_t file_bytes = 0;
  for (const auto& file : checkpoint.files()) file_bytes += file->num_bytes();

  py::dict plan = to_dict(model_plan.weights);
  plan["kv_bytes_per_token"] = model_plan.kv_bytes_per_token;
  plan["workspace_bytes"] = model_plan.workspace_bytes;
  plan["dtype"] = name(dtype);
  plan["kv_cache_dtype"] = kv_cache_dtype_name(cache_dtype);
  py::dict out;
  out["format"] = checkpoint.format();
  out["config"] = to_dict(config);
  out["tensors"] = tensor_list(checkpoint);
  out["num_files"] = checkpoint.files().size();
  out["file_bytes"] = file_bytes;
  out["plan"] = plan;
  return out;
}

py::dict inspect_checkpoint(const std::string& path, const std::string& device,
                            const std::string& dtype, const std::string& quantization,
                            const std::string& kv_cache_dtype, int64_t max_model_len,
                            int64_t max_tokens, int64_t max_logit_rows) {
  const InspectOptions options{.device = device,
                               .dtype = dtype,
                               .quantization = quantization,
                               .kv_cache_dtype = kv_cache_dtype,
                               .max_model_len = max_model_len,
                               .max_tokens = max_tokens,
                               .max_logit_rows = max_logit_rows};
  const auto inspection = [&] {
    const py::gil_scoped_release release;
    return inspect(path, options);
  }();
  return to_dict(inspection);
}

template <class Rows>
py::list rows_of(const Rows& rows) {
  py::list out;
  for (const auto& row : rows) out.append(py::make_tuple(row.name, row.summary));
  return out;
}

}  // namespace

void register_inspect(py::module_& module) {
  module.def("inspect_checkpoint", &inspect_checkpoint, py::arg("path"), py::kw_only(),
             py::arg("device") = "cpu", py::arg("dtype") = "auto", py::arg("quantization") = "",
             py::arg("kv_cache_dtype") = "auto", py::arg("max_model_len") = 0,
             py::arg("max_tokens") = 2048, py::arg("max_logit_rows") = 256,
             "Format, config, tensors and the exact memory plan of a checkpoint directory. Bytes "
             "throughout; nothing is loaded.");
  py::class_<PackedCacheEntry>(module, "PackedCacheEntry")
      .def_readonly("path", &PackedCacheEntry::path)
      .def_readonly("model", &PackedCacheEntry::model)
      .def_readonly("variant", &PackedCacheEntry::variant)
      .def_readonly("num_bytes", &PackedCacheEntry::num_bytes)
      .def_readonly("last_used_ns", &PackedCacheEntry::last_used_ns);
  module.def(
      "list_packed_cache", [](const std::string& folder) { return PackedCache(folder).list(); },
      py::arg("folder"), "The files of packed weights, the least recently used first.");
  module.def(
      "clear_packed_cache", [](const std::string& folder) { return PackedCache(folder).clear(); },
      py::arg("folder"), "Removes the files of packed weights; returns how many bytes.");
  module.def(
      "supported_architectures", [] { return rows_of(architecture_registry()); },
      "(name, summary) of every model architecture, as in config.json.");
  module.def(
      "supported_wrappers", [] { return rows_of(wrapper_registry()); },
      "(name, summary) of every architecture whose text part runs, as in config.json.");
  module.def(
      "supported_checkpoint_formats", [] { return rows_of(checkpoint_format_registry()); },
      "(name, summary) of every checkpoint format.");
  module.def(
      "supported_quant_formats", [] { return rows_of(quant_format_registry()); },
      "(name, summary) of every format that weights are read from.");
  module.def(
      "supported_block_formats",
      [] {
        std::vector<std::string> names;
        for (const QuantFormat& format : quant_format_registry())
          if (format.integers) names.emplace_back(format.name);
        return names;
      },
      "Of the formats that weights are read from, those whose blocks linear layers run on as they "
      "are.");
  module.def(
      "supported_quantization_methods",
      [] {
        py::list out;
        for (const QuantizationMethodRow& row : quantization_method_registry())
          out.append(py::make_tuple(row.name, row.summary, row.read != nullptr));
        return out;
      },
      "(name, summary, whether it is read) of every method of quantized checkpoints that is known; "
      "of one that is not read the summary says what to use instead.");
  module.def(
      "check_quantization",
      [](const std::string& path) { read_quantization_method(open_config(path)); }, py::arg("path"),
      "Throws NotSupported if a config.json is of a checkpoint that is quantized by a method that "
      "is "
      "not read.");
  module.def(
      "supported_quantizations", [] { return rows_of(linear_format_registry()); },
      "(name, summary) of every format that linear layers can be quantized to.");
  module.def(
      "supported_backends", [] { return rows_of(backend_registry()); },
      "(name, summary) of every backend.");
  module.def(
      "supported_policies", [] { return rows_of(scheduling_policies()); },
      "(name, summary) of every scheduling policy.");
  module.def(
      "policies_with_priority",
      [] {
        std::vector<std::string> names;
        for (const PolicyRow& row : scheduling_policies())
          if (row.reads_priority) names.emplace_back(row.name);
        return names;
      },
      "Of the scheduling policies, those that read a request's priority.");
  module.def(
      "supported_drafters",
      [] {
        std::vector<std::pair<std::string, bool>> rows;
        for (const DrafterKind& kind : drafter_kinds())
          rows.emplace_back(kind.name, kind.needs_model());
        return rows;
      },
      "(name, whether it has a model) of every drafter.");
}

}  // namespace llmserve
