#include "routing/work.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace llmserve {

double prefill_work(int64_t begin, int64_t end, double attention_tokens) {
  const auto attended = [](int64_t n) { return static_cast<double>(n) * (n + 1) / 2; };
  const double plain = static_cast<double>(end - begin);
  if (std::isinf(attention_tokens)) return plain;
  return plain + (attended(end) - attended(begin)) / attention_tokens;
}

int64_t attention_dot_products(int64_t num_tokens) { return num_tokens * (num_tokens + 1) / 2; }

std::vector<int32_t> balance_prompts(std::span<const int64_t> num_tokens, int32_t num_workers) {
  if (num_workers < 1)
    throw InvalidArgument(concat("num_workers must be positive, got ", num_workers));
  // Its products, and the sums of 2^22 such prompts, stay within 64 bits.
  constexpr int64_t kMaxTokens = int64_t{1} << 20;
  for (const int64_t n : num_tokens)
    if (n < 0 || n > kMaxTokens)
      throw InvalidArgument(concat("a prompt must have 0 to ", kMaxTokens, " tokens, got ", n));
  std::vector<size_t> order(num_tokens.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return num_tokens[a] > num_tokens[b]; });
  std::vector<int64_t> loads(static_cast<size_t>(num_workers));
  std::vector<int32_t> workers(num_tokens.size());
  for (const size_t i : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += attention_dot_products(num_tokens[i]);
    workers[i] = static_cast<int32_t>(least - loads.begin());
  }
  return workers;
}

}  // namespace llmserve
