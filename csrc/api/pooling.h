// A request that wants hidden states or logits of its prompt and no tokens.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/host_array.h"

namespace llmserve {

enum class PoolingTask : uint8_t {
  kEmbed,        // one vector a prompt
  kTokenEmbed,   // the final-normed hidden state of every token
  kTokenLogits,  // the logits of every token
};

// Which tokens make the vector of kEmbed.
enum class PoolingType : uint8_t { kLast, kCls, kMean };

std::string_view name(PoolingTask task);
std::string_view name(PoolingType type);
// By their names. Throw InvalidArgument that lists them.
PoolingTask pooling_task(std::string_view name);
PoolingType pooling_type(std::string_view name);

struct PoolingParams {
  PoolingTask task = PoolingTask::kEmbed;
  PoolingType pooling = PoolingType::kLast;
  bool normalize = true;   // to an L2 norm of 1; not kTokenLogits
  int32_t dimensions = 0;  // keep the first so many, before normalizing; 0: all; not kTokenLogits

  // Throws InvalidArgument that names the field, the range and the value.
  void validate() const;
  // Throws InvalidArgument for more dimensions than the model's hidden size.
  void validate_dimensions(int64_t hidden_size) const;
};

// More than this for one request is refused: 1 GiB.
inline constexpr int64_t kMaxPooledBytes = int64_t{1} << 30;

// Of an answer in float32.
struct PooledShape {
  int64_t num_rows = 0;
  int64_t width = 0;

  int64_t bytes() const { return num_rows * width * static_cast<int64_t>(sizeof(float)); }
};

// What a prompt of T tokens gives with a model of E and V.
PooledShape pooled_shape(const PoolingParams& params, int64_t num_tokens, int64_t hidden_size,
                         int64_t vocab_size);

// The answer: allocated at admission, filled in by the executor as the prompt's tokens run, and
// read once the request has finished.
struct PooledOutput {
  PoolingParams params;
  int64_t num_prompt_tokens = 0;  // T
  HostArray values;  // kEmbed [1, dimensions], kTokenEmbed [T, dimensions], kTokenLogits [T, V]
  std::vector<double> sum;  // [E], of kMean
  bool is_finite = true;
};

}  // namespace llmserve
