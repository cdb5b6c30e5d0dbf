// Products of rows with weights of their own. The rows of each weight are brought together, go
// through the kernels of the linear layer, and their outputs are put where they belong: count,
// prefix sum, stable scatter. Between the products of an expert's layer rows stay together.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_experts.h"
#include "kernels/cpu/cpu_linear.h"
#include "kernels/cpu/quantized_rows.h"
#include "kernels/host_ops.h"

namespace llmserve {
namespace {

// Elements of a row that a thread copies in about the time in which another is woken.
constexpr int64_t kCopiedAtLeast = 8192;

int64_t copy_grain(int64_t width) {
  return std::max<int64_t>(1, kCopiedAtLeast / std::max<int64_t>(1, width));
}

void grow(Buffer& buffer, int64_t num_bytes) {
  if (buffer.num_bytes() < num_bytes) buffer = Buffer(num_bytes);
}

int64_t num_grouped_rows(const StepShape& shape) {
  return std::min(shape.max_tokens, shape.grouped.max_tokens) * shape.grouped.rows_per_token;
}

}  // namespace

int64_t CpuLinear::grouped_row_bytes(const GroupedShape& grouped, DType dtype) const {
  const bool is_rounded = dtype == DType::kBF16 && kernels_.linear_bf16.round_row;
  return std::max(grouped.activation_bytes,
                  is_rounded ? rounded_stride(grouped.in_features) * size_bytes(DType::kBF16)
                             : grouped.in_features * size_bytes(DType::kF32));
}

int64_t CpuLinear::grouped_bytes(const StepShape& shape) const {
  const int64_t rows = num_grouped_rows(shape);
  const auto index_bytes = static_cast<int64_t>(sizeof(int32_t));
  return rows * (2 * index_bytes + shape.grouped.out_features * size_bytes(DType::kF32)) +
         (rows == 0 ? 0 : group_bytes(shape.grouped.num_weights));
}

int64_t CpuLinear::group_bytes(int64_t num_weights) {
  return num_weights * static_cast<int64_t>(sizeof(int64_t) + sizeof(RowGroup));
}

int64_t CpuLinear::grouped_rounded_bytes(const StepShape& shape) const {
  return num_grouped_rows(shape) * grouped_row_bytes(shape.grouped, shape.weight_dtype);
}

void CpuLinear::reserve_grouped(const StepShape& shape) {
  const int64_t rows = num_grouped_rows(shape);
  if (rows == 0) return;
  grow(row_order_, rows * static_cast<int64_t>(sizeof(int32_t)));
  grow(row_places_, rows * static_cast<int64_t>(sizeof(int32_t)));
  grow(groups_, group_bytes(shape.grouped.num_weights));
  grow(grouped_out_, rows * shape.grouped.out_features * size_bytes(DType::kF32));
}

void CpuLinear::grouped_linear(const GroupedLinearArgs& args) {
  const int64_t width = args.out.shape[1];
  const RowGroups groups = group_rows(args);
  if (groups.num_rows == 0 || width == 0) return;
  grow(grouped_out_, groups.num_rows * width * size_bytes(DType::kF32));
  auto* sums = reinterpret_cast<float*>(grouped_out_.data());
  multiply_groups(args, groups, sums, rows_of(args, groups));
  pool_.parallel_for(groups.num_rows, copy_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(args.out.as<float>() + groups.order[i] * args.out.strides[0], sums + i * width,
                  static_cast<size_t>(width) * sizeof(float));
  });
}

void CpuLinear::fused_experts(const FusedExpertsArgs& args) {
  const RowGroups groups = group_rows(args.up);
  auto* gate_up = args.up.out.as<float>();
  auto* activated = args.gate.out.as<float>();
  const int64_t width = args.gate.out.shape[1];
  const auto activate = kernels_.gated[static_cast<size_t>(args.gate.activation)];
  multiply_groups(args.up, groups, gate_up, rows_of(args.up, groups));
  multiply_groups(args.down, groups, args.down.out.as<float>(), [&](int64_t i) {
    const float* both = gate_up + i * 2 * width;
    float* row = activated + i * width;
    activate(both, both + width, width, row);
    return row;
  });
  combine_rows(workers_, args.combine, groups.places);
}

CpuLinear::RowGroups CpuLinear::group_rows(const GroupedLinearArgs& args) {
  check_weight_ids(args);
  const auto* ids = args.weight_ids.as<int32_t>();
  const int64_t num_ids = args.weight_ids.shape[0];
  const int64_t num_weights = std::ssize(args.weights);
  grow(row_order_, num_ids * static_cast<int64_t>(sizeof(int32_t)));
  grow(row_places_, num_ids * static_cast<int64_t>(sizeof(int32_t)));
  grow(groups_, group_bytes(num_weights));
  auto* order = reinterpret_cast<int32_t*>(row_order_.data());
  auto* places = reinterpret_cast<int32_t*>(row_places_.data());
  auto* groups = reinterpret_cast<RowGroup*>(groups_.data());
  auto* ends = reinterpret_cast<int64_t*>(groups + num_weights);
  std::fill_n(ends, num_weights, int64_t{0});
  for (int64_t r = 0; r < num_ids; ++r)
    if (ids[r] >= 0) ++ends[ids[r]];
  RowGroups all{groups, 0, order, places, 0};
  for (int64_t w = 0; w < num_weights; ++w) {
    const int64_t count = ends[w];
    if (count > 0) groups[all.num_groups++] = {w, all.num_rows, count};
    ends[w] = all.num_rows;  // moves to the end as rows come
    all.num_rows += count;
  }
  for (int64_t r = 0; r < num_ids; ++r) {
    const int64_t place = ids[r] < 0 ? 0 : ends[ids[r]]++;
    places[r] = static_cast<int32_t>(place);
    if (ids[r] >= 0) order[place] = static_cast<int32_t>(r);
  }
  return all;
}

template <class Fn>
void CpuLinear::deal_groups(const RowGroups& groups, int64_t out_features, Fn fn) {
  const int64_t panels = cpu::num_panels(out_features);
  deal_panels(groups.num_groups * panels, kPanelsAtOnce,
              [&](int64_t begin, int64_t end, int thread_idx) {
                while (begin < end) {
                  const int64_t panel = begin % panels;
                  const int64_t count = std::min(end - begin, panels - panel);
                  fn(groups.groups[begin / panels], panel, panel + count, thread_idx);
                  begin += count;
                }
              });
}

template <class RowOf>
void CpuLinear::multiply_groups(const GroupedLinearArgs& args, const RowGroups& groups, float* out,
                                RowOf row_of) {
  if (groups.num_rows == 0) return;
  if (args.weights[0]->format)
    multiply_quantized_groups(args, groups, out, row_of);
  else
    multiply_float_groups(args, groups, out, row_of);
}

template <class RowOf>
void CpuLinear::multiply_float_groups(const GroupedLinearArgs& args, const RowGroups& groups,
                                      float* out, RowOf row_of) {
  const LinearWeight& like = *args.weights[0];
  const int64_t k = like.in_features;
  const int64_t n = like.out_features;
  const cpu::LinearKernel& kernel = float_kernel(like);
  const bool is_rounded = kernel.round_row != nullptr;
  const int64_t stride = is_rounded ? rounded_stride(k) : k;
  const int64_t row_bytes = stride * size_bytes(is_rounded ? DType::kBF16 : DType::kF32);
  grow(rounded_, groups.num_rows * row_bytes);
  pool_.parallel_for(groups.num_rows, copy_grain(k), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const float* x = row_of(i);
      std::byte* to = rounded_.data() + i * row_bytes;
      if (is_rounded) {
        auto* rounded = reinterpret_cast<uint16_t*>(to);
        kernel.round_row(x, k, rounded);
        std::fill(rounded + (k + 1) / 2 * 2, rounded + padded_to_tiles(k), uint16_t{0});
      } else {
        std::memcpy(to, x, static_cast<size_t>(k) * sizeof(float));
      }
    }
  });
  int64_t floats = 0;
  for (const RowGroup& group : groups.all())
    floats = std::max(floats, kernel.scratch_floats(group.count, k));
  workers_.reserve_scratch_floats(floats);
  deal_groups(groups, n, [&](const RowGroup& group, int64_t begin, int64_t end, int thread_idx) {
    const LinearWeight& weight = *args.weights[static_cast<size_t>(group.weight)];
    const cpu::LinearPart part{.x = rounded_.data() + group.begin * row_bytes,
                               .x_stride = stride,
                               .m = group.count,
                               .n = n,
                               .k = k,
                               .weight = weight.bytes(),
                               .bias = bias_of(args, group),
                               .out = out + group.begin * n,
                               .out_stride = n,
                               .accumulate = false,
                               .panel_begin = begin,
                               .panel_end = end,
                               .scratch = workers_.scratch<float>(thread_idx)};
    if (!weight.rows || weight.rows->is_packed)
      kernel.run(&part);
    else
      run_on_rows(kernel, *weight.rows, part, panels_[static_cast<size_t>(thread_idx)].data());
  });
}

template <class RowOf>
void CpuLinear::multiply_quantized_groups(const GroupedLinearArgs& args, const RowGroups& groups,
                                          float* out, RowOf row_of) {
  const LinearWeight& like = *args.weights[0];
  const int64_t n = like.out_features;
  const cpu::QuantizedRows rows(kernels_, like, groups.num_rows, rounded_);
  workers_.reserve_scratch_floats(cpu::QuantizedRows::scratch_floats(like.in_features));
  workers_.reserve_scratch(rows.product_bytes());
  const auto* ids = args.weight_ids.as<int32_t>();
  // One row is rounded sooner than a thread wakes.
  pool_.parallel_for(groups.num_rows, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t i = begin; i < end; ++i)
      rows.write(i, row_of(i), *args.weights[static_cast<size_t>(ids[groups.order[i]])],
                 workers_.scratch<float>(thread_idx));
  });
  deal_groups(groups, n, [&](const RowGroup& group, int64_t begin, int64_t end, int thread_idx) {
    cpu::QuantizedPart part =
        rows.part(group.begin, group.count, *args.weights[static_cast<size_t>(group.weight)]);
    part.bias = bias_of(args, group);
    part.out = out + group.begin * n;
    part.out_stride = n;
    part.panel_begin = begin;
    part.panel_end = end;
    part.unpacked = workers_.scratch<uint8_t>(thread_idx);
    rows.kernel()(&part);
  });
}

}  // namespace llmserve
