// Packing of weights, the search for bad values, and the linear layer.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "core/error.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/host_ops.h"

namespace llmserve {
namespace {

using cpu::kPanelWidth;

int64_t num_panels(int64_t out_features) { return (out_features + kPanelWidth - 1) / kPanelWidth; }

// K as it is stored: bf16 goes in pairs.
int64_t padded_depth(int64_t k, DType dtype) { return dtype == DType::kBF16 ? (k + 1) / 2 * 2 : k; }

// Writes K [k_begin, k_end) of one row of W as column `column` of a panel; the type says how.
void pack_column(const ConstTensor& part, int64_t row, int64_t k_begin, int64_t k_end,
                 int64_t column, float* panel) {
  float values[256];
  const int64_t width = part.shape[1];
  convert_to_f32(part, row * width + k_begin, k_end - k_begin, values);
  for (int64_t k = k_begin; k < k_end; ++k) panel[k * kPanelWidth + column] = values[k - k_begin];
}

void pack_column(const ConstTensor& part, int64_t row, int64_t k_begin, int64_t k_end,
                 int64_t column, uint16_t* panel) {
  uint16_t values[256];
  const int64_t width = part.shape[1];
  convert_to_bf16(part, row * width + k_begin, k_end - k_begin, values);
  if ((k_end - k_begin) % 2 != 0) values[k_end - k_begin] = 0;
  for (int64_t k = k_begin; k < k_end; k += 2) {
    std::memcpy(panel + k * kPanelWidth + 2 * column, values + (k - k_begin), 2 * sizeof(uint16_t));
  }
}

// The rows of all parts, one after another.
struct StackedRows {
  std::span<const ConstTensor> parts;
  std::vector<int64_t> starts;

  explicit StackedRows(std::span<const ConstTensor> parts_in) : parts(parts_in), starts{0} {
    for (const ConstTensor& part : parts) starts.push_back(starts.back() + part.shape[0]);
  }
  size_t part_of(int64_t row) const {
    return static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), row) -
                               starts.begin()) -
           1;
  }
};

// A chunk of K is written for all columns of a panel before the next: 64 * 16 elements stay in the
// L1 until their cache lines are full.
constexpr int64_t kPackDepth = 64;

template <class T>
void pack_panel(const StackedRows& rows, int64_t panel_idx, int64_t n, int64_t k, T* panel) {
  const int64_t begin = panel_idx * kPanelWidth;
  const int64_t end = std::min(n, begin + kPanelWidth);
  for (int64_t depth = 0; depth < k; depth += kPackDepth) {
    for (int64_t i = begin; i < end; ++i) {
      const size_t part = rows.part_of(i);
      pack_column(rows.parts[part], i - rows.starts[part], depth, std::min(k, depth + kPackDepth),
                  i - begin, panel);
    }
  }
}

// The first element of [begin, end) whose exponent bits are all ones, or end. Blocks are tested
// without branches, at memory speed; the tensor may be a mapped file, unaligned.
template <class Bits>
int64_t find_non_finite(const void* data, int64_t begin, int64_t end, Bits exponent) {
  constexpr int64_t kBlock = 1024;
  Bits block[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    std::memcpy(block, static_cast<const Bits*>(data) + at,
                static_cast<size_t>(count) * sizeof(Bits));
    Bits any = 0;
    for (int64_t i = 0; i < count; ++i)
      any = static_cast<Bits>(any | ((block[i] & exponent) == exponent ? 1 : 0));
    for (int64_t i = 0; any != 0 && i < count; ++i)
      if ((block[i] & exponent) == exponent) return at + i;
  }
  return end;
}

}  // namespace

int64_t CpuBackend::packed_bytes(int64_t out_features, int64_t in_features, DType dtype) const {
  return num_panels(out_features) * kPanelWidth * padded_depth(in_features, dtype) *
         size_bytes(dtype);
}

LinearWeight CpuBackend::pack_linear(std::span<const ConstTensor> parts, DType dtype) {
  const int64_t n = check_linear_parts(parts, dtype);
  const int64_t k = parts[0].shape[1];
  LinearWeight weight{n, k, dtype, Buffer(packed_bytes(n, k, dtype))};
  const StackedRows rows(parts);
  const int64_t panel_elements = kPanelWidth * padded_depth(k, dtype);
  pool_.parallel_for(num_panels(n), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p) {
      std::byte* panel = weight.data.data() + p * panel_elements * size_bytes(dtype);
      if (dtype == DType::kBF16)
        pack_panel(rows, p, n, k, reinterpret_cast<uint16_t*>(panel));
      else
        pack_panel(rows, p, n, k, reinterpret_cast<float*>(panel));
    }
  });
  return weight;
}

int64_t CpuBackend::first_non_finite(const ConstTensor& tensor) {
  if (!tensor.is_contiguous())
    throw InvalidArgument("first_non_finite.tensor: expected a contiguous tensor");
  const int64_t none = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> first{none};
  pool_.parallel_for(tensor.num_elements(), 1 << 16, [&](int64_t begin, int64_t end, int) {
    int64_t found = end;
    if (tensor.dtype == DType::kF32)
      found = find_non_finite<uint32_t>(tensor.data, begin, end, 0x7f800000u);
    else
      found = find_non_finite<uint16_t>(tensor.data, begin, end,
                                        tensor.dtype == DType::kBF16 ? 0x7f80 : 0x7c00);
    if (found == end) return;
    int64_t known = first.load();
    while (found < known && !first.compare_exchange_weak(known, found)) {
    }
  });
  return first == none ? -1 : first.load();
}

void CpuBackend::linear(const LinearArgs& args) {
  validate(args);
  const LinearWeight& weight = *args.weight;
  const int64_t m = args.x.shape[0];
  if (m == 0) return;
  reserve_scratch(kernels_.linear_scratch_floats(m, weight.in_features) *
                  static_cast<int64_t>(sizeof(float)));
  // Four panels are what a single row does at once.
  const int64_t panels = num_panels(weight.out_features);
  const int64_t grain = panels >= 16 * pool_.num_threads() ? 4 : 1;
  pool_.parallel_for(panels, grain, [&](int64_t begin, int64_t end, int thread_idx) {
    const cpu::LinearPart part{.x = args.x.as<float>(),
                               .x_stride = args.x.strides[0],
                               .m = m,
                               .n = weight.out_features,
                               .k = weight.in_features,
                               .weight = weight.data.data(),
                               .is_bf16 = weight.dtype == DType::kBF16,
                               .bias = args.bias ? args.bias.as<float>() : nullptr,
                               .out = args.out.as<float>(),
                               .out_stride = args.out.strides[0],
                               .accumulate = args.accumulate,
                               .panel_begin = begin,
                               .panel_end = end,
                               .scratch = reinterpret_cast<float*>(scratch(thread_idx))};
    kernels_.linear(&part);
  });
}

}  // namespace llmserve
