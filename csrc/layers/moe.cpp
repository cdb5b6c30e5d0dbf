#include "layers/moe.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "kernels/device_steps.h"

namespace llmserve {
namespace {

// The gate and what it is multiplied with, of tensors of these names.
std::vector<WeightPart> gate_up_parts(const ExpertSpec& spec, const std::string& both,
                                      const std::string& gate, const std::string& up) {
  const int64_t width = spec.intermediate_size;
  if (both.empty()) return {{gate, width}, {up, width}};
  const WeightPart first{
      .name = both, .size = width, .of = 2 * width, .step = spec.is_interleaved ? 2 : 1};
  WeightPart second = first;
  second.begin = spec.is_interleaved ? 1 : width;
  return {first, second};
}

std::string below(const std::string& prefix, const std::string& name) {
  return name.empty() ? name : prefix + name;
}

// Experts are whole on ranks, or each is cut.
std::optional<ExpertDispatch> make_dispatch(const WeightLoader& weights, const ExpertSpec& spec) {
  const TensorRank& rank = weights.rank();
  if (rank.size == 1 || !rank.has_whole_experts) return std::nullopt;
  return ExpertDispatch(rank, spec.num_experts);
}

// A rank's share of the layer.
ExpertLinearSpec shared_out(ExpertLinearSpec linear, const std::optional<ExpertDispatch>& dispatch,
                            const Shard& shard) {
  if (dispatch)
    linear.experts = dispatch->own();
  else
    linear.shard = shard;
  return linear;
}

// Segments of a tree would each need the rows of all experts of a token: there the layer is cut by
// columns, which changes no bit either.
TensorRank rank_of(const WeightLoader& weights) {
  TensorRank rank = weights.rank();
  if (rank.cut == LinearCut::kTree) rank.cut = LinearCut::kColumns;
  return rank;
}

InputCut activation_cut(WeightLoader& weights, const ExpertLinearSpec& down) {
  const TensorRank rank = rank_of(weights);
  const bool is_asked = rank.cut == LinearCut::kRows;
  return activation_input(rank, down.in_features,
                          is_asked ? ExpertLinear::input_unit(weights, down) : 0,
                          "activations of an expert");
}

// Of partial sums over ranks, none: columns of the output are gathered.
std::optional<SegmentSum> make_sum(WeightLoader& weights, const ExpertLinearSpec& down,
                                   const InputCut& activations, bool are_whole,
                                   int64_t hidden_size) {
  const TensorRank rank = rank_of(weights);
  if (rank.size == 1 || rank.cut != LinearCut::kRows) return std::nullopt;
  const ProductShare share =
      share_products(rank, activations, are_whole ? 1 : ExpertLinear::input_unit(weights, down));
  if (!share.shares_products) return std::nullopt;
  return SegmentSum(rank, share, hidden_size, is_on_host(weights.backend()));
}

Shard input_shard(const ColumnCut& cut) {
  return {.axis = ShardAxis::kInput, .range = {cut.begin(), cut.size()}};
}

ExpertLinearSpec gate_up_spec(const ExpertSpec& spec, const std::string& prefix,
                              int64_t hidden_size) {
  const ExpertNames& names = spec.names;
  ExpertLinearSpec linear{
      .parts = gate_up_parts(spec, below(prefix, names.gate_up), below(prefix, names.gate),
                             below(prefix, names.up)),
      .num_experts = spec.num_experts,
      .in_features = hidden_size,
      .rows_per_token = spec.top_k,
      .is_transposed = spec.is_transposed};
  if (!names.gate_up_bias.empty() || !names.gate_bias.empty())
    linear.biases = gate_up_parts(spec, below(prefix, names.gate_up_bias),
                                  below(prefix, names.gate_bias), below(prefix, names.up_bias));
  return linear;
}

ExpertLinearSpec down_spec(const ExpertSpec& spec, const std::string& prefix, int64_t hidden_size) {
  ExpertLinearSpec linear{.parts = {{prefix + spec.names.down, hidden_size}},
                          .num_experts = spec.num_experts,
                          .in_features = spec.intermediate_size,
                          .rows_per_token = spec.top_k,
                          .is_transposed = spec.is_transposed};
  if (!spec.names.down_bias.empty()) linear.biases = {{prefix + spec.names.down_bias, hidden_size}};
  return linear;
}

std::optional<GatedMlp> shared_mlp(WeightLoader& weights, const std::string& prefix,
                                   const ExpertSpec& spec, MlpSpec mlp) {
  if (spec.shared_size == 0) return std::nullopt;
  TensorNames names;
  names.gate_up = spec.names.shared_gate_up;
  names.gate = spec.names.shared_gate;
  names.up = spec.names.shared_up;
  names.down = spec.names.shared_down;
  mlp.intermediate_size = spec.shared_size;
  return std::optional<GatedMlp>(std::in_place, weights, names, prefix, mlp);
}

VectorWeight router_bias(WeightLoader& weights, const std::string& prefix, const ExpertSpec& spec) {
  if (!spec.has_router_bias) return {};
  return weights.vector(WeightGroup::kMlp, prefix + spec.names.router + ".bias", spec.num_experts);
}

VectorWeight choice_bias(WeightLoader& weights, const std::string& prefix, const ExpertSpec& spec) {
  if (spec.names.choice_bias.empty()) return {};
  WeightPart part{.name = prefix + spec.names.choice_bias, .size = spec.num_experts};
  if (spec.is_choice_bias_row) part = {.name = part.name, .size = 1, .width = spec.num_experts};
  return weights.vector(WeightGroup::kMlp, {part});
}

LinearWeight shared_weight(WeightLoader& weights, const std::string& prefix, const ExpertSpec& spec,
                           int64_t hidden_size) {
  if (spec.shared_size == 0 || spec.names.shared_weight.empty()) return {};
  return weights.float_linear(WeightGroup::kMlp, prefix + spec.names.shared_weight + ".weight", 1,
                              hidden_size, spec.is_shared_weight_vector);
}

// [T * k] of [T, k].
Tensor flat(const Tensor& ids) { return {ids.data, ids.dtype, {ids.num_elements()}}; }

constexpr int64_t kMaxRanks = 64;  // as the engine's options have it

}  // namespace

Experts::Experts(WeightLoader& weights, const std::string& prefix, int64_t layer_idx,
                 const ExpertSpec& spec, const MlpSpec& mlp)
    : layer_idx_(layer_idx),
      spec_(spec),
      hidden_size_(mlp.hidden_size),
      activation_(mlp.activation),
      is_on_host_(is_on_host(weights.backend())),
      max_rows_(weights.backend().mlp_rows()),
      router_(weights.float_linear(WeightGroup::kMlp, prefix + spec.names.router + ".weight",
                                   spec.num_experts, mlp.hidden_size)),
      router_bias_(router_bias(weights, prefix, spec)),
      choice_bias_(choice_bias(weights, prefix, spec)),
      dispatch_(make_dispatch(weights, spec)),
      activation_cut_(activation_cut(weights, down_spec(spec, prefix, mlp.hidden_size))),
      sum_(make_sum(weights, down_spec(spec, prefix, mlp.hidden_size), activation_cut_,
                    dispatch_.has_value(), mlp.hidden_size)),
      output_cut_(sum_ ? TensorRank() : weights.rank(), mlp.hidden_size,
                  "elements of a hidden state"),
      gate_up_(weights, shared_out(gate_up_spec(spec, prefix, mlp.hidden_size), dispatch_,
                                   activation_cut_.given.shard())),
      down_(weights, shared_out(down_spec(spec, prefix, mlp.hidden_size), dispatch_,
                                sum_ ? input_shard(activation_cut_.given) : output_cut_.shard())),
      shared_(shared_mlp(weights, prefix, spec, mlp)),
      shared_weight_(shared_weight(weights, prefix, spec, mlp.hidden_size)) {
  weights.note_experts(spec.num_experts, spec.top_k);
}

void Experts::forward(const ForwardContext& context, const LinearInput& x, const Tensor& out,
                      bool accumulate) const {
  if (x.norm) context.backend.rms_norm(*x.norm);
  for (int64_t begin = 0; begin < x.num_rows(); begin += max_rows_) {
    const int64_t count = std::min(max_rows_, x.num_rows() - begin);
    forward_rows(context, x.x.slice(0, begin, count), out.slice(0, begin, count), accumulate);
  }
}

// What reads x comes before what writes out, which may be x.
void Experts::forward_rows(const ForwardContext& context, const ConstTensor& x, const Tensor& out,
                           bool accumulate) const {
  const Arena::Scope scope(context.arena);
  const int64_t rows = x.shape[0];
  const Routes routes{context.arena.allocate(DType::kI32, {rows, spec_.top_k}),
                      context.arena.allocate(DType::kF32, {rows, spec_.top_k})};
  Tensor scaled;
  if (spec_.scales_input) scaled = context.arena.allocate(DType::kF32, {rows, hidden_size_});
  route(context, x, routes, scaled);
  const ConstTensor read = scaled ? ConstTensor(scaled) : x;
  if (!shared_) return run_experts(context, read, routes, {}, out, accumulate);
  // Where ranks add up what experts give, they add up this one's with it.
  const bool is_part = sum_ && sum_->is_in_rank_order() && shared_->has_parts();
  SharedRows shared{.rows = context.arena.allocate(DType::kF32, {rows, hidden_size_})};
  if (is_part)
    shared_->forward_part(context, {x}, shared.rows);
  else
    shared_->forward(context, {x}, shared.rows, /*accumulate=*/false);
  if (shared_weight_.out_features == 1) {
    shared.weight = context.arena.allocate(DType::kF32, {rows, 1});
    weigh_shared(context, x, shared.weight);
  }
  run_experts(context, read, routes, is_part ? shared : SharedRows(), out, accumulate);
  if (!is_part) add_shared(context, shared, out);
}

void Experts::add_shared(const ForwardContext& context, const SharedRows& shared,
                         const Tensor& out) {
  if (shared.weight)
    context.backend.combine_experts(
        {.x = shared.rows, .weights = shared.weight, .out = out, .accumulate = true});
  else
    context.backend.add({.out = out, .x = shared.rows});
}

void Experts::route(const ForwardContext& context, const ConstTensor& x, const Routes& routes,
                    const Tensor& scaled) const {
  const Arena::Scope scope(context.arena);
  const Tensor logits = context.arena.allocate(DType::kF32, {x.shape[0], spec_.num_experts});
  context.backend.linear({.x = x, .weight = &router_, .bias = router_bias_.view(), .out = logits});
  RouteExpertsArgs args{.logits = logits,
                        .choice_bias = choice_bias_.view(),
                        .numbers = spec_.router,
                        .ids = routes.ids,
                        .weights = routes.weights};
  context.backend.route_experts(args);
  if (context.routes) context.routes->see(layer_idx_, routes.ids);
  if (!scaled) return;
  context.backend.combine_experts({.x = x, .weights = routes.weights, .out = scaled});
  args.numbers = {.score = RouterScore::kSoftmaxOfChosen};  // of one, which is 1
  context.backend.route_experts(args);
}

// A router of one expert, whose weight is its sigmoid.
void Experts::weigh_shared(const ForwardContext& context, const ConstTensor& x,
                           const Tensor& weight) const {
  const Arena::Scope scope(context.arena);
  const Tensor logits = context.arena.allocate(DType::kF32, {x.shape[0], 1});
  const Tensor ids = context.arena.allocate(DType::kI32, {x.shape[0], 1});
  context.backend.linear({.x = x, .weight = &shared_weight_, .out = logits});
  context.backend.route_experts({.logits = logits,
                                 .numbers = {.score = RouterScore::kSigmoid},
                                 .ids = ids,
                                 .weights = weight});
}

void Experts::run_experts(const ForwardContext& context, const ConstTensor& x, const Routes& routes,
                          const SharedRows& part, const Tensor& out, bool accumulate) const {
  if (dispatch_ && sum_) return sum_whole_experts(context, x, routes, part, out, accumulate);
  if (dispatch_)
    return is_on_host_ ? run_whole_experts(context, x, routes, out, accumulate)
                       : share_whole_experts(context, x, routes, out, accumulate);
  const Arena::Scope scope(context.arena);
  const Tensor sums = sum_ ? sum_->allocate(context, x.shape[0]) : Tensor();
  const int64_t rows = x.shape[0] * spec_.top_k;
  const ConstTensor ids = flat(routes.ids);
  const Tensor gate_up = context.arena.allocate(DType::kF32, {rows, gate_up_.out_features()});
  const Tensor activated = context.arena.allocate(DType::kF32, {rows, activation_width()});
  const Tensor given = context.arena.allocate(DType::kF32, {rows, down_.out_features()});
  const GatedActivationArgs gate{.gate_up = gate_up,
                                 .out = sum_ ? activated : activation_cut_.given.own(activated),
                                 .activation = activation_};
  const CombineExpertsArgs combine{.x = given,
                                   .weights = routes.weights,
                                   .out = sum_ ? sum_->own_sum(sums) : output_cut_.own(out),
                                   .accumulate = !sum_ && accumulate};
  const auto up = gate_up_.as_one(context, x, ids, gate_up);
  const auto down = down_.as_one(context, activated, ids, given);
  if (up && down && !output_cut_.is_cut()) {
    context.backend.fused_experts({.up = *up, .gate = gate, .down = *down, .combine = combine});
  } else {
    gate_up_.forward(context, x, ids, gate_up);
    context.backend.gated_activation(gate);
    if (!sum_) activation_cut_.given.gather(context, activated);
    down_.forward(context, activated, ids, given);
    context.backend.combine_experts(combine);
  }
  if (sum_)
    add_sum(context, part, sums, out, accumulate);
  else
    output_cut_.gather(context, out);
}

int64_t Experts::activation_width() const {
  return sum_ && !dispatch_ ? activation_cut_.given.size() : spec_.intermediate_size;
}

void Experts::add_sum(const ForwardContext& context, const SharedRows& part, const Tensor& sums,
                      const Tensor& out, bool accumulate) const {
  if (part.rows) add_shared(context, part, sum_->own_sum(sums));
  const Tensor sum = sum_->finish(context, sums);
  if (accumulate)
    context.backend.add({.out = out, .x = sum});
  else
    copy_rows(context, sum, out);
}

void Experts::sum_whole_experts(const ForwardContext& context, const ConstTensor& x,
                                const Routes& routes, const SharedRows& part, const Tensor& out,
                                bool accumulate) const {
  check_internal(!dynamic_cast<RankRoutes*>(context.routes),
                 "where experts run decides no sum over ranks");
  const Arena::Scope scope(context.arena);
  const int64_t rows = x.shape[0] * spec_.top_k;
  const auto floats = [&](int64_t width) {
    return context.arena.allocate(DType::kF32, {rows, width});
  };
  const Tensor sums = sum_->allocate(context, x.shape[0]);
  const Tensor experts = claim_rows(context, routes, {});
  const Tensor gate_up = floats(gate_up_.out_features());
  const Tensor activated = floats(spec_.intermediate_size);
  const Tensor given = floats(hidden_size_);  // of this rank's rows
  gate_up_.forward(context, x, experts, gate_up);
  context.backend.gated_activation(
      {.gate_up = gate_up, .out = activated, .activation = activation_});
  down_.forward(context, activated, experts, given);
  context.backend.combine_experts(
      {.x = given, .weights = routes.weights, .out = sum_->own_sum(sums)});
  add_sum(context, part, sums, out, accumulate);
}

void Experts::run_whole_experts(const ForwardContext& context, const ConstTensor& x,
                                const Routes& routes, const Tensor& out, bool accumulate) const {
  const Arena::Scope scope(context.arena);
  const int64_t rows = x.shape[0] * spec_.top_k;
  const auto floats = [&](int64_t width) {
    return context.arena.allocate(DType::kF32, {rows, width});
  };
  // Who sees the routes may have them run elsewhere.
  auto* const balanced = dynamic_cast<RankRoutes*>(context.routes);
  const ExpertBalancer::Layer* const ranks = balanced ? &balanced->layer(layer_idx_) : nullptr;
  const ExpertDispatch::Rows mine = dispatch_->dispatch(
      context, routes.ids,
      balanced ? balanced->assign(layer_idx_, routes.ids) : std::span<const int32_t>());
  const Tensor gate_up = floats(gate_up_.out_features());
  const Tensor activated = floats(spec_.intermediate_size);
  const Tensor given = floats(hidden_size_);  // of this rank's rows
  gate_up_.forward(context, x, mine.experts, gate_up, ranks ? &ranks->gate_up : nullptr);
  context.backend.gated_activation(
      {.gate_up = gate_up, .out = activated, .activation = activation_});
  down_.forward(context, activated, mine.experts, given, ranks ? &ranks->down : nullptr);

  const Tensor in_line = floats(hidden_size_).slice(0, 0, std::ssize(mine.own));
  const Tensor all = floats(hidden_size_);
  context.backend.gather_rows({.x = given, .rows = mine.own, .out = in_line});
  for (int64_t& count : mine.counts) count *= hidden_size_;
  context.groups.tp.all_gather(in_line, all, mine.counts);
  const Tensor ordered = floats(output_cut_.size());
  context.backend.gather_rows({.x = output_cut_.own(all), .rows = mine.places, .out = ordered});
  context.backend.combine_experts({.x = ordered,
                                   .weights = routes.weights,
                                   .out = output_cut_.own(out),
                                   .accumulate = accumulate});
  output_cut_.gather(context, out);
}

// What the experts of rows are here, -1 of another rank's. Their rows of `given` become 0, or,
// without that, their weights, which is a slot that nobody reads.
Tensor Experts::claim_rows(const ForwardContext& context, const Routes& routes,
                           const Tensor& given) const {
  if (is_on_host_) {
    const ExpertDispatch::Rows mine = dispatch_->dispatch(context, routes.ids);
    for (int64_t r = 0; r < mine.experts.num_elements(); ++r)
      if (mine.experts.as<int32_t>()[r] < 0) routes.weights.as<float>()[r] = 0;
    return mine.experts;
  }
  const Tensor experts = context.arena.allocate(DType::kI32, {routes.ids.num_elements()});
  OwnExperts own{.ids = flat(routes.ids),
                 .begin = static_cast<int32_t>(dispatch_->own().begin),
                 .count = static_cast<int32_t>(dispatch_->own().size),
                 .rows_per_token = spec_.top_k,
                 .local = experts,
                 .rows = given,
                 .weights = given ? Tensor() : flat(routes.weights)};
  if (const auto* const balanced = dynamic_cast<const RankRoutes*>(context.routes))
    own.homes = balanced->homes(layer_idx_);
  context.backend.steps()->own_experts(own);
  return experts;
}

// Which rows are whose is known on the device alone, so that no rank can bring its own and no more.
// Each brings zeros in the place of the others' rows, and all are added up as integers: a sum of
// one row's bits and zeros, which the order does not matter to. Ranks share the tokens then, unless
// these are fewer.
void Experts::share_whole_experts(const ForwardContext& context, const ConstTensor& x,
                                  const Routes& routes, const Tensor& out, bool accumulate) const {
  const Arena::Scope scope(context.arena);
  const int64_t rows = x.shape[0] * spec_.top_k;
  const auto floats = [&](int64_t width) {
    return context.arena.allocate(DType::kF32, {rows, width});
  };
  const Tensor given = floats(hidden_size_);
  const Tensor experts = claim_rows(context, routes, given);
  const Tensor gate_up = floats(gate_up_.out_features());
  const Tensor activated = floats(spec_.intermediate_size);
  gate_up_.forward(context, x, experts, gate_up);
  context.backend.gated_activation(
      {.gate_up = gate_up, .out = activated, .activation = activation_});
  down_.forward(context, activated, experts, given);

  Communicator& ranks = context.groups.tp;
  const Tensor bits(given.data, DType::kI32, {rows * hidden_size_});
  const auto combine = [&](const IndexRange& tokens) {
    const int64_t k = spec_.top_k;
    context.backend.combine_experts({.x = given.slice(0, tokens.begin * k, tokens.size * k),
                                     .weights = routes.weights.slice(0, tokens.begin, tokens.size),
                                     .out = out.slice(0, tokens.begin, tokens.size),
                                     .accumulate = accumulate});
  };
  const int64_t num_tokens = x.shape[0];
  if (num_tokens < ranks.world_size()) {
    ranks.all_reduce(bits, Reduction::kSum);
    return combine({0, num_tokens});
  }
  std::array<int64_t, kMaxRanks> counts{};
  const auto part = std::span(counts).first(static_cast<size_t>(ranks.world_size()));
  const auto share = [&](int rank) {
    return Shard{.rank = rank, .size = ranks.world_size()}.of(num_tokens);
  };
  const IndexRange own = share(ranks.rank());
  const int64_t width = spec_.top_k * hidden_size_;
  for (size_t r = 0; r < part.size(); ++r) part[r] = share(static_cast<int>(r)).size * width;
  ranks.reduce_scatter(bits, bits.slice(0, own.begin * width, own.size * width), Reduction::kSum,
                       part);
  combine(own);
  for (int64_t& count : part) count /= spec_.top_k;
  ranks.all_gather(out.slice(0, own.begin, own.size), out, part);
}

int64_t Experts::during_experts_bytes(int64_t num_tokens) const {
  const int64_t num_rows = num_tokens * spec_.top_k;
  const auto floats = [&](int64_t width) {
    return Arena::footprint_bytes(DType::kF32, {num_rows, width});
  };
  const int64_t activations = floats(gate_up_.out_features()) + floats(activation_width()) +
                              (sum_ ? sum_->workspace_bytes(num_tokens) : 0);
  if (!dispatch_) return activations + floats(down_.out_features());
  if (!is_on_host_)
    return activations + Arena::footprint_bytes(DType::kI32, {num_rows}) +
           floats(down_.out_features());
  if (sum_)
    return activations + dispatch_->workspace_bytes(num_rows) + floats(down_.out_features());
  return activations + dispatch_->workspace_bytes(num_rows) + 3 * floats(hidden_size_) +
         floats(output_cut_.size());
}

int64_t Experts::workspace_bytes(int64_t num_tokens) const {
  const int64_t rows = std::min(max_rows_, num_tokens);
  const auto floats = [](int64_t count, int64_t width) {
    return Arena::footprint_bytes(DType::kF32, {count, width});
  };
  const int64_t routes =
      Arena::footprint_bytes(DType::kI32, {rows, spec_.top_k}) + floats(rows, spec_.top_k);
  const int64_t scaled = spec_.scales_input ? floats(rows, hidden_size_) : 0;
  const int64_t shared = shared_ ? floats(rows, hidden_size_) : 0;
  const int64_t during_shared = shared_ ? shared_->workspace_bytes(rows) : 0;
  const bool is_weighed = shared_weight_.out_features == 1;
  const int64_t weight = is_weighed ? floats(rows, 1) : 0;
  const int64_t during_weight =
      is_weighed ? floats(rows, 1) + Arena::footprint_bytes(DType::kI32, {rows, 1}) : 0;
  const int64_t during_experts = during_experts_bytes(rows);
  return routes + scaled +
         std::max({floats(rows, spec_.num_experts), shared + during_shared,
                   shared + weight + std::max(during_weight, during_experts)});
}

}  // namespace llmserve
