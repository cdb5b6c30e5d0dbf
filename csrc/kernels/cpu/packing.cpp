#include "kernels/cpu/packing.h"

#include <algorithm>

#include "kernels/host_ops.h"

namespace llmserve::cpu {
namespace {

// K as it is stored: bf16 goes in pairs.
int64_t padded_depth(int64_t k, DType dtype) { return dtype == DType::kBF16 ? (k + 1) / 2 * 2 : k; }

// A chunk of K is written for all columns of a panel before the next: its lines, 16 KiB of them,
// are still in the L1 when the second half of each is written. Even, so that pairs stay whole.
constexpr int64_t kPackDepth = 256;

// Eight columns of a panel over one chunk of K, as words: an f32 or a pair of bf16.
class ColumnPacker {
 public:
  // Where another panel follows its rows are prefetched: a processor follows sixteen rows at once
  // badly by itself.
  ColumnPacker(const KernelTable& kernels, DType dtype, bool has_next)
      : kernels_(kernels),
        dtype_(dtype),
        per_word_(dtype == DType::kBF16 ? 2 : 1),
        has_next_(has_next) {}

  void pack(const ConstTensor rows[8], int64_t k_begin, int64_t count, float* to) {
    const void* sources[8];
    for (int r = 0; r < 8; ++r) {
      const bool is_direct = rows[r] && rows[r].dtype == dtype_ && count % per_word_ == 0;
      sources[r] = is_direct ? rows[r].as<std::byte>() + k_begin * size_bytes(dtype_)
                             : converted(rows[r], k_begin, count, r);
      if (is_direct && has_next_) prefetch_next(rows[r], k_begin, count);
    }
    kernels_.pack_words(sources, (count + per_word_ - 1) / per_word_, to);
  }

 private:
  // Of the row that has this one's place in the next panel, into the L2.
  void prefetch_next(const ConstTensor& row, int64_t k_begin, int64_t count) const {
    const int64_t element_bytes = size_bytes(dtype_);
    const std::byte* begin =
        row.as<std::byte>() + (kPanelWidth * row.strides[0] + k_begin) * element_bytes;
    for (int64_t at = 0; at < count * element_bytes; at += 64)
      __builtin_prefetch(begin + at, /*rw=*/0, /*locality=*/2);
  }

  // In the weight's dtype, ended by a zero; all zero where there is no row.
  const void* converted(const ConstTensor& row, int64_t k_begin, int64_t count, int r) {
    float* words = buffer_[r];
    if (!row) {
      std::fill_n(words, kPackDepth, 0.0f);
    } else if (dtype_ == DType::kF32) {
      convert_to_f32(row, k_begin, count, words);
    } else {
      auto* pairs = reinterpret_cast<uint16_t*>(words);
      convert_to_bf16(row, k_begin, count, pairs);
      if (count < kPackDepth) pairs[count] = 0;
    }
    return words;
  }

  const KernelTable& kernels_;
  const DType dtype_;
  const int64_t per_word_;
  const bool has_next_;
  float buffer_[8][kPackDepth];
};

}  // namespace

int64_t panels_bytes(int64_t out_features, int64_t in_features, DType dtype) {
  return num_panels(out_features) * kPanelWidth * padded_depth(in_features, dtype) *
         size_bytes(dtype);
}

StackedRows::StackedRows(std::span<const ConstTensor> parts_in) : parts(parts_in), starts{0} {
  for (const ConstTensor& part : parts) starts.push_back(starts.back() + part.shape[0]);
}

ConstTensor StackedRows::row(int64_t idx) const {
  if (idx >= starts.back()) return ConstTensor{};
  const auto after = std::upper_bound(starts.begin(), starts.end(), idx);
  const size_t part = static_cast<size_t>(after - starts.begin()) - 1;
  return parts[part].slice(0, idx - starts[part], 1);
}

void pack_panel(const KernelTable& kernels, const StackedRows& rows, int64_t panel_idx, int64_t k,
                DType dtype, std::byte* panel) {
  ConstTensor columns[kPanelWidth];
  for (int64_t i = 0; i < kPanelWidth; ++i) columns[i] = rows.row(panel_idx * kPanelWidth + i);
  ColumnPacker packer(kernels, dtype, (panel_idx + 1) * kPanelWidth < rows.starts.back());
  const int64_t per_word = dtype == DType::kBF16 ? 2 : 1;
  auto* words = reinterpret_cast<float*>(panel);
  for (int64_t depth = 0; depth < k; depth += kPackDepth) {
    for (int64_t half = 0; half < kPanelWidth; half += 8) {
      packer.pack(columns + half, depth, std::min(kPackDepth, k - depth),
                  words + depth / per_word * kPanelWidth + half);
    }
  }
}

void pack_panels(CpuWorkers& workers, std::span<const ConstTensor> parts, DType dtype,
                 std::byte* to) {
  const StackedRows rows(parts);
  const int64_t k = parts[0].shape[1];
  const int64_t panel_bytes = panels_bytes(kPanelWidth, k, dtype);
  workers.pool().parallel_for(
      num_panels(rows.starts.back()), 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t p = begin; p < end; ++p)
          pack_panel(workers.kernels(), rows, p, k, dtype, to + p * panel_bytes);
      });
}

}  // namespace llmserve::cpu
