// The methods.
#include "core/error.h"
#include "layers/quantized/methods/methods.h"
#include "layers/quantized/quantization_method.h"

namespace llmserve {
namespace {

constexpr std::string_view kUseOthers =
    "use the model's original checkpoint with quantization='int8' or 'int4', or its GPTQ, AWQ, "
    "compressed-tensors or GGUF files";

constexpr QuantizationMethodRow kMethods[] = {
    {"gptq", "GPTQ: 2, 3, 4 and 8 bits, any group, act order", &read_gptq},
    {"awq", "AWQ: 4 bits, gemm and gemv", &read_awq},
    {"auto-round", "AutoRound, in GPTQ's and AWQ's packing", &read_auto_round},
    {"intel/auto-round", "AutoRound by its older name", &read_auto_round},
    {"compressed-tensors",
     "LLM Compressor: integers of 2 to 8 bits, FP8, NVFP4 and MXFP4, by groups of modules",
     &read_compressed_tensors},
    {"fp8", "E4M3 with a scale a tensor, a row or a block", &read_fp8},
    {"fbgemm_fp8", "E4M3 with a scale a row", &read_fp8},
    {"modelopt", "NVIDIA ModelOpt: FP8, NVFP4, W4A16_AWQ and a mix", &read_modelopt},
    {"modelopt_fp4", "ModelOpt's NVFP4 by its older name", &read_modelopt},
    {"bitsandbytes", "NF4, FP4 (double quantization, too) and LLM.int8()", &read_bitsandbytes},
    {"mxfp4", "experts in MXFP4, as gpt-oss has them", &read_mxfp4},
    {"torchao", kUseOthers, nullptr},
    {"hqq", kUseOthers, nullptr},
    {"spqr", kUseOthers, nullptr},
    {"quip", kUseOthers, nullptr},
    {"quip_sharp", kUseOthers, nullptr},
    {"aqlm", kUseOthers, nullptr},
    {"vptq", kUseOthers, nullptr},
    {"higgs", kUseOthers, nullptr},
    {"exl2", kUseOthers, nullptr},
    {"exl3", kUseOthers, nullptr},
    {"eetq", kUseOthers, nullptr},
    {"quanto", kUseOthers, nullptr},
    {"quark", kUseOthers, nullptr},
    {"bitnet", kUseOthers, nullptr},
    {"marlin", kUseOthers, nullptr},
};

std::string method_name(const JsonNode& config) {
  const JsonNode method = config["quant_method"];
  if (!method.is_null()) return method.as_string();
  if (config["load_in_8bit"].as_bool_or(false) || config["load_in_4bit"].as_bool_or(false))
    return "bitsandbytes";
  throw NotSupported(concat(config.where(), ".quant_method: says nothing, so that nobody knows ",
                            "how the weights are quantized"));
}

}  // namespace

std::span<const QuantizationMethodRow> quantization_method_registry() { return kMethods; }

std::unique_ptr<QuantizationMethod> read_quantization_method(const Checkpoint& checkpoint) {
  if (!checkpoint.quantization()) return nullptr;
  const JsonNode config(*checkpoint.quantization());
  const std::string method = method_name(config);
  std::string known;
  for (const QuantizationMethodRow& row : kMethods) {
    if (row.name == method) {
      if (row.read) return row.read(config);
      throw NotSupported(concat(config["quant_method"].where(), ": checkpoints that are quantized ",
                                "by ", method, " are not supported; ", row.summary));
    }
    if (row.read) known += concat(known.empty() ? "" : ", ", row.name);
  }
  throw NotSupported(concat(config["quant_method"].where(), ": ", config["quant_method"].describe(),
                            " is not supported (", known, "); ", kUseOthers));
}

}  // namespace llmserve
