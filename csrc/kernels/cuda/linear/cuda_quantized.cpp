// Weights of integers: their packing, and their products.
#include <vector>

#include "core/error.h"
#include "kernels/cuda/argument_views.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/linear/quantized_packing.h"
#include "quant/fp8_activations.h"

namespace llmserve::cuda {
namespace {

int64_t quantized_bytes(const LinearFormat& format, int64_t out_features, int64_t in_features) {
  return ceil_div(out_features, kQuantizedTile) * quantized_layout(format, in_features).tile_bytes;
}

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
  if (fp8_rows_ > 0 && rounds_to_fp8(format))  // here, and not while a step is recorded
    for (const Fp8Scales scales : {Fp8Scales::kNone, Fp8Scales::kRows, Fp8Scales::kBlocks})
      cublaslt_->can_scale(scales);
  LinearWeight weight{.out_features = out_features,
                      .in_features = in_features,
                      .format = &format,
                      .data = Buffer(quantized_bytes(format, out_features, in_features), memory_)};
  const int64_t num_tiles = ceil_div(out_features, kQuantizedTile);
  if (weight.data.num_bytes() == 0) return weight;
  // Of a plain layout codes and scales go to places of their own.
  const int64_t codes_bytes = int64_t{layout.num_units} * kQuantizedUnit * kQuantizedTile;
  const int64_t each = layout.is_plain ? codes_bytes : layout.tile_bytes;
  const int64_t tiles_at_once = std::clamp<int64_t>(kStagingBytes / each, 1, num_tiles);
  std::vector<float> scales(
      layout.is_plain ? static_cast<size_t>(num_tiles * kQuantizedTile * layout.num_groups) : 0);
  const auto fill = [&](std::byte* piece, int64_t begin, int64_t num_bytes) {
    TileRows rows(format, in_features);
    for (int64_t tile = begin / each; tile < (begin + num_bytes) / each; ++tile, piece += each) {
      for (int64_t i = 0; i < kQuantizedTile; ++i) {
        const int64_t row = tile * kQuantizedTile + i;
        if (row < out_features)
          read(row, rows.row(i));
        else
          rows.clear(i);
      }
      if (layout.is_plain)
        rows.pack_plain(piece, scales.data() + tile * kQuantizedTile, num_tiles * kQuantizedTile);
      else
        rows.pack(piece);
    }
  };
  transfers_.upload(weight.data.data(), num_tiles * each, tiles_at_once * each, fill);
  if (layout.is_plain)
    transfers_.upload(weight.data.data() + num_tiles * codes_bytes, scales.data(),
                      std::ssize(scales) * static_cast<int64_t>(sizeof(float)));
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
  RoundParams rows = source ? *source : RoundParams{};
  if (!source) rows.x = rows_of(args.x);
  rows.num_rows = num_rows;
  rows.width = weight.in_features;
  rows.order = input_order(weight);
  rows.outlier_threshold = weight.format->outlier_threshold;
  if (multiply_fp8(args, rows, layout)) return;
  const RoundedX x = rounded_x(scratch(rounded_bytes(num_rows, layout)), num_rows, layout);
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

// Activations in E4M3 by the checkpoint's scheme, each row, or 128 of one, by a scale of its own.
bool CudaBackend::multiply_fp8(const LinearArgs& args, const RoundParams& rows,
                               const QuantizedLayout& layout) {
  const LinearWeight& weight = *args.weight;
  const int64_t m = rows.num_rows;
  const int64_t n = weight.out_features;
  if (fp8_rows_ == 0 || m < fp8_rows_ || !rounds_to_fp8(*weight.format) || !layout.is_plain ||
      weight.in_features == 0)
    return false;
  const bool is_blocked = layout.num_groups > 1;
  if (is_blocked && n % kQuantizedTile != 0) return false;  // the library has N scales a block
  const Fp8Scales kind = is_blocked                               ? Fp8Scales::kBlocks
                         : cublaslt_->can_scale(Fp8Scales::kRows) ? Fp8Scales::kRows
                                                                  : Fp8Scales::kNone;
  if (!cublaslt_->can_scale(kind)) return false;
  const int64_t k = int64_t{layout.num_units} * kQuantizedUnit;
  const int64_t raw_begin = m * k + ceil_div(m * layout.num_groups, 4) * 16;
  // What is not scaled and has to be added is made beside x, so many rows at a time as fit there.
  const bool is_apart = kind == Fp8Scales::kNone && args.accumulate;
  const int64_t row_bytes = n * static_cast<int64_t>(sizeof(float));
  std::byte* memory = scratch(raw_begin + (is_apart ? std::min(m, kFp8MinRows) * row_bytes : 0));
  const int64_t at_once =
      is_apart ? std::min(m, (scratch_.num_bytes() - raw_begin) / row_bytes) : m;
  RoundParams to = rows;
  to.to_fp8 = {.rows = memory,
               .stride = k,
               .scales = reinterpret_cast<float*>(memory + m * k),
               .num_rows = m};
  round_rows(to, layout, stream());
  Fp8Product product{.x = memory,
                     .x_scales = to.to_fp8.scales,
                     .weight = weight.data.data(),
                     .weight_scales = reinterpret_cast<const float*>(weight.data.data() +
                                                                     plain_codes_bytes(layout, n)),
                     .out = rows_of(args.out),
                     .out_features = n,
                     .in_features = k,
                     .accumulate = args.accumulate && !is_apart};
  for (int64_t first = 0; first < m; first += at_once) {
    product.num_rows = std::min(at_once, m - first);
    Fp8FinishParams finish{.bias = args.bias.as<float>(),
                           .out = product.out,
                           .num_rows = product.num_rows,
                           .out_features = n,
                           .accumulate = is_apart};
    if (is_apart) product.out = {reinterpret_cast<float*>(memory + raw_begin), n};
    if (!cublaslt_->multiply(product, kind)) {
      if (first == 0) return false;
      throw DeviceError(concat("cuBLASLt multiplies E4M3 for ", at_once, " rows and not for ",
                               product.num_rows, "; use LLMSERVE_CUDA_FP8=plain"));
    }
    finish.raw = {product.out.data, product.out.stride};
    if (kind == Fp8Scales::kNone) {
      finish.x_scales = product.x_scales;
      finish.weight_scales = product.weight_scales;
    }
    if (finish.x_scales || finish.bias) finish_fp8(finish, stream());
    product.x += product.num_rows * k;
    product.x_scales += product.num_rows;  // of rows: else there is one round
    product.out = {finish.out.data + product.num_rows * finish.out.stride, finish.out.stride};
  }
  return true;
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
  if (fuse_in_wgmma(args)) return;
  if (!args.up.linear.weight->format || !rounds_on_the_way(*args.down.weight))
    return Backend::do_fused_mlp(args);
  fuse_in_rounding(args.up);
  const RoundParams source{.x = rows_of(args.up.gate->gate_up),
                           .is_gated = true,
                           .activation = args.up.gate->activation};
  quantized_linear(args.down, &source);
}

}  // namespace llmserve::cuda
