// Packing of weights, the search for bad values, and the linear layer.
#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "core/error.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/host_ops.h"

namespace llmserve {
namespace {

using cpu::kPanelWidth;
using cpu::num_panels;

// K as it is stored: bf16 goes in pairs.
int64_t padded_depth(int64_t k, DType dtype) { return dtype == DType::kBF16 ? (k + 1) / 2 * 2 : k; }

// The rows of all parts, one after another.
struct StackedRows {
  std::span<const ConstTensor> parts;
  std::vector<int64_t> starts;

  explicit StackedRows(std::span<const ConstTensor> parts_in) : parts(parts_in), starts{0} {
    for (const ConstTensor& part : parts) starts.push_back(starts.back() + part.shape[0]);
  }
  // One row as a tensor of its own; none past the end.
  ConstTensor row(int64_t idx) const {
    if (idx >= starts.back()) return ConstTensor{};
    const auto after = std::upper_bound(starts.begin(), starts.end(), idx);
    const size_t part = static_cast<size_t>(after - starts.begin()) - 1;
    return parts[part].slice(0, idx - starts[part], 1);
  }
};

// A chunk of K is written for all columns of a panel before the next: its lines, 16 KiB of them,
// are still in the L1 when the second half of each is written. Even, so that pairs stay whole.
constexpr int64_t kPackDepth = 256;

// Elements of x that a thread rounds to bf16 in about the time in which another is woken.
constexpr int64_t kRoundedAtLeast = 8192;

// K of rows in bf16 as tiles of AMX take it: what follows the row's own is zero.
int64_t padded_to_tiles(int64_t k) { return (k + 31) / 32 * 32; }

// Elements from one row of x in bf16 to the next: whole cache lines, and one more, so that rows of
// a power of two do not fall into the same sets of the L1.
int64_t rounded_stride(int64_t k) { return padded_to_tiles(k) + 32; }

// Eight columns of a panel over one chunk of K, as words: an f32 or a pair of bf16.
class ColumnPacker {
 public:
  // Where another panel follows its rows are prefetched: a processor follows sixteen rows at once
  // badly by itself.
  ColumnPacker(const cpu::KernelTable& kernels, DType dtype, bool has_next)
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

  const cpu::KernelTable& kernels_;
  const DType dtype_;
  const int64_t per_word_;
  const bool has_next_;
  float buffer_[8][kPackDepth];
};

void pack_panel(const cpu::KernelTable& kernels, const StackedRows& rows, int64_t panel_idx,
                int64_t k, DType dtype, float* panel) {
  ConstTensor columns[kPanelWidth];
  for (int64_t i = 0; i < kPanelWidth; ++i) columns[i] = rows.row(panel_idx * kPanelWidth + i);
  ColumnPacker packer(kernels, dtype, (panel_idx + 1) * kPanelWidth < rows.starts.back());
  const int64_t per_word = dtype == DType::kBF16 ? 2 : 1;
  for (int64_t depth = 0; depth < k; depth += kPackDepth) {
    for (int64_t half = 0; half < kPanelWidth; half += 8) {
      packer.pack(columns + half, depth, std::min(kPackDepth, k - depth),
                  panel + depth / per_word * kPanelWidth + half);
    }
  }
}

// The first element of [begin, end) whose exponent bits are all ones, or end. Blocks are tested at
// memory speed; the tensor may be a mapped file, unaligned.
template <class Bits>
int64_t find_non_finite(bool (*any)(const void*, int64_t, Bits), const void* data, int64_t begin,
                        int64_t end, Bits exponent) {
  constexpr int64_t kBlock = 1 << 16;  // at most so many are looked at one by one, once
  const auto* bytes = static_cast<const std::byte*>(data);
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    if (!any(bytes + at * static_cast<int64_t>(sizeof(Bits)), count, exponent)) continue;
    for (int64_t i = at; i < at + count; ++i)
      if (any(bytes + i * static_cast<int64_t>(sizeof(Bits)), 1, exponent)) return i;
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
  LinearWeight weight{.out_features = n,
                      .in_features = k,
                      .dtype = dtype,
                      .data = Buffer(packed_bytes(n, k, dtype))};
  pack_all(parts, dtype, weight.data.data());
  return weight;
}

void CpuBackend::pack_all(std::span<const ConstTensor> parts, DType dtype, std::byte* to) {
  const StackedRows rows(parts);
  const int64_t k = parts[0].shape[1];
  const int64_t panel_bytes = packed_bytes(kPanelWidth, k, dtype);
  pool_.parallel_for(num_panels(rows.starts.back()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p)
      pack_panel(kernels_, rows, p, k, dtype, reinterpret_cast<float*>(to + p * panel_bytes));
  });
}

LinearWeight CpuBackend::defer_linear(std::span<const ConstTensor> parts, DType dtype) {
  const int64_t n = check_linear_parts(parts, dtype);
  const int64_t k = parts[0].shape[1];
  LinearWeight weight{.out_features = n, .in_features = k, .dtype = dtype};
  weight.rows =
      std::make_shared<LinearRows>(LinearRows{.parts = {parts.begin(), parts.end()},
                                              .dtype = dtype,
                                              .packed = Buffer(packed_bytes(n, k, dtype))});
  const int64_t room = packed_bytes(kPanelsAtOnce * kPanelWidth, k, dtype);
  panels_.resize(scratch_.size());
  for (Buffer& buffer : panels_)
    if (buffer.num_bytes() < room) buffer = Buffer(room);
  return weight;
}

void CpuBackend::pack_rows(LinearRows& rows) {
  if (rows.is_packed) return;
  pack_all(rows.parts, rows.dtype, rows.packed.data());
  rows.is_packed = true;
  rows.parts.clear();
}

int64_t CpuBackend::first_non_finite(const ConstTensor& tensor) {
  if (!tensor.is_contiguous())
    throw InvalidArgument("first_non_finite.tensor: expected a contiguous tensor");
  const int64_t none = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> first{none};
  pool_.parallel_for(tensor.num_elements(), 1 << 16, [&](int64_t begin, int64_t end, int) {
    int64_t found = end;
    if (tensor.dtype == DType::kF32)
      found = find_non_finite<uint32_t>(kernels_.any_non_finite_32, tensor.data, begin, end,
                                        0x7f800000u);
    else
      found = find_non_finite<uint16_t>(kernels_.any_non_finite_16, tensor.data, begin, end,
                                        tensor.dtype == DType::kBF16 ? 0x7f80 : 0x7c00);
    if (found == end) return;
    int64_t known = first.load();
    while (found < known && !first.compare_exchange_weak(known, found)) {
    }
  });
  return first == none ? -1 : first.load();
}

int64_t CpuBackend::rounded_bytes(const StepShape& shape) const {
  const bool is_bf16 = shape.weight_dtype == DType::kBF16 && kernels_.linear_bf16.round_row;
  return std::max(shape.activation_bytes,
                  is_bf16 ? rounded_stride(shape.max_in_features) * size_bytes(DType::kBF16) : 0) *
         shape.max_tokens;
}

CpuBackend::RoundedRows CpuBackend::round_rows(const FusedLinearArgs& args) {
  const ConstTensor& x = args.linear.x;
  const int64_t k = x.shape[1];
  const int64_t even_k = (k + 1) / 2 * 2;
  const int64_t stride = rounded_stride(k);
  const int64_t bytes = x.shape[0] * stride * size_bytes(DType::kBF16);
  if (rounded_.num_bytes() < bytes) rounded_ = Buffer(bytes);
  const RoundedRows rows{reinterpret_cast<uint16_t*>(rounded_.data()), stride};
  pool_.parallel_for(x.shape[0], std::max<int64_t>(1, kRoundedAtLeast / k),
                     [&](int64_t begin, int64_t end, int thread_idx) {
                       auto* room = reinterpret_cast<float*>(scratch(thread_idx));
                       for (int64_t r = begin; r < end; ++r) {
                         kernels_.linear_bf16.round_row(normed_row(args, r, room), k, rows.row(r));
                         std::fill(rows.row(r) + even_k, rows.row(r) + padded_to_tiles(k), 0);
                       }
                     });
  return rows;
}

CpuBackend::RoundedRows CpuBackend::rounded_in(void* memory, const LinearArgs& args) const {
  const LinearWeight& weight = *args.weight;
  const int64_t k = weight.in_features;
  const int64_t stride = rounded_stride(k);
  const bool is_rounded = !weight.format && float_kernel(weight).round_row;
  const bool has_room =
      args.x.is_contiguous() && stride * size_bytes(DType::kBF16) <= k * size_bytes(DType::kF32);
  if (!is_rounded || !has_room || k != padded_to_tiles(k)) return {};
  return {static_cast<uint16_t*>(memory), stride};
}

const float* CpuBackend::normed_row(const FusedLinearArgs& args, int64_t r, float* room) const {
  if (!args.norm) return args.linear.x.as<float>() + r * args.linear.x.strides[0];
  const RmsNormArgs& norm = *args.norm;
  kernels_.rms_norm(norm.x.as<float>() + r * norm.x.strides[0], norm.weight.as<float>(),
                    norm.weight.shape[0], norm.eps, norm.weight_offset, room);
  return room;
}

void CpuBackend::linear(const LinearArgs& args) {
  validate(args);
  multiply({.norm = {}, .linear = args, .gate = {}}, {});
}

void CpuBackend::fused_linear(const FusedLinearArgs& args) {
  validate(args);
  multiply(args, {});
}

void CpuBackend::fused_mlp(const FusedMlpArgs& args) {
  validate(args);
  const RoundedRows between = rounded_in(args.up.gate->out.data, args.down);
  multiply(args.up, between);
  multiply_written(args.down, between);
}

void CpuBackend::multiply_written(const LinearArgs& args, const RoundedRows& x) {
  const FusedLinearArgs alone{.norm = {}, .linear = args, .gate = {}};
  x.data == nullptr ? multiply(alone, {}) : multiply_rows(alone, x.data, x.stride, {});
}

bool CpuBackend::gates_pieces(const FusedLinearArgs& args) {
  const LinearWeight& weight = *args.linear.weight;
  const bool is_packed = !weight.rows || weight.rows->is_packed;
  return args.gate && is_packed && weight.out_features % (2 * cpu::kPanelWidth) == 0 &&
         args.linear.x.shape[0] >= kGatedRows;
}

void CpuBackend::multiply(const FusedLinearArgs& args, const RoundedRows& gated) {
  const LinearWeight& weight = *args.linear.weight;
  if (args.linear.x.shape[0] == 0) return;
  if (weight.format) return multiply_quantized(args, gated);
  if (float_kernel(weight).round_row) {
    reserve_scratch(weight.in_features * static_cast<int64_t>(sizeof(float)));
    const RoundedRows x = round_rows(args);
    return multiply_rows(args, x.data, x.stride, gated);
  }
  if (args.norm) rms_norm(*args.norm);
  multiply_rows(args, args.linear.x.data, args.linear.x.strides[0], gated);
}

void CpuBackend::multiply_rows(const FusedLinearArgs& args, const void* x, int64_t x_stride,
                               const RoundedRows& gated) {
  const LinearWeight& weight = *args.linear.weight;
  const int64_t m = args.linear.x.shape[0];
  if (m == 0) return;
  const cpu::LinearKernel& kernel = float_kernel(weight);
  const DType x_dtype = kernel.round_row ? DType::kBF16 : DType::kF32;
  const bool is_gated = gates_pieces(args);
  reserve_scratch((kernel.scratch_floats(m, weight.in_features) + (is_gated ? kGatedFloats : 0)) *
                  static_cast<int64_t>(sizeof(float)));
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
                     packed_bytes(kPanelWidth, weight.in_features, weight.dtype),
                     piece == 0 ? 2 * kPanelsAtOnce : piece, kernel.run, rows_of);
  }
  if (turns(kernel, args.linear, x_dtype)) {
    run_turned(kernel, *weight.rows, all, x_dtype);
  } else {
    deal_panels(num_panels(weight.out_features), piece,
                [&](int64_t begin, int64_t end, int thread_idx) {
                  cpu::LinearPart part = all;
                  part.panel_begin = begin;
                  part.panel_end = end;
                  part.scratch = reinterpret_cast<float*>(scratch(thread_idx));
                  if (!weight.rows || weight.rows->is_packed)
                    kernel.run(&part);
                  else
                    run_on_rows(kernel, *weight.rows, part,
                                panels_[static_cast<size_t>(thread_idx)].data());
                });
  }
  if (args.gate) activate_gate(args, gated);
}

void CpuBackend::activate_gate(const FusedLinearArgs& args, const RoundedRows& gated) {
  const Tensor& gate_up = args.linear.out;
  const int64_t width = gate_up.shape[1] / 2;
  pool_.parallel_for(gate_up.shape[0], std::max<int64_t>(1, kRoundedAtLeast / (2 * width)),
                     [&](int64_t begin, int64_t end, int) {
                       for (int64_t r = begin; r < end; ++r)
                         write_gated(*args.gate, gated,
                                     gate_up.as<float>() + r * gate_up.strides[0], width, r, 0);
                     });
}

void CpuBackend::write_gated(const GatedActivationArgs& gate, const RoundedRows& gated, float* both,
                             int64_t width, int64_t row, int64_t column) const {
  const auto activate = kernels_.gated[static_cast<size_t>(gate.activation)];
  if (gated.data == nullptr)
    return activate(both, both + width, width,
                    gate.out.as<float>() + row * gate.out.strides[0] + column);
  activate(both, both + width, width, both);
  kernels_.linear_bf16.round_row(both, width, gated.row(row) + column);
}

bool CpuBackend::turns(const cpu::LinearKernel& kernel, const LinearArgs& args,
                       DType x_dtype) const {
  const LinearWeight& weight = *args.weight;
  if (!kernel.run_turned || !weight.rows || weight.rows->is_packed) return false;
  const int64_t m = args.x.shape[0];
  const int64_t k = weight.in_features;
  return m >= kernel.turned_at_least * num_panels(m) && m <= kPanelsAtOnce * kPanelWidth &&
         k % 2 == 0 && packed_bytes(m, k, x_dtype) <= panels_[0].num_bytes() &&
         std::ranges::all_of(weight.rows->parts, [&](const ConstTensor& part) {
           return part.dtype == weight.dtype && part.shape[0] >= kPanelWidth &&
                  part.is_contiguous();
         });
}

// Packs the rows of x as those of a weight, and multiplies the rows of the weight with them.
void CpuBackend::run_turned(const cpu::LinearKernel& kernel, const LinearRows& weight,
                            const cpu::LinearPart& all, DType x_dtype) {
  ConstTensor x(all.x, x_dtype, {all.m, all.k});
  x.strides[0] = all.x_stride;
  std::byte* panels = panels_[0].data();
  pack_all(std::span(&x, 1), x_dtype, panels);
  const StackedRows rows(weight.parts);
  deal_panels(num_panels(all.n), kPanelsAtOnce, [&](int64_t begin, int64_t end, int) {
    for (size_t i = 0; i < weight.parts.size(); ++i) {
      const int64_t first = std::max(begin * kPanelWidth, rows.starts[i]);
      const int64_t last = std::min(end * kPanelWidth, rows.starts[i + 1]);
      if (first >= last) continue;
      const int64_t column = rows.starts[i];
      const cpu::TurnedPart part{.rows = weight.parts[i].data,
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
      kernel.run_turned(&part);
    }
  });
}

// Packs a few panels, multiplies with them, and packs the next over them.
void CpuBackend::run_on_rows(const cpu::LinearKernel& kernel, const LinearRows& weight,
                             const cpu::LinearPart& part, std::byte* panels) const {
  const StackedRows rows(weight.parts);
  const int64_t panel_bytes = packed_bytes(kPanelWidth, part.k, weight.dtype);
  for (int64_t p = part.panel_begin; p < part.panel_end; p += kPanelsAtOnce) {
    const int64_t count = std::min(kPanelsAtOnce, part.panel_end - p);
    for (int64_t i = 0; i < count; ++i)
      pack_panel(kernels_, rows, p + i, part.k, weight.dtype,
                 reinterpret_cast<float*>(panels + i * panel_bytes));
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

}  // namespace llmserve
