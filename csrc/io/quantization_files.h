// What a checkpoint says of how its weights were quantized.
#pragma once

#include <optional>
#include <string>

#include "io/json.h"
#include "io/mapped_file.h"

namespace llmserve {

// quantization_config of config.json, or of the text model within; otherwise, where there is a
// directory, what older exporters wrote beside config.json: quantize_config.json (GPTQ),
// quant_config.json (AWQ), hf_quant_config.json (ModelOpt). None if nothing says anything. Throws
// CorruptFile.
std::optional<JsonDocument> read_quantization(const JsonDocument& config,
                                              const CheckpointDirectory* directory);

// Hexadecimal, the same for documents that say the same in the same order.
std::string digest(const JsonDocument& document);

}  // namespace llmserve
