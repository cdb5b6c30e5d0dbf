#include "kernels/cpu/cpu_linear.h"

#include <algorithm>

#include "kernels/cpu/cpu_norm.h"
#include "kernels/cpu/quantized_packing.h"
#include "kernels/cpu/quantized_rows.h"
#include "kernels/host_ops.h"

namespace llmserve {
namespace {

using cpu::kPanelWidth;
using cpu::num_panels;

// Elements of x that a thread rounds to bf16 in about the time in which another is woken.
constexpr int64_t kRoundedAtLeast = 8192;

}  // namespace

LinearWeight CpuLinear::pack_linear(std::span<const ConstTensor> parts, DType dtype) {
  const int64_t n = check_linear_parts(parts, dtype);
  const int64_t k = parts[0].shape[1];
  LinearWeight weight{.out_features = n,
                      .in_features = k,
                      .dtype = dtype,
                      .data = Buffer(cpu::panels_bytes(n, k, dtype))};
  cpu::pack_panels(workers_, parts, dtype, weight.data.data());
  return weight;
}

LinearWeight CpuLinear::defer_linear(std::span<const ConstTensor> parts, DType dtype) {
  const int64_t n = check_linear_parts(parts, dtype);
  const int64_t k = parts[0].shape[1];
  LinearWeight weight{.out_features = n, .in_features = k, .dtype = dtype};
  weight.rows =
      std::make_shared<LinearRows>(LinearRows{.parts = {parts.begin(), parts.end()},
                                              .dtype = dtype,
                                              .packed = Buffer(cpu::panels_bytes(n, k, dtype))});
  const int64_t room = cpu::panels_bytes(kPanelsAtOnce * kPanelWidth, k, dtype);
  panels_.resize(static_cast<size_t>(pool_.num_threads()));
  for (Buffer& buffer : panels_)
    if (buffer.num_bytes() < room) buffer = Buffer(room);
  return weight;
}

void CpuLinear::pack_rows(LinearRows& rows) {
  if (rows.is_packed) return;
  cpu::pack_panels(workers_, rows.parts, rows.dtype, rows.packed.data());
  rows.is_packed = true;
  rows.parts.clear();
}

int64_t CpuLinear::scratch_floats(const StepShape& shape) const {
  // A row that is normed, and its columns in a weight's order.
  int64_t floats =
      shape.max_in_features + cpu::QuantizedRows::scratch_floats(shape.max_in_features);
  // A few rows may take more than many, see linear.inc.
  for (int64_t m = 1; m <= shape.max_tokens; ++m)
    for (const cpu::LinearKernel& linear : {kernels_.linear_f32, kernels_.linear_bf16})
      floats = std::max(floats, linear.scratch_floats(m, shape.max_in_features));
  if (shape.activation_bytes > 0)
    floats = std::max(floats, cpu::kUnpackedBytes / static_cast<int64_t>(sizeof(float)));
  return floats;
}

int64_t CpuLinear::gated_floats(const StepShape& shape) {
  return shape.max_tokens >= kGatedRows ? kGatedFloats : 0;
}

int64_t CpuLinear::rounded_bytes(const StepShape& shape) const {
  const bool is_bf16 = shape.weight_dtype == DType::kBF16 && kernels_.linear_bf16.round_row;
  return std::max(
      std::max(shape.activation_bytes,
               is_bf16 ? rounded_stride(shape.max_in_features) * size_bytes(DType::kBF16) : 0) *
          shape.max_tokens,
      grouped_rounded_bytes(shape));
}

void CpuLinear::reserve(const StepShape& shape) {
  const int64_t bytes = rounded_bytes(shape);
  if (rounded_.num_bytes() < bytes) rounded_ = Buffer(bytes);
  reserve_grouped(shape);
}

RoundedRows CpuLinear::round_rows(const FusedLinearArgs& args) {
  const ConstTensor& x = args.linear.x;
  const int64_t k = x.shape[1];
  const int64_t even_k = (k + 1) / 2 * 2;
  const int64_t stride = rounded_stride(k);
  const int64_t bytes = x.shape[0] * stride * size_bytes(DType::kBF16);
  if (rounded_.num_bytes() < bytes) rounded_ = Buffer(bytes);
  const RoundedRows rows{reinterpret_cast<uint16_t*>(rounded_.data()), stride};
  pool_.parallel_for(x.shape[0], std::max<int64_t>(1, kRoundedAtLeast / k),
                     [&](int64_t begin, int64_t end, int thread_idx) {
                       auto* room = workers_.scratch<float>(thread_idx);
                       for (int64_t r = begin; r < end; ++r) {
                         kernels_.linear_bf16.round_row(normed_row(args, r, room), k, rows.row(r));
                         std::fill(rows.row(r) + even_k, rows.row(r) + padded_to_tiles(k), 0);
                       }
                     });
  return rows;
}

RoundedRows CpuLinear::rounded_in(void* memory, const LinearArgs& args) const {
  const LinearWeight& weight = *args.weight;
  const int64_t k = weight.in_features;
  const int64_t stride = rounded_stride(k);
  const bool is_rounded = !weight.format && float_kernel(weight).round_row;
  const bool has_room =
      args.x.is_contiguous() && stride * size_bytes(DType::kBF16) <= k * size_bytes(DType::kF32);
  if (!is_rounded || !has_room || k != padded_to_tiles(k)) return {};
  return {static_cast<uint16_t*>(memory), stride};
}

const float* CpuLinear::normed_row(const FusedLinearArgs& args, int64_t r, float* room) const {
  if (!args.norm) return args.linear.x.as<float>() + r * args.linear.x.strides[0];
  const RmsNormArgs& norm = *args.norm;
  kernels_.rms_norm(norm.x.as<float>() + r * norm.x.strides[0], norm.weight.as<float>(),
                    norm.weight.shape[0], &norm.numbers, room);
  return room;
}

void CpuLinear::fused_mlp(const FusedMlpArgs& args) {
  const RoundedRows between = rounded_in(args.up.gate->out.data, args.down);
  multiply(args.up, between);
  multiply_written(args.down, between);
}

void CpuLinear::multiply_written(const LinearArgs& args, const RoundedRows& x) {
  const FusedLinearArgs alone{.norm = {}, .linear = args, .gate = {}};
  x.data == nullptr ? multiply(alone, {}) : multiply_rows(alone, x.data, x.stride, {});
}

bool CpuLinear::gates_pieces(const FusedLinearArgs& args) {
  const LinearWeight& weight = *args.linear.weight;
  const bool is_packed = !weight.rows || weight.rows->is_packed;
  return args.gate && is_packed && weight.out_features % (2 * cpu::kPanelWidth) == 0 &&
         args.linear.x.shape[0] >= kGatedRows;
}

void CpuLinear::multiply(const FusedLinearArgs& args, const RoundedRows& gated) {
  const LinearWeight& weight = *args.linear.weight;
  if (args.linear.x.shape[0] == 0) return;
  if (weight.format) return multiply_quantized(args, gated);
  if (float_kernel(weight).round_row) {
    workers_.reserve_scratch_floats(weight.in_features);
    const RoundedRows x = round_rows(args);
    return multiply_rows(args, x.data, x.stride, gated);
  }
  if (args.norm) norm_rows(workers_, *args.norm);
  multiply_rows(args, args.linear.x.data, args.linear.x.strides[0], gated);
}

template <class Part, class RowsOf>
void CpuLinear::run_gated(const Part& all, const GatedActivationArgs& gate,
                          const RoundedRows& gated, int64_t panel_bytes, int64_t piece,
                          void (*run)(const Part*), RowsOf rows_of) {
  const int64_t half = all.n / 2;
  const int64_t num_panels = half / cpu::kPanelWidth;
  const int64_t most_rows = kGatedFloats / (2 * piece * cpu::kPanelWidth) / kRowTiles * kRowTiles;
  const auto run_piece = [&](int64_t begin, int64_t end, int thread_idx) {
    auto* sums = workers_.scratch<float>(thread_idx);
    for (int64_t panel = begin; panel < end; panel += piece) {
      const int64_t count = std::min(piece, end - panel);
      const int64_t column = panel * cpu::kPanelWidth;
      const int64_t width = count * cpu::kPanelWidth;
      for (int64_t row = 0; row < all.m; row += most_rows) {
        const int64_t rows = std::min(most_rows, all.m - row);
        Part part = rows_of(row, rows, sums + kGatedFloats);
        part.n = half;
        part.panel_begin = panel;
        part.panel_end = panel + count;
        part.out_stride = 2 * width;
        part.out = sums - column;
        run(&part);
        part.out += width;
        part.weight = reinterpret_cast<const uint8_t*>(all.weight) + num_panels * panel_bytes;
        if (part.bias != nullptr) part.bias += half;
        run(&part);
        for (int64_t r = 0; r < rows; ++r)
          write_gated(gate, gated, sums + r * 2 * width, width, row + r, column);
      }
    }
  };
  deal_panels(num_panels, piece, run_piece);
}

void CpuLinear::multiply_rows(const FusedLinearArgs& args, const void* x, int64_t x_stride,
                              const RoundedRows& gated) {
  const LinearWeight& weight = *args.linear.weight;
  const int64_t m = args.linear.x.shape[0];
  if (m == 0) return;
  const cpu::LinearKernel& kernel = float_kernel(weight);
  const DType x_dtype = kernel.round_row ? DType::kBF16 : DType::kF32;
  const bool is_gated = gates_pieces(args);
  workers_.reserve_scratch_floats(kernel.scratch_floats(m, weight.in_features) +
                                  (is_gated ? kGatedFloats : 0));
  const int64_t x_row_bytes = x_stride * size_bytes(x_dtype);
  const cpu::LinearPart all{.x = x,
                            .x_stride = x_stride,
                            .m = m,
                            .n = weight.out_features,
                            .k = weight.in_features,
                            .weight = weight.bytes(),
                            .bias = args.linear.bias ? args.linear.bias.as<float>() : nullptr,
                            .out = args.linear.out.as<float>(),
                            .out_stride = args.linear.out.strides[0],
                            .accumulate = args.linear.accumulate,
                            .panel_begin = 0,
                            .panel_end = 0,
                            .scratch = nullptr};
  const int64_t piece = kernel.piece_panels == nullptr ? 0 : kernel.piece_panels(m);
  if (is_gated) {
    const auto rows_of = [&](int64_t row, int64_t count, float* rest) {
      cpu::LinearPart part = all;
      part.x = static_cast<const std::byte*>(x) + row * x_row_bytes;
      part.m = count;
      part.scratch = rest;
      return part;
    };
    return run_gated(all, *args.gate, gated,
                     cpu::panels_bytes(kPanelWidth, weight.in_features, weight.dtype),
                     piece == 0 ? 2 * kPanelsAtOnce : piece, kernel.run, rows_of);
  }
  if (transposes(kernel, args.linear, x_dtype)) {
    run_transposed(kernel, *weight.rows, all, x_dtype);
  } else {
    deal_panels(num_panels(weight.out_features), piece,
                [&](int64_t begin, int64_t end, int thread_idx) {
                  cpu::LinearPart part = all;
                  part.panel_begin = begin;
                  part.panel_end = end;
                  part.scratch = workers_.scratch<float>(thread_idx);
                  if (!weight.rows || weight.rows->is_packed)
                    kernel.run(&part);
                  else
                    run_on_rows(kernel, *weight.rows, part,
                                panels_[static_cast<size_t>(thread_idx)].data());
                });
  }
  if (args.gate) activate_gate(args, gated);
}

void CpuLinear::activate_gate(const FusedLinearArgs& args, const RoundedRows& gated) {
  const Tensor& gate_up = args.linear.out;
  const int64_t width = gate_up.shape[1] / 2;
  pool_.parallel_for(gate_up.shape[0], std::max<int64_t>(1, kRoundedAtLeast / (2 * width)),
                     [&](int64_t begin, int64_t end, int) {
                       for (int64_t r = begin; r < end; ++r)
                         write_gated(*args.gate, gated,
                                     gate_up.as<float>() + r * gate_up.strides[0], width, r, 0);
                     });
}

void CpuLinear::write_gated(const GatedActivationArgs& gate, const RoundedRows& gated, float* both,
                            int64_t width, int64_t row, int64_t column) const {
  const auto activate = kernels_.gated[static_cast<size_t>(gate.activation)];
  if (gated.data == nullptr)
    return activate(both, both + width, width,
                    gate.out.as<float>() + row * gate.out.strides[0] + column);
  activate(both, both + width, width, both);
  kernels_.linear_bf16.round_row(both, width, gated.row(row) + column);
}

bool CpuLinear::transposes(const cpu::LinearKernel& kernel, const LinearArgs& args,
                           DType x_dtype) const {
  const LinearWeight& weight = *args.weight;
  if (!kernel.run_transposed || !weight.rows || weight.rows->is_packed) return false;
  const int64_t m = args.x.shape[0];
  const int64_t k = weight.in_features;
  return m >= kernel.transposed_at_least * num_panels(m) && m <= kPanelsAtOnce * kPanelWidth &&
         k % 2 == 0 && cpu::panels_bytes(m, k, x_dtype) <= panels_[0].num_bytes() &&
         std::ranges::all_of(weight.rows->parts, [&](const ConstTensor& part) {
           return part.dtype == weight.dtype && part.shape[0] >= kPanelWidth &&
                  part.is_contiguous();
         });
}

// Packs the rows of x as those of a weight, and multiplies the rows of the weight with them.
void CpuLinear::run_transposed(const cpu::LinearKernel& kernel, const LinearRows& weight,
                               const cpu::LinearPart& all, DType x_dtype) {
  ConstTensor x(all.x, x_dtype, {all.m, all.k});
  x.strides[0] = all.x_stride;
  std::byte* panels = panels_[0].data();
  cpu::pack_panels(workers_, std::span(&x, 1), x_dtype, panels);
  const cpu::StackedRows rows(weight.parts);
  deal_panels(num_panels(all.n), kPanelsAtOnce, [&](int64_t begin, int64_t end, int) {
    for (size_t i = 0; i < weight.parts.size(); ++i) {
      const int64_t first = std::max(begin * kPanelWidth, rows.starts[i]);
      const int64_t last = std::min(end * kPanelWidth, rows.starts[i + 1]);
      if (first >= last) continue;
      const int64_t column = rows.starts[i];
      const cpu::TransposedPart part{.rows = weight.parts[i].data,
                                     .n = weight.parts[i].shape[0],
                                     .k = all.k,
                                     .row_begin = first - column,
                                     .row_end = last - column,
                                     .x = panels,
                                     .m = all.m,
                                     .bias = all.bias ? all.bias + column : nullptr,
                                     .out = all.out + column,
                                     .out_stride = all.out_stride,
                                     .accumulate = all.accumulate};
      kernel.run_transposed(&part);
    }
  });
}

// Packs a few panels, multiplies with them, and packs the next over them.
void CpuLinear::run_on_rows(const cpu::LinearKernel& kernel, const LinearRows& weight,
                            const cpu::LinearPart& part, std::byte* panels) const {
  const cpu::StackedRows rows(weight.parts);
  const int64_t panel_bytes = cpu::panels_bytes(kPanelWidth, part.k, weight.dtype);
  for (int64_t p = part.panel_begin; p < part.panel_end; p += kPanelsAtOnce) {
    const int64_t count = std::min(kPanelsAtOnce, part.panel_end - p);
    for (int64_t i = 0; i < count; ++i)
      cpu::pack_panel(kernels_, rows, p + i, part.k, weight.dtype, panels + i * panel_bytes);
    cpu::LinearPart some = part;
    const int64_t column = p * kPanelWidth;
    some.n = part.n - column;
    some.weight = panels;
    some.bias = part.bias ? part.bias + column : nullptr;
    some.out = part.out + column;
    some.panel_begin = 0;
    some.panel_end = count;
    kernel.run(&some);
  }
}

void CpuLinear::multiply_quantized(const FusedLinearArgs& args, const RoundedRows& gated) {
  const LinearWeight& weight = *args.linear.weight;
  const int64_t m = args.linear.x.shape[0];
  const int64_t k = weight.in_features;
  const cpu::QuantizedRows rows(kernels_, weight, m, rounded_);
  workers_.reserve_scratch_floats(k + cpu::QuantizedRows::scratch_floats(k));
  workers_.reserve_scratch(rows.product_bytes());
  // One row is rounded sooner than a thread wakes.
  pool_.parallel_for(m, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    auto* normed = workers_.scratch<float>(thread_idx);
    for (int64_t r = begin; r < end; ++r)
      rows.write(r, normed_row(args, r, normed), weight, normed + k);
  });
  cpu::QuantizedPart all = rows.part(0, m, weight);
  all.bias = args.linear.bias ? args.linear.bias.as<float>() : nullptr;
  all.out = args.linear.out.as<float>();
  all.out_stride = args.linear.out.strides[0];
  all.accumulate = args.linear.accumulate;
  if (gates_pieces(args)) {
    workers_.reserve_scratch(kGatedFloats * static_cast<int64_t>(sizeof(float)) +
                             rows.product_bytes());
    const auto rows_of = [&](int64_t row, int64_t count, float* rest) {
      cpu::QuantizedPart part = rows.part(row, count, weight);
      part.bias = all.bias;
      part.unpacked = reinterpret_cast<uint8_t*>(rest);
      return part;
    };
    return run_gated(all, *args.gate, gated, rows.layout().panel_bytes, kPanelsAtOnce,
                     rows.kernel(), rows_of);
  }
  deal_panels(num_panels(weight.out_features), kPanelsAtOnce,
              [&](int64_t begin, int64_t end, int thread) {
                cpu::QuantizedPart part = all;
                part.panel_begin = begin;
                part.panel_end = end;
                part.unpacked = workers_.scratch<uint8_t>(thread);
                rows.kernel()(&part);
              });
  if (args.gate) activate_gate(args, gated);
}

}  // namespace llmserve
