#include "models/draft_heads/medusa_head.h"

#include <numeric>

#include "core/error.h"

namespace llmserve {
namespace {

std::string block_name(const HeadConfig& config, int32_t head, int32_t block) {
  return config.is_converted ? concat("blocks.", head, ".layers.", block)
                             : concat(head, ".", block, ".linear");
}

std::string out_name(const HeadConfig& config, int32_t head) {
  return config.is_converted ? concat("lm_heads.", head) : concat(head, ".", config.num_blocks);
}

}  // namespace

MedusaHead::MedusaHead(HeadConfig head, WeightLoader& weights) : DraftHead(std::move(head)) {
  const int64_t size = config().hidden_size();
  for (int32_t i = 0; i < config().num_heads; ++i) {
    std::vector<Linear> blocks;
    for (int32_t j = 0; j < config().num_blocks; ++j)
      blocks.emplace_back(weights, WeightGroup::kMlp,
                          std::vector<WeightPart>{{block_name(config(), i, j), size}}, size,
                          LinearSpec{.has_bias = true, .is_gathered = true});
    heads_.push_back({.blocks = std::move(blocks),
                      .out = LmHead(weights, out_name(config(), i),
                                    {.vocab_size = config().vocab_size, .hidden_size = size})});
  }
  set_weights(weights.report());
}

void MedusaHead::forward(const ForwardContext&, const Model&, const Tensor&, int32_t) const {}

Tensor MedusaHead::compute_logits(const ForwardContext& context, const Model&,
                                  const ConstTensor& features, std::span<const int32_t> rows,
                                  int32_t place) const {
  const Head& head = heads_[static_cast<size_t>(place)];
  const auto num_rows = static_cast<int64_t>(rows.size());
  const Tensor x = context.arena.allocate(DType::kF32, {num_rows, config().hidden_size()});
  const Tensor y = context.arena.allocate(DType::kF32, {num_rows, config().hidden_size()});
  context.backend.gather_rows({.x = features, .rows = rows, .out = x});
  for (const Linear& block : head.blocks) {
    block.forward(context, {x}, y);
    context.backend.activation({.x = y, .out = y, .activation = Activation::kSilu});
    context.backend.add({.out = x, .x = y});
  }
  std::vector<int32_t> all(rows.size());
  std::iota(all.begin(), all.end(), 0);
  return head.out.forward(context, x, all);
}

int64_t MedusaHead::workspace_bytes(int64_t, int64_t max_logit_rows) const {
  const int64_t size = config().hidden_size();
  return 2 * Arena::footprint_bytes(DType::kF32, {max_logit_rows, size}) +
         logit_bytes(config().vocab_size, size, max_logit_rows);
}

}  // namespace llmserve
