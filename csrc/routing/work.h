// What prompts cost, in one unit for routers, balancers and simulators: a token that attends to
// nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace llmserve {

// Of the tokens [begin, end) of a prompt, where a token's attention to `attention_tokens` earlier
// ones costs as much as all else of it; infinite: attention costs nothing.
double prefill_work(int64_t begin, int64_t end, double attention_tokens);

// Dot products of a prompt's causal attention: n (n + 1) / 2.
int64_t attention_dot_products(int64_t num_tokens);

// A worker [prompts] for each prompt, so that the most loaded one has little attention to compute:
// the longest prompt first, each to the worker with the least. Of equal prompts and workers the
// first. Throws InvalidArgument without workers or with a negative length.
std::vector<int32_t> balance_prompts(std::span<const int64_t> num_tokens, int32_t num_workers);

}  // namespace llmserve
