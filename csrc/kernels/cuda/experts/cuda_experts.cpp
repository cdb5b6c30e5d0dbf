// Products of rows with weights of their own, and what mixtures of experts need beside them. Which
// rows are whose is known on the device alone: the host reads nothing back, and a captured step may
// run for other rows.
#include "core/error.h"
#include "kernels/cuda/argument_views.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/linear/quantized_packing.h"

namespace llmserve::cuda {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t aligned(int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

// Pieces of working memory, one after another.
class Pieces {
 public:
  explicit Pieces(std::byte* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    auto* piece = reinterpret_cast<T*>(memory_ + num_bytes_);
    num_bytes_ += aligned(count * static_cast<int64_t>(sizeof(T)));
    return piece;
  }

 private:
  std::byte* memory_;
  int64_t num_bytes_ = 0;
};

// Of RowGroups, and the counts that they are made with.
int64_t group_bytes(int64_t rows, int64_t weights) {
  const int64_t most_tasks = max_row_tasks(rows, weights, 1);
  return aligned(rows * 4) + aligned(most_tasks * static_cast<int64_t>(sizeof(RowTask))) +
         aligned(weights * 4) + aligned(4);
}

}  // namespace

int64_t CudaBackend::grouped_scratch_bytes(const GroupedShape& shape) {
  const int64_t rows = shape.max_tokens * shape.rows_per_token;
  if (rows == 0) return 0;
  const int64_t row_bytes =
      std::max(rounded_stride(shape.in_features, true), shape.activation_bytes + kQuantizedUnit);
  return group_bytes(rows, shape.num_weights) + aligned(rows * row_bytes);
}

// [X] on the device: the same place each time, as recorded steps need it.
const void* const* CudaBackend::grouped_weights(std::span<const LinearWeight* const> weights) {
  weight_places_.clear();
  for (const LinearWeight* weight : weights)
    weight_places_.push_back(reinterpret_cast<int64_t>(weight->data.data()));
  const auto at = grouped_weights_.try_emplace(weights[0], memory_, block_).first;
  const int64_t* places = at->second(std::span<const int64_t>(weight_places_));
  return reinterpret_cast<const void* const*>(places);
}

RowGroups CudaBackend::group(const GroupedLinearArgs& args, int64_t rows_at_once,
                             std::byte* memory) {
  const int64_t rows = args.out.shape[0];
  const int64_t num_weights = std::ssize(args.weights);
  Pieces pieces(memory);
  auto* counts = pieces.take<int32_t>(num_weights);
  RowGroups groups{.weights = grouped_weights(args.weights),
                   .order = pieces.take<int32_t>(rows),
                   .tasks = pieces.take<RowTask>(max_row_tasks(rows, num_weights, 1)),
                   .num_tasks = pieces.take<int32_t>(1),
                   .rows_each = static_cast<int32_t>(rows / args.x.shape[0]),
                   .max_tasks = max_row_tasks(rows, num_weights, rows_at_once)};
  if (groups.max_tasks > kMaxGridYZ)
    throw InvalidArgument(concat("grouped_linear: expected at most ", kMaxGridYZ * rows_at_once,
                                 " rows a call, got ", rows));
  group_rows(args.weight_ids.as<int32_t>(), rows, num_weights, rows_at_once, counts, groups,
             stream());
  return groups;
}

void CudaBackend::do_grouped_linear(const GroupedLinearArgs& args) {
  const LinearWeight& like = *args.weights[0];
  const int64_t rows = args.out.shape[0];
  memory_.make_current();
  if (rows == 0 || like.out_features == 0) return;
  if (like.format) return grouped_quantized_linear(args);
  LinearParams params{.x = rows_of(args.x),
                      .weight = nullptr,
                      .storage = storage_of(like.dtype),
                      .bias = args.bias.as<float>(),
                      .out = rows_of(args.out),
                      .num_rows = rows,
                      .out_features = like.out_features,
                      .in_features = like.in_features,
                      .accumulate = false};
  const int64_t num_weights = std::ssize(args.weights);
  std::byte* memory =
      scratch(group_bytes(rows, num_weights) + aligned(args.x.shape[0] * like.in_features * 2));
  // Weights lie where allocations begin, which are aligned.
  if (!has_mma_ || params.storage != Storage::kBF16 || like.in_features == 0 ||
      like.in_features % 8 != 0)
    return grouped_plain_linear(params, group(args, kSmallTile.rows, memory), stream());
  const int64_t each = ceil_div(rows, std::min(rows, num_weights));
  const int64_t at_once = each <= kSmallMma.rows ? kSmallMma.rows : kMediumMma.rows;
  const RowGroups groups = group(args, at_once, memory);
  auto* rounded = reinterpret_cast<uint16_t*>(memory + group_bytes(rows, num_weights));
  round_to_bf16(params.x, args.x.shape[0], like.in_features, rounded, stream());
  grouped_mma_linear(rounded, params, at_once, groups, stream());
}

void CudaBackend::grouped_quantized_linear(const GroupedLinearArgs& args) {
  const LinearWeight& like = *args.weights[0];
  if (like.input_order || like.format->outlier_threshold > 0)
    throw NotSupported(
        "cuda grouped_linear: weights whose columns are in another order, or with "
        "outliers, are not supported; use device='cpu'");
  const int64_t rows = args.out.shape[0];
  const int64_t num_weights = std::ssize(args.weights);
  const int64_t num_tokens = args.x.shape[0];
  const QuantizedLayout layout = quantized_layout(*like.format, like.in_features);
  const int64_t at_once = grouped_rows_at_once(rows, num_weights);
  std::byte* memory = scratch(group_bytes(rows, num_weights) + rounded_bytes(num_tokens, layout));
  const RowGroups groups = group(args, at_once, memory);
  const RoundedX x = rounded_x(memory + group_bytes(rows, num_weights), num_tokens, layout);
  round_rows({.x = rows_of(args.x),
              .num_rows = num_tokens,
              .width = like.in_features,
              .order = nullptr,
              .outlier_threshold = 0,
              .to = x},
             layout, stream());
  cuda::quantized_linear({.x = x,
                          .layout = layout,
                          .bias = args.bias.as<float>(),
                          .out = rows_of(args.out),
                          .num_rows = rows,
                          .rows_at_once = at_once,
                          .out_features = like.out_features,
                          .in_features = like.in_features,
                          .groups = groups},
                         stream());
}

void CudaBackend::do_route_experts(const RouteExpertsArgs& args) {
  const int64_t num_experts = args.logits.shape[1];
  if (!router_fits(num_experts))
    throw NotSupported(concat("cuda route_experts: ", num_experts,
                              " experts do not fit a block's shared memory; use device='cpu'"));
  check_grid("route_experts", args.logits.shape[0]);
  memory_.make_current();
  cuda::route_experts({.logits = rows_of(args.logits),
                       .choice_bias = args.choice_bias.as<float>(),
                       .expert_scales = args.expert_scales.as<float>(),
                       .numbers = args.numbers,
                       .num_tokens = args.logits.shape[0],
                       .num_experts = num_experts,
                       .top_k = args.ids.shape[1],
                       .ids = args.ids.as<int32_t>(),
                       .weights = args.weights.as<float>()},
                      stream());
}

void CudaBackend::do_combine_experts(const CombineExpertsArgs& args) {
  check_grid("combine_experts", args.out.shape[0]);
  memory_.make_current();
  cuda::combine_experts({.x = rows_of(args.x),
                         .weights = args.weights.as<float>(),
                         .out = rows_of(args.out),
                         .num_tokens = args.out.shape[0],
                         .top_k = args.weights.shape[1],
                         .width = args.out.shape[1],
                         .accumulate = args.accumulate},
                        stream());
}

}  // namespace llmserve::cuda
