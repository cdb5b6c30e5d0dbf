// Weights of integers: their packing, and their products.
#include <vector>

#include "kernels/cuda/argument_views.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/linear/quantized_packing.h"

namespace llmserve::cuda {
namespace {

int64_t quantized_bytes(const LinearFormat& format, int64_t out_features, int64_t in_features) {
  return ceil_div(out_features, kQuantizedTile) * quantized_layout(format, in_features).tile_bytes;
}

// What packing goes through on the host at a time: a few staging buffers' worth.
constexpr int64_t kPackedAtOnce = 4 * kStagingBytes;

}  // namespace

bool CudaBackend::can_run(const LinearFormat& format) const {
  constexpr int64_t kLongRow = 4096;  // K makes no difference
  return can_run_integers_ && has_quantized_kernel(quantized_layout(format, kLongRow));
}

int64_t CudaBackend::packed_bytes(int64_t out_features, int64_t in_features,
                                  const LinearFormat& format) const {
  return quantized_bytes(format, out_features, in_features);
}

LinearWeight CudaBackend::pack_quantized(const LinearFormat& format, int64_t out_features,
                                         int64_t in_features, const QuantizedRowReader& read) {
  const QuantizedLayout layout = quantized_layout(format, in_features);
  memory_.make_current();
  prepare_quantized_linear(layout);
  LinearWeight weight{.out_features = out_features,
                      .in_features = in_features,
                      .format = &format,
                      .data = Buffer(quantized_bytes(format, out_features, in_features), memory_)};
  const int64_t num_tiles = ceil_div(out_features, kQuantizedTile);
  if (weight.data.num_bytes() == 0) return weight;
  const int64_t tiles_at_once =
      std::clamp<int64_t>(kPackedAtOnce / layout.tile_bytes, 1, num_tiles);
  const Buffer packed(tiles_at_once * layout.tile_bytes);
  for (int64_t first = 0; first < num_tiles; first += tiles_at_once) {
    const int64_t count = std::min(tiles_at_once, num_tiles - first);
    host_->run_on_host_threads(count, 1, [&](int64_t begin, int64_t end) {
      TileRows rows(format, in_features);
      for (int64_t tile = begin; tile < end; ++tile) {
        for (int64_t i = 0; i < kQuantizedTile; ++i) {
          const int64_t row = (first + tile) * kQuantizedTile + i;
          if (row < out_features)
            read(row, rows.row(i));
          else
            rows.clear(i);
        }
        rows.pack(packed.data() + tile * layout.tile_bytes);
      }
    });
    transfers_.upload(weight.data.data() + first * layout.tile_bytes, packed.data(),
                      count * layout.tile_bytes);
  }
  transfers_.lead_ops();
  return weight;
}

// Working memory for rows of x beside a weight of this layout.
RoundedX CudaBackend::rounded_x(std::byte* memory, int64_t num_rows,
                                const QuantizedLayout& layout) {
  const int64_t stride =
      rounded_stride(int64_t{layout.num_units} * kQuantizedUnit, has_float_products(layout.coding));
  return {memory, stride, reinterpret_cast<RoundedGroup*>(memory + num_rows * stride)};
}

// [K] on the device, or null.
const int32_t* CudaBackend::input_order(const LinearWeight& weight) {
  if (!weight.input_order) return nullptr;
  const auto at = orders_.try_emplace(weight.input_order.get(), memory_, block_).first;
  return at->second(std::span<const int32_t>(*weight.input_order));
}

void CudaBackend::quantized_linear(const LinearArgs& args, const RoundParams* source) {
  const LinearWeight& weight = *args.weight;
  const int64_t num_rows = args.x.shape[0];
  check_grid("linear", num_rows);
  memory_.make_current();
  if (num_rows == 0 || weight.out_features == 0) return;
  const QuantizedLayout layout = quantized_layout(*weight.format, weight.in_features);
  const RoundedX x = rounded_x(scratch(rounded_bytes(num_rows, layout)), num_rows, layout);
  RoundParams rows = source ? *source : RoundParams{};
  if (!source) rows.x = rows_of(args.x);
  rows.num_rows = num_rows;
  rows.width = weight.in_features;
  rows.order = input_order(weight);
  rows.outlier_threshold = weight.format->outlier_threshold;
  rows.to = x;
  const QuantizedParams product{.x = x,
                                .weight = weight.data.data(),
                                .layout = layout,
                                .bias = args.bias.as<float>(),
                                .out = rows_of(args.out),
                                .num_rows = num_rows,
                                .rows_at_once = quantized_rows_at_once(num_rows),
                                .out_features = weight.out_features,
                                .in_features = weight.in_features,
                                .accumulate = args.accumulate};
  round_rows(rows, layout, stream());
  cuda::quantized_linear(product, stream());
  if (rows.outlier_threshold > 0) add_outliers(rows, product, stream());
}

namespace {

// Whether rows may be normed or gated while they are rounded for this weight.
bool rounds_on_the_way(const LinearWeight& weight) {
  return weight.format && !weight.input_order && weight.format->outlier_threshold == 0 &&
         weight.in_features > 0;
}

}  // namespace

// The norm, if there is one, is applied where rows are rounded.
void CudaBackend::fuse_in_rounding(const FusedLinearArgs& args) {
  if (args.norm && rounds_on_the_way(*args.linear.weight)) {
    const RoundParams source{.x = rows_of(args.norm->x),
                             .norm_weight = args.norm->weight.as<float>(),
                             .norm = args.norm->numbers,
                             .norm_threads = rms_threads(args.linear.weight->in_features)};
    quantized_linear(args.linear, &source);
  } else {
    if (args.norm) do_rms_norm(*args.norm);
    quantized_linear(args.linear);
  }
}

void CudaBackend::do_fused_mlp(const FusedMlpArgs& args) {
  if (!args.up.linear.weight->format || !rounds_on_the_way(*args.down.weight))
    return Backend::do_fused_mlp(args);
  fuse_in_rounding(args.up);
  const RoundParams source{.x = rows_of(args.up.gate->gate_up),
                           .is_gated = true,
                           .activation = args.up.gate->activation};
  quantized_linear(args.down, &source);
}

}  // namespace llmserve::cuda
