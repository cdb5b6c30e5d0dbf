#include "api/pooling.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr std::array<std::string_view, 3> kTasks{"embed", "token_embed", "token_logits"};
constexpr std::array<std::string_view, 3> kTypes{"last", "cls", "mean"};

size_t find(const char* field, const std::array<std::string_view, 3>& names,
            std::string_view name) {
  const auto* found = std::ranges::find(names, name);
  if (found != names.end()) return static_cast<size_t>(found - names.begin());
  throw InvalidArgument(concat(field, " must be ", names[0], ", ", names[1], " or ", names[2],
                               ", got \"", name, "\""));
}

}  // namespace

std::string_view name(PoolingTask task) { return kTasks[static_cast<size_t>(task)]; }
std::string_view name(PoolingType type) { return kTypes[static_cast<size_t>(type)]; }

PoolingTask pooling_task(std::string_view name) {
  return static_cast<PoolingTask>(find("task", kTasks, name));
}

PoolingType pooling_type(std::string_view name) {
  return static_cast<PoolingType>(find("pooling", kTypes, name));
}

void PoolingParams::validate() const {
  if (dimensions < 0)
    throw InvalidArgument(concat("dimensions must be at least 1, or 0 for all, got ", dimensions));
  if (task != PoolingTask::kTokenLogits) return;
  if (dimensions > 0) throw InvalidArgument("dimensions cut embeddings, not logits; leave it out");
  if (normalize) throw InvalidArgument("normalize is for embeddings, not for logits; leave it out");
}

void PoolingParams::validate_dimensions(int64_t hidden_size) const {
  if (dimensions > hidden_size) {
    throw InvalidArgument(concat("dimensions must be at most the model's hidden size ", hidden_size,
                                 ", got ", dimensions));
  }
}

PooledShape pooled_shape(const PoolingParams& params, int64_t num_tokens, int64_t hidden_size,
                         int64_t vocab_size) {
  const int64_t num_rows = params.task == PoolingTask::kEmbed ? 1 : num_tokens;
  if (params.task == PoolingTask::kTokenLogits) return {num_rows, vocab_size};
  return {num_rows, params.dimensions > 0 ? params.dimensions : hidden_size};
}

}  // namespace llmserve
