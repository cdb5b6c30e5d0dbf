// What a checkpoint holds and what it will take, before anything is loaded.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/model_records.h"
#include "bindings/register.h"
#include "core/error.h"
#include "models/model.h"

namespace py = pybind11;

namespace llmserve {
namespace {

DType kv_cache_dtype(const std::string& requested, DType weights) {
  if (requested == "auto") return weights;
  if (requested == name(DType::kF32)) return DType::kF32;
  if (requested == name(DType::kBF16)) return DType::kBF16;
  throw InvalidArgument(
      concat("kv_cache_dtype: expected auto, float32 or bfloat16, got \"", requested, "\""));
}

py::dict inspect_checkpoint(const std::string& path, const std::string& device,
                            const std::string& dtype, const std::string& kv_dtype,
                            int64_t max_model_len, int64_t max_tokens, int64_t max_logit_rows) {
  const Checkpoint checkpoint = open_checkpoint(path);
  const ModelConfig config = read_model_config(checkpoint.config(), max_model_len);
  const DType weight_dtype = resolve_dtype(dtype, checkpoint);
  const std::unique_ptr<Backend> backend = make_backend(device, {});
  const DType cache_dtype = kv_cache_dtype(kv_dtype, weight_dtype);
  const ModelPlan plan = plan_model(checkpoint, config, *backend,
                                    {.dtype = weight_dtype,
                                     .kv_cache_dtype = cache_dtype,
                                     .max_tokens = max_tokens,
                                     .max_logit_rows = max_logit_rows});
  int64_t file_bytes = 0;
  for (const auto& file : checkpoint.files()) file_bytes += file->num_bytes();

  py::dict planned = to_dict(plan.weights);
  planned["kv_bytes_per_token"] = plan.kv_bytes_per_token;
  planned["workspace_bytes"] = plan.workspace_bytes;
  planned["dtype"] = name(weight_dtype);
  planned["kv_cache_dtype"] = name(cache_dtype);
  py::dict out;
  out["format"] = checkpoint.format();
  out["config"] = to_dict(config);
  out["tensors"] = tensor_list(checkpoint);
  out["num_files"] = checkpoint.files().size();
  out["file_bytes"] = file_bytes;
  out["plan"] = planned;
  return out;
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
             py::arg("device") = "cpu", py::arg("dtype") = "auto",
             py::arg("kv_cache_dtype") = "auto", py::arg("max_model_len") = 0,
             py::arg("max_tokens") = 2048, py::arg("max_logit_rows") = 256,
             "Format, config, tensors and the exact memory plan of a checkpoint directory. Bytes "
             "throughout; nothing is loaded.");
  module.def(
      "supported_architectures", [] { return rows_of(architecture_registry()); },
      "(name, summary) of every model architecture, as in config.json.");
  module.def(
      "supported_checkpoint_formats", [] { return rows_of(checkpoint_format_registry()); },
      "(name, summary) of every checkpoint format.");
  module.def(
      "supported_backends", [] { return rows_of(backend_registry()); },
      "(name, summary) of every backend.");
}

}  // namespace llmserve
