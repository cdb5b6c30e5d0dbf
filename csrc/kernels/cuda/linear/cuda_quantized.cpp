// Weights of integers: their packing, and their products.
#include <vector>

#include "core/error.h"
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

// Of groups of many units the kernels that there are depend on K alone through its number of
// groups, which all have.
bool CudaBackend::can_run(const LinearFormat& format) const {
  const bool has_others = format.has_zero || format.has_row_scale || format.has_float_products() ||
                          format.outlier_threshold > 0 || format.scale_type == ScaleType::kBF16 ||
                          format.scale_type == ScaleType::kE4M3 ||
                          (format.scale_type == ScaleType::kF32 && format.group_size > 0);
  if (has_others) return false;
  constexpr int64_t kLongRow = 1024;
  const int64_t k = format.group_size == 0 ? kLongRow : format.group_size << format.scale_shift;
  return can_run_integers_ && has_quantized_kernel(quantized_layout(format, 2 * k));
}

int64_t CudaBackend::packed_bytes(int64_t out_features, int64_t in_features,
                                  const LinearFormat& format) const {
  if (in_features % format.group_elements(in_features) != 0)
    throw NotSupported(concat("rows of ", in_features, " weights in groups of ", format.group_size,
                              " are not supported on device 'cuda'; use quantization='int8', or "
                              "device='cpu'"));
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

void CudaBackend::quantized_linear(const LinearArgs& args) {
  const LinearWeight& weight = *args.weight;
  const int64_t num_rows = args.x.shape[0];
  const int64_t k = weight.in_features;
  check_grid("linear", num_rows);
  memory_.make_current();
  if (num_rows == 0 || weight.out_features == 0) return;
  const QuantizedLayout layout = quantized_layout(*weight.format, k);
  std::byte* rounded = scratch(rounded_bytes(num_rows, k, layout.num_groups));
  const int64_t stride = rounded_stride(k);
  const RoundedX x{reinterpret_cast<int8_t*>(rounded), stride,
                   reinterpret_cast<RoundedGroup*>(rounded + num_rows * stride)};
  round_to_integers(rows_of(args.x), num_rows, k, layout.group_size, x, stream());
  cuda::quantized_linear({.x = x,
                          .weight = weight.data.data(),
                          .layout = layout,
                          .bias = args.bias.as<float>(),
                          .out = rows_of(args.out),
                          .num_rows = num_rows,
                          .out_features = weight.out_features,
                          .in_features = k,
                          .accumulate = args.accumulate},
                         stream());
}

}  // namespace llmserve::cuda
