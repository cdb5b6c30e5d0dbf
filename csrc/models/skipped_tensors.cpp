#include "models/skipped_tensors.h"

#include <algorithm>
#include <charconv>
#include <iterator>

namespace llmserve {
namespace {

// Where in a name the text is.
enum class Place { kBegin, kEnd };

struct SkippedRow {
  std::string_view architecture;  // empty: all
  Place place;
  std::string_view text;
};

constexpr SkippedRow kSkipped[] = {
    // Rotary frequencies, which follow from the config: of older exports, and of GGUF.
    {"", Place::kEnd, "rotary_emb.inv_freq"},
    {"", Place::kBegin, "rope_f"},
    {"", Place::kEnd, ".attn_rot_embd.weight"},
    // Layers that draft further tokens (multi-token prediction), which the model itself does not
    // run.
    {"", Place::kBegin, "mtp."},
    {"", Place::kBegin, "mtp_"},
    {"", Place::kBegin, "model.mtp."},
    {"", Place::kBegin, "model.mtp_"},
    // Causal masks and the number that masked scores get, which older exports carry.
    {"GPT2LMHeadModel", Place::kEnd, ".attn.bias"},
    {"GPT2LMHeadModel", Place::kEnd, ".attn.masked_bias"},
    {"GPTBigCodeForCausalLM", Place::kEnd, ".attn.bias"},
    {"GPTBigCodeForCausalLM", Place::kEnd, ".attn.masked_bias"},
    {"GPTJForCausalLM", Place::kEnd, ".attn.bias"},
    {"GPTJForCausalLM", Place::kEnd, ".attn.masked_bias"},
    {"GPTNeoForCausalLM", Place::kEnd, ".attn.attention.bias"},
    {"GPTNeoForCausalLM", Place::kEnd, ".attn.attention.masked_bias"},
    {"GPTNeoXForCausalLM", Place::kEnd, ".attention.bias"},
    {"GPTNeoXForCausalLM", Place::kEnd, ".attention.masked_bias"},
    // The number of the file's layout, of fairseq.
    {"OPTForCausalLM", Place::kEnd, "decoder.version"},
};

// Of a layer behind those that run: "model.layers.61.…".
bool is_of_draft_layer(const ModelConfig& config, std::string_view name) {
  if (!name.starts_with(config.names.layers)) return false;
  name.remove_prefix(config.names.layers.size());
  int64_t idx = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), idx);
  return error == std::errc() && end != name.data() + name.size() && *end == '.' &&
         idx >= config.num_layers && idx < config.num_layers + config.num_draft_layers;
}

}  // namespace

bool is_skipped_tensor(const ModelConfig& config, std::string_view name) {
  if (is_of_draft_layer(config, name)) return true;
  return std::any_of(std::begin(kSkipped), std::end(kSkipped), [&](const SkippedRow& row) {
    if (!row.architecture.empty() && row.architecture != config.architecture) return false;
    return row.place == Place::kBegin ? name.starts_with(row.text) : name.ends_with(row.text);
  });
}

}  // namespace llmserve
