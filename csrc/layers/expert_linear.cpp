#include "layers/expert_linear.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

// What a part is of one expert.
WeightPart of_expert(WeightPart part, int64_t expert, int64_t num_experts) {
  const size_t place = part.name.find("{}");
  if (place == std::string::npos) {
    part.matrix = expert;
    part.num_matrices = num_experts;
  } else {
    part.name.replace(place, 2, std::to_string(expert));
    part.name += ".weight";
  }
  return part;
}

std::vector<WeightPart> of_expert(const std::vector<WeightPart>& parts, int64_t expert,
                                  int64_t num_experts) {
  std::vector<WeightPart> own;
  for (const WeightPart& part : parts) own.push_back(of_expert(part, expert, num_experts));
  return own;
}

// Matrix e of a tensor of all experts is "<tensor>[e]".
std::vector<std::string> names_of(const std::vector<WeightPart>& parts) {
  std::vector<std::string> names;
  for (const WeightPart& part : parts) {
    const std::string name =
        part.num_matrices > 0 ? concat(part.name, "[", part.matrix, "]") : part.name;
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return names;
}

bool are_alike(const LinearWeight& a, const LinearWeight& b) {
  return a.format == b.format && a.out_features == b.out_features;
}

}  // namespace

ExpertLinear::ExpertLinear(WeightLoader& weights, const ExpertLinearSpec& spec)
    : num_experts_(spec.experts.size == 0 ? spec.num_experts : spec.experts.size) {
  std::vector<WeightPart> biases;
  for (int64_t e = 0; e < spec.num_experts; ++e) {
    std::vector<WeightPart> own = of_expert(spec.parts, e, spec.num_experts);
    if (!spec.shard.is_cut()) own = joined(std::move(own));
    const int64_t idx = e - spec.experts.begin;
    if (idx < 0 || idx >= num_experts_) {
      weights.skip(own, spec.in_features, spec.is_transposed);
      continue;
    }
    names_.push_back(names_of(own));
    add(idx,
        weights.linear(WeightGroup::kExperts, own, spec.in_features, spec.is_transposed,
                       spec.shard),
        own[0].name);
    const std::vector<WeightPart> of_bias = of_expert(spec.biases, e, spec.num_experts);
    biases.insert(biases.end(), of_bias.begin(), of_bias.end());
  }
  if (spec.shard.axis == ShardAxis::kOutput || spec.shard.of(spec.in_features).begin == 0) {
    if (!biases.empty()) bias_ = weights.vector(WeightGroup::kExperts, biases, spec.shard);
  } else {
    weights.skip_vector(biases);
  }
  for (Stack& stack : stacks_) {
    for (const LinearWeight& weight : stack.weights) stack.pointers.push_back(&weight);
    const LinearWeight& like = stack.weights[0];
    out_features_ += like.out_features;
    weights.note_grouped(
        {.max_tokens = weights.backend().mlp_rows(),
         .rows_per_token = spec.rows_per_token,
         .num_weights = spec.num_experts,  // a router's, too
         .in_features = like.in_features,
         .activation_bytes =
             like.format ? quantized_activation_bytes(*like.format, like.in_features) : 0,
         .out_features = weights.rank().size == 1 ? 0 : like.out_features});
  }
}

int64_t ExpertLinear::input_unit(WeightLoader& weights, const ExpertLinearSpec& spec) {
  // Experts are alike.
  const std::vector<WeightPart> first = of_expert(spec.parts, 0, spec.num_experts);
  return weights.input_unit(first[0], spec.in_features, spec.is_transposed);
}

void ExpertLinear::add(int64_t expert, std::vector<LinearWeight> made, const std::string& name) {
  if (expert == 0) stacks_.resize(made.size());
  bool is_alike = made.size() == stacks_.size();
  for (size_t s = 0; is_alike && s < made.size(); ++s) {
    is_alike = expert == 0 || are_alike(made[s], stacks_[s].weights[0]);
    if (is_alike) stacks_[s].weights.push_back(std::move(made[s]));
  }
  if (!is_alike)
    throw NotSupported(concat("tensor \"", name, "\", of expert ", expert,
                              ": expected the format that expert 0 is stored in; the experts of a "
                              "layer have to be of one"));
}

ExpertLinear::Joined ExpertLinear::join(std::span<const ExpertLinear* const> ranks) {
  const ExpertLinear& first = *ranks[0];
  Joined all{.stacks = std::vector<std::vector<const LinearWeight*>>(first.stacks_.size())};
  for (const ExpertLinear* rank : ranks) {
    bool is_alike = rank->stacks_.size() == first.stacks_.size();
    for (size_t s = 0; is_alike && s < all.stacks.size(); ++s)
      is_alike = are_alike(rank->stacks_[s].weights[0], first.stacks_[s].weights[0]);
    if (!is_alike)
      throw NotSupported(concat("enable_eplb: expert \"", rank->names_[0][0],
                                "\" is stored in another format than \"", first.names_[0][0],
                                "\", which ranks that take over each other's experts cannot mix; "
                                "leave enable_eplb out"));
    for (size_t s = 0; s < all.stacks.size(); ++s)
      all.stacks[s].insert(all.stacks[s].end(), rank->stacks_[s].pointers.begin(),
                           rank->stacks_[s].pointers.end());
    if (rank->bias_.data.data() == nullptr) continue;
    const auto* bias = reinterpret_cast<const float*>(rank->bias_.data.data());
    all.bias.insert(all.bias.end(), bias, bias + rank->num_experts_ * rank->out_features_);
  }
  return all;
}

std::vector<std::span<std::byte>> ExpertLinear::pieces(int64_t place) const {
  std::vector<std::span<std::byte>> pieces;
  for (const Stack& stack : stacks_) {
    const Buffer& data = stack.weights[static_cast<size_t>(place)].data;
    pieces.emplace_back(data.data(), static_cast<size_t>(data.num_bytes()));
  }
  if (bias_.data.data() == nullptr) return pieces;
  const int64_t num_bytes = out_features_ * static_cast<int64_t>(sizeof(float));
  pieces.emplace_back(bias_.data.data() + place * num_bytes, static_cast<size_t>(num_bytes));
  return pieces;
}

void ExpertLinear::forward(const ForwardContext& context, const ConstTensor& x,
                           const ConstTensor& ids, const Tensor& out, const Joined* all) const {
  if (context.observer) show(*context.observer, x, ids);
  int64_t begin = 0;
  for (size_t s = 0; s < stacks_.size(); ++s) {
    context.backend.grouped_linear(part(s, begin, x, ids, out, all));
    begin += stacks_[s].weights[0].out_features;
  }
}

std::optional<GroupedLinearArgs> ExpertLinear::as_one(const ForwardContext& context,
                                                      const ConstTensor& x, const ConstTensor& ids,
                                                      const Tensor& out) const {
  if (stacks_.size() != 1 || context.observer) return std::nullopt;
  return part(0, 0, x, ids, out, nullptr);
}

GroupedLinearArgs ExpertLinear::part(size_t idx, int64_t begin, const ConstTensor& x,
                                     const ConstTensor& ids, const Tensor& out,
                                     const Joined* all) const {
  const Stack& stack = stacks_[idx];
  const std::vector<const LinearWeight*>& weights = all ? all->stacks[idx] : stack.pointers;
  const int64_t n = stack.weights[0].out_features;
  ConstTensor bias;
  if (bias_.data.data()) {
    const void* const data = all ? static_cast<const void*>(all->bias.data()) : bias_.data.data();
    bias = ConstTensor(data, DType::kF32, {std::ssize(weights), out_features_}).slice(1, begin, n);
  }
  return {
      .x = x, .weights = weights, .weight_ids = ids, .bias = bias, .out = out.slice(1, begin, n)};
}

void ExpertLinear::show(LinearObserver& observer, const ConstTensor& x,
                        const ConstTensor& ids) const {
  const int64_t num_rows = ids.num_elements();
  const int64_t width = x.shape[1];
  std::vector<float> own;
  for (int64_t e = 0; e < num_experts_; ++e) {
    own.clear();
    for (int64_t r = 0; r < num_rows; ++r) {
      if (ids.as<int32_t>()[r] != e) continue;
      const float* row = x.as<float>() + r / (num_rows / x.shape[0]) * x.strides[0];
      own.insert(own.end(), row, row + width);
    }
    if (own.empty()) continue;
    observer.see(names_[static_cast<size_t>(e)],
                 ConstTensor(own.data(), DType::kF32, {std::ssize(own) / width, width}));
  }
}

}  // namespace llmserve
