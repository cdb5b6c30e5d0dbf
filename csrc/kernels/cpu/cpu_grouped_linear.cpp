// Products of rows with weights of their own. The rows of each weight are brought together, go
// through the kernels of the linear layer, and their outputs are put where they belong: count,
// prefix sum, stable scatter.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/quantized_rows.h"

namespace llmserve {
namespace {

// Elements of a row that a thread copies in about the time in which another is woken.
constexpr int64_t kCopiedAtLeast = 8192;

int64_t copy_grain(int64_t width) { return std::max<int64_t>(1, kCopiedAtLeast / width); }

void grow(Buffer& buffer, int64_t num_bytes) {
  if (buffer.num_bytes() < num_bytes) buffer = Buffer(num_bytes);
}

}  // namespace

void CpuBackend::do_grouped_linear(const GroupedLinearArgs& args) { linear_.grouped_linear(args); }

void CpuLinear::grouped_linear(const GroupedLinearArgs& args) {
  const int64_t num_rows = args.out.shape[0];
  const int64_t width = args.out.shape[1];
  if (num_rows == 0 || width == 0) return;
  group_rows(args);
  grow(grouped_out_, num_rows * width * size_bytes(DType::kF32));
  auto* sums = reinterpret_cast<float*>(grouped_out_.data());
  if (args.weights[0]->format)
    multiply_quantized_groups(args, sums);
  else
    multiply_groups(args, sums);
  pool_.parallel_for(num_rows, copy_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = row_order_[static_cast<size_t>(i)];
      std::memcpy(args.out.as<float>() + row * args.out.strides[0], sums + i * width,
                  static_cast<size_t>(width) * sizeof(float));
    }
  });
}

void CpuLinear::group_rows(const GroupedLinearArgs& args) {
  group_ends_.assign(args.weights.size(), 0);
  for (const int32_t id : args.weight_ids) ++group_ends_[static_cast<size_t>(id)];
  groups_.clear();
  int64_t begin = 0;
  for (size_t w = 0; w < args.weights.size(); ++w) {
    const int64_t count = group_ends_[w];
    if (count > 0) groups_.push_back({args.weights[w], begin, count});
    group_ends_[w] = begin;  // moves to the end as rows come
    begin += count;
  }
  row_order_.resize(args.weight_ids.size());
  for (size_t r = 0; r < args.weight_ids.size(); ++r) {
    int64_t& end = group_ends_[static_cast<size_t>(args.weight_ids[r])];
    row_order_[static_cast<size_t>(end++)] = static_cast<int32_t>(r);
  }
}

template <class Fn>
void CpuLinear::deal_groups(int64_t out_features, Fn fn) {
  const int64_t panels = cpu::num_panels(out_features);
  deal_panels(
      std::ssize(groups_) * panels, kPanelsAtOnce, [&](int64_t begin, int64_t end, int thread_idx) {
        while (begin < end) {
          const int64_t panel = begin % panels;
          const int64_t count = std::min(end - begin, panels - panel);
          fn(groups_[static_cast<size_t>(begin / panels)], panel, panel + count, thread_idx);
          begin += count;
        }
      });
}

void CpuLinear::multiply_groups(const GroupedLinearArgs& args, float* out) {
  const LinearWeight& like = *args.weights[0];
  const int64_t k = like.in_features;
  const int64_t n = like.out_features;
  const cpu::LinearKernel& kernel = float_kernel(like);
  const bool is_rounded = kernel.round_row != nullptr;
  const int64_t stride = is_rounded ? rounded_stride(k) : k;
  const int64_t row_bytes = stride * size_bytes(is_rounded ? DType::kBF16 : DType::kF32);
  grow(rounded_, std::ssize(row_order_) * row_bytes);
  pool_.parallel_for(std::ssize(row_order_), copy_grain(std::max<int64_t>(k, 1)),
                     [&](int64_t begin, int64_t end, int) {
                       for (int64_t i = begin; i < end; ++i) {
                         const size_t row = static_cast<size_t>(row_order_[static_cast<size_t>(i)]);
                         const float* x = args.x.as<float>() + args.x_rows[row] * args.x.strides[0];
                         std::byte* to = rounded_.data() + i * row_bytes;
                         if (is_rounded) {
                           auto* rounded = reinterpret_cast<uint16_t*>(to);
                           kernel.round_row(x, k, rounded);
                           std::fill(rounded + (k + 1) / 2 * 2, rounded + padded_to_tiles(k),
                                     uint16_t{0});
                         } else {
                           std::memcpy(to, x, static_cast<size_t>(k) * sizeof(float));
                         }
                       }
                     });
  int64_t floats = 0;
  for (const RowGroup& group : groups_)
    floats = std::max(floats, kernel.scratch_floats(group.count, k));
  workers_.reserve_scratch_floats(floats);
  deal_groups(n, [&](const RowGroup& group, int64_t begin, int64_t end, int thread_idx) {
    const cpu::LinearPart part{.x = rounded_.data() + group.begin * row_bytes,
                               .x_stride = stride,
                               .m = group.count,
                               .n = n,
                               .k = k,
                               .weight = group.weight->bytes(),
                               .bias = nullptr,
                               .out = out + group.begin * n,
                               .out_stride = n,
                               .accumulate = false,
                               .panel_begin = begin,
                               .panel_end = end,
                               .scratch = workers_.scratch<float>(thread_idx)};
    if (!group.weight->rows || group.weight->rows->is_packed)
      kernel.run(&part);
    else
      run_on_rows(kernel, *group.weight->rows, part,
                  panels_[static_cast<size_t>(thread_idx)].data());
  });
}

void CpuLinear::multiply_quantized_groups(const GroupedLinearArgs& args, float* out) {
  const LinearWeight& like = *args.weights[0];
  const int64_t n = like.out_features;
  const int64_t num_rows = std::ssize(row_order_);
  const cpu::QuantizedRows rows(kernels_, like, num_rows, rounded_);
  workers_.reserve_scratch_floats(cpu::QuantizedRows::scratch_floats(like.in_features));
  workers_.reserve_scratch(rows.product_bytes());
  // One row is rounded sooner than a thread wakes.
  pool_.parallel_for(num_rows, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t i = begin; i < end; ++i) {
      const size_t row = static_cast<size_t>(row_order_[static_cast<size_t>(i)]);
      rows.write(i, args.x.as<float>() + args.x_rows[row] * args.x.strides[0],
                 *args.weights[static_cast<size_t>(args.weight_ids[row])],
                 workers_.scratch<float>(thread_idx));
    }
  });
  deal_groups(n, [&](const RowGroup& group, int64_t begin, int64_t end, int thread_idx) {
    cpu::QuantizedPart part = rows.part(group.begin, group.count, *group.weight);
    part.out = out + group.begin * n;
    part.out_stride = n;
    part.panel_begin = begin;
    part.panel_end = end;
    part.unpacked = workers_.scratch<uint8_t>(thread_idx);
    rows.kernel()(&part);
  });
}

}  // namespace llmserve
