#include "io/quantization_files.h"

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "core/token_hash.h"

namespace llmserve {
namespace {

struct FileRow {
  std::string_view name;
  std::string_view method;  // where the file does not say it
};
constexpr FileRow kFiles[] = {{"quantize_config.json", "gptq"},
                              {"quant_config.json", "awq"},
                              {"hf_quant_config.json", "modelopt"}};

// By the path of keys to it.
std::optional<JsonDocument> within(const JsonDocument& config, const JsonNode& parent,
                                   std::string_view prefix) {
  for (const std::string_view key : {"quantization_config", "compression_config"}) {
    const JsonNode node = parent[key];
    if (!node.is_null())
      return JsonDocument::make(config.file(), node.value(),
                                std::string(prefix) + std::string(key));
  }
  return std::nullopt;
}

std::optional<JsonDocument> beside(const CheckpointDirectory& directory) {
  for (const FileRow& row : kFiles) {
    if (!directory.contains(row.name)) continue;
    const auto file = directory.map(row.name);
    const std::string path = file->path().string();
    JsonValue root = JsonDocument::parse(path, file->text()).root();
    auto* fields = std::get_if<JsonValue::Object>(&root.data);
    bool has_method = false;
    if (fields)
      for (const JsonMember& member : *fields) has_method |= member.key == "quant_method";
    if (fields && !has_method) fields->push_back({"quant_method", {std::string(row.method)}});
    return JsonDocument::make(path, std::move(root));
  }
  return std::nullopt;
}

void add(Sha256& hash, std::string_view text) {
  hash.update({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  const uint8_t end = 0;
  hash.update({&end, 1});
}

void add(Sha256& hash, const JsonValue& value) {
  add(hash, std::to_string(value.data.index()));
  if (const auto* flag = std::get_if<bool>(&value.data)) add(hash, *flag ? "1" : "0");
  if (const auto* number = std::get_if<int64_t>(&value.data)) add(hash, std::to_string(*number));
  if (const auto* number = std::get_if<double>(&value.data))
    add(hash, std::to_string(std::bit_cast<uint64_t>(*number)));
  if (const auto* text = std::get_if<std::string>(&value.data)) add(hash, *text);
  if (const auto* items = std::get_if<JsonValue::Array>(&value.data)) {
    add(hash, std::to_string(items->size()));
    for (const JsonValue& item : *items) add(hash, item);
  }
  if (const auto* members = std::get_if<JsonValue::Object>(&value.data)) {
    add(hash, std::to_string(members->size()));
    for (const JsonMember& member : *members) {
      add(hash, member.key);
      add(hash, member.value);
    }
  }
}

}  // namespace

std::string digest(const JsonDocument& document) {
  Sha256 hash;
  add(hash, document.root());
  return to_hex(hash.finish());
}

std::optional<JsonDocument> read_quantization(const JsonDocument& config,
                                              const CheckpointDirectory* directory) {
  const JsonNode json(config);
  if (!json.is_object()) return std::nullopt;  // who reads the model's fields says it
  if (auto found = within(config, json, "")) return found;
  const JsonNode text = json["text_config"];
  if (text.is_object())
    if (auto found = within(config, text, "text_config.")) return found;
  return directory ? beside(*directory) : std::nullopt;
}

}  // namespace llmserve
