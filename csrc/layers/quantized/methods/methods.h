// What each file beside gives to the table of quantization_registry.cpp.
#pragma once

#include <memory>

#include "layers/quantized/quantization_method.h"

namespace llmserve {

std::unique_ptr<QuantizationMethod> read_gptq(const JsonNode& config);
std::unique_ptr<QuantizationMethod> read_awq(const JsonNode& config);
std::unique_ptr<QuantizationMethod> read_auto_round(const JsonNode& config);
std::unique_ptr<QuantizationMethod> read_compressed_tensors(const JsonNode& config);
std::unique_ptr<QuantizationMethod> read_fp8(const JsonNode& config);
std::unique_ptr<QuantizationMethod> read_modelopt(const JsonNode& config);
std::unique_ptr<QuantizationMethod> read_bitsandbytes(const JsonNode& config);
std::unique_ptr<QuantizationMethod> read_mxfp4(const JsonNode& config);

}  // namespace llmserve
