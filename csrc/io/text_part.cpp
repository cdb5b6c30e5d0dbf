#include "io/text_part.h"

#include <algorithm>
#include <array>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr WrapperRow kWrappers[] = {
    {"AyaVisionForConditionalGeneration", "aya_vision", "Aya Vision", "cohere2"},
    {"Cohere2VisionForConditionalGeneration", "cohere2_vision", "Command A Vision", "cohere2"},
    {"Exaone4_5_ForConditionalGeneration", "exaone4_5", "EXAONE 4.5", "exaone4"},
    {"Gemma3ForConditionalGeneration", "gemma3", "Gemma 3 4B, 12B and 27B", "gemma3_text"},
    {"Glm4vForConditionalGeneration", "glm4v", "GLM-4.1V", "glm4v_text"},
    {"Idefics3ForConditionalGeneration", "idefics3", "Idefics3 and SmolVLM", "llama"},
    {"InternVLForConditionalGeneration", "internvl", "InternVL 2.5 to 3.5 in transformers' layout",
     "qwen2"},
    {"KimiK25ForConditionalGeneration", "kimi_k25", "Kimi K2.5 and later", "deepseek_v3"},
    {"Kimi_K25ForConditionalGeneration", "kimi_k25", "Kimi K2.5 and later, transformers' layout",
     "deepseek_v3"},
    {"LlavaForConditionalGeneration", "llava", "LLaVA 1.5, Pixtral and kin", "llama"},
    {"LlavaNextForConditionalGeneration", "llava_next", "LLaVA 1.6, Granite Vision", "llama"},
    {"LlavaOnevisionForConditionalGeneration", "llava_onevision", "LLaVA OneVision", "qwen2"},
    {"Mistral3ForConditionalGeneration", "mistral3", "Mistral Small 3.1 to 4, Ministral 3",
     "mistral"},
    {"Qwen2VLForConditionalGeneration", "qwen2_vl", "Qwen2-VL", "qwen2_vl_text",
     /*can_be_flat=*/true},
    {"Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2.5-VL", "qwen2_5_vl_text",
     /*can_be_flat=*/true},
    {"Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3-VL, dense", "qwen3_vl_text"},
    {"Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "Qwen3-VL with experts",
     "qwen3_vl_moe_text"},
    {"SmolVLMForConditionalGeneration", "smolvlm", "SmolVLM2", "llama"},
};

// Of a config that stands within another transformers writes what differs from its class's
// defaults. These are the classes whose text models run, with the model_type that has the same
// layers and the defaults that a model by itself does not rely on.
struct Default {
  std::string_view field;
  std::variant<std::monostate, bool, int64_t, double, JsonValue (*)()> value;
};
struct TextModelRow {
  std::string_view model_type;
  std::string_view runs_as;
  // vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads
  std::array<int64_t, 5> dims;
  std::span<const Default> others = {};
};
constexpr std::string_view kDims[] = {"vocab_size", "hidden_size", "intermediate_size",
                                      "num_hidden_layers", "num_attention_heads"};
constexpr Default kGlm4v[] = {{"rms_norm_eps", 1e-5},
                              {"max_position_embeddings", int64_t{32768}},
                              {"partial_rotary_factor", 1.0},
                              {"head_dim", std::monostate()}};
constexpr Default kQwen2Vl[] = {{"rms_norm_eps", 1e-5},
                                {"rope_theta", 1e6},
                                {"num_key_value_heads", int64_t{8}},
                                {"max_window_layers", int64_t{80}}};
constexpr Default kQwen3Vl[] = {{"rope_theta", 5e5}, {"max_position_embeddings", int64_t{128000}}};
JsonValue mistral4_rope() {
  return {JsonValue::Object{{"rope_type", {std::string("yarn")}},
                            {"rope_theta", {1e4}},
                            {"factor", {128.0}},
                            {"original_max_position_embeddings", {int64_t{8192}}},
                            {"mscale", {1.0}},
                            {"mscale_all_dim", {1.0}},
                            {"llama_4_scaling_beta", {0.1}}}};
}
constexpr Default kMistral4[] = {{"rope_parameters", &mistral4_rope}};
constexpr Default kQwen3VlMoe[] = {{"rope_theta", 5e5},
                                   {"max_position_embeddings", int64_t{128000}},
                                   {"num_local_experts", int64_t{60}},
                                   {"num_experts_per_tok", int64_t{4}},
                                   {"moe_intermediate_size", int64_t{1408}},
                                   {"num_key_value_heads", int64_t{16}},
                                   {"has_stacked_experts", true}};
constexpr TextModelRow kTextModels[] = {
    {"cohere2", "cohere2", {256000, 8192, 22528, 40, 64}},
    {"deepseek_v3", "deepseek_v3", {129280, 7168, 18432, 61, 128}},
    {"exaone4", "exaone4", {102400, 4096, 16384, 32, 32}},
    {"exaone4_5_text", "exaone4", {102400, 4096, 16384, 32, 32}},
    {"gemma3_text", "gemma3_text", {262208, 2304, 9216, 26, 8}},
    {"glm4v_text", "glm4", {151552, 4096, 13696, 40, 32}, kGlm4v},
    {"granite", "granite", {32000, 4096, 11008, 32, 32}},
    {"kimi_k2", "deepseek_v3", {129280, 7168, 18432, 61, 128}},
    {"llama", "llama", {32000, 4096, 11008, 32, 32}},
    {"ministral3", "ministral3", {131072, 4096, 14336, 34, 32}},
    {"mistral", "mistral", {32000, 4096, 14336, 32, 32}},
    {"mistral4", "mistral4", {131072, 4096, 12288, 36, 32}, kMistral4},
    {"qwen2", "qwen2", {151936, 4096, 22016, 32, 32}},
    {"qwen2_vl_text", "qwen2", {152064, 8192, 29568, 80, 64}, kQwen2Vl},
    {"qwen2_5_vl_text", "qwen2", {152064, 8192, 29568, 80, 64}, kQwen2Vl},
    {"qwen3", "qwen3", {151936, 4096, 22016, 32, 32}},
    {"qwen3_vl_text", "qwen3", {151936, 4096, 22016, 32, 32}, kQwen3Vl},
    {"qwen3_vl_moe_text", "qwen3_moe", {151936, 2048, 5632, 24, 16}, kQwen3VlMoe},
};

// Of the whole model where the wrapper says it.
constexpr std::string_view kOuterFields[] = {"dtype", "torch_dtype", "bos_token_id",
                                             "eos_token_id"};

// Text models are within published files as transformers 4 and 5 write them, or flat.
struct PrefixRow {
  std::string_view from;
  std::string_view to;
};
constexpr PrefixRow kPrefixes[] = {{"language_model.model.", "model."},
                                   {"language_model.lm_head.", "lm_head."},
                                   {"model.language_model.", "model."},
                                   {"model.text_model.", "model."}};
// The other parts, with "model." before them or without.
constexpr std::string_view kOtherParts[] = {"vision_tower", "vision_model",          "visual",
                                            "connector",    "multi_modal_projector", "mm_projector",
                                            "image_newline"};

const WrapperRow* find_wrapper(const JsonNode& json) {
  const JsonNode names = json["architectures"];
  if (names.is_null()) {
    const JsonNode type = json["model_type"];
    if (!type.is_string()) return nullptr;
    const auto* row = std::ranges::find(kWrappers, type.as_string(), &WrapperRow::model_type);
    return row == std::end(kWrappers) ? nullptr : row;
  }
  const std::vector<JsonNode> list = names.as_array();
  if (list.empty()) return nullptr;
  const auto* row = std::ranges::find(kWrappers, list[0].as_string(), &WrapperRow::name);
  return row == std::end(kWrappers) ? nullptr : row;
}

bool is_other_part(std::string_view name) {
  if (name.starts_with("model.")) name.remove_prefix(6);
  const std::string_view part = name.substr(0, name.find('.'));
  return std::ranges::find(kOtherParts, part) != std::end(kOtherParts);
}

void rename(std::string& name) {
  for (const PrefixRow& row : kPrefixes) {
    if (!name.starts_with(row.from)) continue;
    name.replace(0, row.from.size(), row.to);
    return;
  }
}

void set(JsonValue::Object& fields, std::string_view key, JsonValue value) {
  for (JsonMember& member : fields) {
    if (member.key != key) continue;
    member.value = std::move(value);
    return;
  }
  fields.push_back({std::string(key), std::move(value)});
}

// A file that has a head uses it, whatever the config says, as transformers does: its wrappers say
// that Mistral Small 3.1 is tied, which has one.
std::optional<bool> is_tied(const JsonNode& outer, const JsonNode& inner,
                            const std::optional<bool>& has_head) {
  std::optional<bool> said;
  for (const JsonNode& json : {outer, inner}) {
    const JsonNode node = json["tie_word_embeddings"];
    if (!node.is_null()) said = node.as_bool() || said.value_or(false);
  }
  if (!has_head) return said;
  return said.value_or(true) && !*has_head;
}

void fill_defaults(const JsonNode& inner, const std::string& type, JsonValue::Object& fields) {
  const auto* row = std::ranges::find(kTextModels, type, &TextModelRow::model_type);
  set(fields, "model_type", {std::string(row == std::end(kTextModels) ? type : row->runs_as)});
  if (row == std::end(kTextModels)) return;
  const auto set_absent = [&](std::string_view field, JsonValue value) {
    if (inner[field].is_absent()) set(fields, field, std::move(value));
  };
  for (size_t i = 0; i < row->dims.size(); ++i) set_absent(kDims[i], {row->dims[i]});
  for (const Default& other : row->others)
    std::visit(
        [&](auto value) {
          if constexpr (std::is_invocable_v<decltype(value)>)
            set_absent(other.field, value());
          else
            set_absent(other.field, {value});
        },
        other.value);
}

// What tensors say that a config does not.
struct StoredPart {
  std::optional<bool> has_head;
  // Of a tensor of all experts, the dimension behind theirs: published files have the input's
  // there, files that transformers 5 writes the output's. 0: there is none.
  int64_t expert_rows = 0;
};

StoredPart stored_part(const std::vector<TensorEntry>& tensors) {
  StoredPart out;
  out.has_head = std::ranges::any_of(tensors, [](const TensorEntry& entry) {
    return entry.name.starts_with("lm_head.");  // a quantized one has several tensors
  });
  const auto stacked = std::ranges::find_if(tensors, [](const TensorEntry& entry) {
    return entry.shape.size() == 3 && entry.name.ends_with(".mlp.experts.gate_up_proj");
  });
  if (stacked != tensors.end()) out.expert_rows = stacked->shape[1];
  return out;
}

JsonDocument text_config(const JsonDocument& document, const WrapperRow& row,
                         const StoredPart& stored) {
  const JsonNode outer(document);
  const JsonNode nested = outer["text_config"];
  const bool is_flat = row.can_be_flat && nested.is_null();
  const JsonNode inner = is_flat ? outer : nested;
  const JsonNode type = inner["model_type"];  // names what is no object
  JsonValue::Object fields = std::get<JsonValue::Object>(inner.value().data);
  for (const std::string_view field : kOuterFields)
    if (!outer[field].is_null()) set(fields, field, outer[field].value());
  fill_defaults(inner,
                std::string(is_flat || type.is_null() ? row.text_model_type : type.as_string()),
                fields);
  if (const std::optional<bool> tied = is_tied(outer, inner, stored.has_head))
    set(fields, "tie_word_embeddings", {*tied});
  if (stored.expert_rows > 0) set(fields, "stacked_expert_rows", {stored.expert_rows});
  set(fields, "architectures", {});  // model_type says it
  set(fields, "text_part_of", {std::string(row.name)});
  return JsonDocument::make(document.file(), {std::move(fields)}, is_flat ? "" : "text_config");
}

}  // namespace

std::span<const WrapperRow> wrapper_registry() { return kWrappers; }

Checkpoint take_text_part(Checkpoint checkpoint) {
  const WrapperRow* row = find_wrapper(JsonNode(checkpoint.config()));
  if (!row) return checkpoint;
  std::vector<TensorEntry> tensors = std::move(checkpoint).take_tensors();
  std::erase_if(tensors, [](const TensorEntry& entry) { return is_other_part(entry.name); });
  for (TensorEntry& entry : tensors) rename(entry.name);
  const StoredPart stored = checkpoint.has_tensors() ? stored_part(tensors) : StoredPart{};
  Checkpoint part(checkpoint.format(), checkpoint.path(),
                  text_config(checkpoint.config(), *row, stored),
                  {checkpoint.files().begin(), checkpoint.files().end()}, std::move(tensors));
  part.set_quantization(checkpoint.quantization());
  return part;
}

}  // namespace llmserve
