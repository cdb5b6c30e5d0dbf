#include "kernels/cpu/quantized_packing.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/float_types.h"
#include "kernels/cpu/packing.h"

namespace llmserve::cpu {
namespace {

constexpr int64_t kCacheLine = 64;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Words of a panel's rows that are woven at once: their lines, 16 KiB of them, are still in the L1
// when the second half of each is written.
constexpr int64_t kWovenWords = 256;

// Quads of integers of less than 8 bits as QuantizedLayout has them, over the first part of their
// memory.
template <int kBits>
void join_quads(int8_t* row, int64_t count) {
  constexpr int kHighBits = kBits - 4;
  constexpr int64_t kQuads = kHighBits == 0 ? 2 : 8 / kHighBits;
  constexpr uint32_t kHighMask = 0x01010101u * ((1u << kHighBits) - 1);
  int8_t* to = row;
  const auto write = [&](uint32_t word) {
    std::memcpy(to, &word, sizeof(word));
    to += sizeof(word);
  };
  for (int64_t i = 0; i < count; i += 4 * kQuads) {
    uint32_t quads[kQuads];
    std::memcpy(quads, row + i, sizeof(quads));
    uint32_t high = 0;
    for (int q = 0; q < kQuads; ++q) high |= (quads[q] >> 4 & kHighMask) << q * kHighBits;
    if (kHighBits > 0) write(high);
    for (int q = 0; q < kQuads; q += 2)
      write((quads[q] & 0x0f0f0f0fu) | (quads[q + 1] & 0x0f0f0f0fu) << 4);
  }
}

// The same of 2 or 3 bits.
template <int kBits>
void join_quarters(int8_t* row, int64_t count) {
  int8_t* to = row;
  for (int64_t i = 0; i < count; i += 16) {
    uint32_t quads[4];
    std::memcpy(quads, row + i, sizeof(quads));
    uint32_t lower = 0;
    uint32_t upper = 0;
    for (int q = 0; q < 4; ++q) {
      lower |= (quads[q] & 0x03030303u) << 2 * q;
      upper |= (quads[q] >> 2 & 0x01010101u) << q;
    }
    std::memcpy(to, &lower, sizeof(lower));
    to += sizeof(lower);
    if (kBits == 2) continue;
    upper |= upper >> 4;  // two places in a byte, of the first and the third
    *to++ = static_cast<int8_t>(upper);
    *to++ = static_cast<int8_t>(upper >> 16);
  }
}

void join_quads(int8_t* row, int64_t count, int bits) {
  if (bits == 2) return join_quarters<2>(row, count);
  if (bits == 3) return join_quarters<3>(row, count);
  if (bits == 4) return join_quads<4>(row, count);
  return bits == 5 ? join_quads<5>(row, count) : join_quads<6>(row, count);
}

// Quads of codes, four columns in each 16 bytes, with their first two K before the others.
void part_quads(uint8_t* panel, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 16) {
    uint16_t quads[8];
    uint16_t pairs[8];
    std::memcpy(quads, panel + i, sizeof(quads));
    for (int c = 0; c < 4; ++c) {
      pairs[c] = quads[2 * c];
      pairs[4 + c] = quads[2 * c + 1];
    }
    std::memcpy(panel + i, pairs, sizeof(pairs));
  }
}

// Takes whole lines from memory, one after another.
class Room {
 public:
  explicit Room(std::byte* memory) : at_(memory) {}
  template <class T>
  T* take(int64_t count) {
    auto* taken = reinterpret_cast<T*>(at_);
    at_ += bytes<T>(count);
    return taken;
  }
  template <class T>
  static int64_t bytes(int64_t count) {
    return round_up(count * static_cast<int64_t>(sizeof(T)), kCacheLine);
  }

 private:
  std::byte* at_;
};

// The rows of a panel before they are woven together, zero-padded to the layout's K.
class PanelRows {
 public:
  // Bytes of memory that it works in.
  static int64_t num_bytes(const QuantizedLayout& layout) {
    const int64_t groups = kPanelWidth * layout.num_groups;
    return Room::bytes<int8_t>(kPanelWidth * stride_of(layout)) + Room::bytes<float>(kPanelWidth) +
           2 * Room::bytes<float>(kPanelWidth * num_scales(layout)) +
           2 * Room::bytes<int8_t>(groups) + Room::bytes<int16_t>(groups);
  }

  PanelRows(const QuantizedLayout& layout, int64_t k, std::byte* memory)
      : layout_(layout), k_(k), stride_(stride_of(layout)) {
    Room room(memory);
    const int64_t groups = kPanelWidth * layout.num_groups;
    values_ = room.take<int8_t>(kPanelWidth * stride_);
    scales_ = room.take<float>(kPanelWidth * num_scales(layout));
    mins_ = room.take<float>(kPanelWidth * num_scales(layout));
    row_scales_ = room.take<float>(kPanelWidth);
    scale_codes_ = room.take<int8_t>(groups);
    min_codes_ = room.take<int8_t>(groups);
    zeros_ = room.take<int16_t>(groups);
  }

  // To be filled, but for what follows K.
  QuantizedRow row(int64_t column) const {
    const QuantizedRow of{.values = values_ + column * stride_,
                          .scales = scales_ + column * num_scales(layout_),
                          .mins = mins_ + column * num_scales(layout_),
                          .scale_codes = scale_codes_ + column * layout_.num_groups,
                          .min_codes = min_codes_ + column * layout_.num_groups,
                          .zeros = zeros_ + column * layout_.num_groups,
                          .row_scale = row_scales_ + column};
    std::memset(of.values + k_, 0, static_cast<size_t>(stride_ - k_));
    return of;
  }
  void clear(int64_t column) const {
    const QuantizedRow of = row(column);
    std::memset(of.values, 0, static_cast<size_t>(k_));
    std::fill_n(of.scales, num_scales(layout_), 0.0f);
    std::fill_n(of.mins, num_scales(layout_), 0.0f);
    std::fill_n(of.scale_codes, layout_.num_groups, int8_t{0});
    std::fill_n(of.min_codes, layout_.num_groups, int8_t{0});
    std::fill_n(of.zeros, layout_.num_groups, int16_t{0});
    *of.row_scale = 0;
  }
  // Once: rows of less than 8 bits are not the same after.
  void weave(const KernelTable& kernels, uint8_t* panel) const {
    if (layout_.bits < 8)
      for (int64_t c = 0; c < kPanelWidth; ++c)
        join_quads(values_ + c * stride_, stride_, layout_.bits);
    if (layout_.bits == 3) return weave_quarters(panel);
    const int64_t num_words = stride_ * layout_.bits / 32;
    for (int64_t i = 0; i < num_words; i += kWovenWords) {
      for (int64_t half = 0; half < kPanelWidth; half += 8) {
        const void* rows[8];
        for (int64_t r = 0; r < 8; ++r) rows[r] = values_ + (half + r) * stride_ + i * 4;
        kernels.pack_words(rows, std::min(kWovenWords, num_words - i),
                           reinterpret_cast<float*>(panel) + i * kPanelWidth + half);
      }
    }
  }
  void store_scales(uint8_t* panel) const {
    uint8_t* to = panel + layout_.scales_begin;
    const int64_t count = num_scales(layout_);
    const auto as_is = [](auto value) { return value; };
    for (int64_t i = 0; i < count; ++i) {
      to = store_stored(scales_ + i, mins_ + i, count, to);
      if (layout_.zero_bytes > 0) to = store_zeros(zeros_ + i, to);
      if (layout_.scale_shift == 0) continue;
      for (int64_t g = i << layout_.scale_shift; g < (i + 1) << layout_.scale_shift; ++g)
        to = store(scale_codes_ + g, min_codes_ + g, layout_.num_groups, to, as_is);
    }
    if (layout_.row_scales_begin > 0)
      std::memcpy(panel + layout_.row_scales_begin, row_scales_, kPanelWidth * sizeof(float));
  }

 private:
  static int64_t num_scales(const QuantizedLayout& layout) {
    return layout.num_groups >> layout.scale_shift;
  }
  static int64_t stride_of(const QuantizedLayout& layout) {
    return round_up(layout.num_groups * layout.group_size, 4);
  }

  // A group's scales (and minima) in the layout's storage.
  uint8_t* store_stored(const float* scales, const float* mins, int64_t stride, uint8_t* to) const {
    const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
    switch (layout_.scale_storage) {
      case ScaleStorage::kHalves:
        return store(scales, mins, stride, to, f32_to_f16);
      case ScaleStorage::kBfloats:
        return store(scales, mins, stride, to, f32_to_bf16);
      case ScaleStorage::kFp8:
        return store(scales, mins, stride, to, f32_to_fp8);
      case ScaleStorage::kExponents:
        return store(scales, mins, stride, to,
                     [&](float x) { return static_cast<uint8_t>(bits(x) >> 23); });
      case ScaleStorage::kFloats:
        break;
    }
    return store(scales, mins, stride, to, bits);
  }

  // One of each row.
  uint8_t* store_zeros(const int16_t* zeros, uint8_t* to) const {
    for (int64_t c = 0; c < kPanelWidth; ++c, to += layout_.zero_bytes)
      std::memcpy(to, zeros + c * layout_.num_groups, static_cast<size_t>(layout_.zero_bytes));
    return to;
  }

  // Words that half words follow.
  void weave_quarters(uint8_t* panel) const {
    for (int64_t i = 0; i < stride_ * 3 / 8; i += 6) {
      for (int64_t c = 0; c < kPanelWidth; ++c) {
        std::memcpy(panel + c * 4, values_ + c * stride_ + i, 4);
        std::memcpy(panel + kPanelWidth * 4 + c * 2, values_ + c * stride_ + i + 4, 2);
      }
      panel += kPanelWidth * 6;
    }
  }

  // to [1 or 2][16] = what `stored` makes of a scale, and a minimum, of each row. Returns what
  // comes after it.
  template <class T, class Stored>
  uint8_t* store(const T* scales, const T* mins, int64_t stride, uint8_t* to, Stored stored) const {
    const auto write = [&](const T* values) {
      for (int64_t c = 0; c < kPanelWidth; ++c) {
        const auto x = stored(values[c * stride]);
        std::memcpy(to, &x, sizeof(x));
        to += sizeof(x);
      }
    };
    write(scales);
    if (layout_.has_min) write(mins);
    return to;
  }

  const QuantizedLayout& layout_;
  const int64_t k_;
  const int64_t stride_;
  int8_t* values_;  // [16, stride]
  float* scales_;   // [16, num_scales]
  float* mins_;
  float* row_scales_;    // [16]
  int8_t* scale_codes_;  // [16, groups]
  int8_t* min_codes_;
  int16_t* zeros_;
};

}  // namespace

QuantizedLayout layout_of(const LinearFormat& format, int64_t in_features) {
  const int64_t groups = format.num_groups(in_features);
  const int64_t padded = padded_columns(format, in_features);
  const int64_t integers = round_up(padded, 4) * kPanelWidth * format.bits / 8;
  const int64_t each = kPanelWidth * (format.has_min ? 2 : 1);
  const int zero_bytes = !format.has_zero ? 0 : format.bits == 8 ? 2 : 1;
  const int64_t scales = format.num_scales(in_features) * each * scale_bytes(format.scale_type) +
                         format.num_codes(in_features) * each + groups * kPanelWidth * zero_bytes;
  const int64_t row_scales = format.has_row_scale ? kPanelWidth * 4 : 0;
  QuantizedLayout layout{.bits = format.bits,
                         .scale_storage = static_cast<ScaleStorage>(format.scale_type),
                         .scale_bytes = static_cast<int>(scale_bytes(format.scale_type)),
                         .has_min = format.has_min,
                         .zero_bytes = zero_bytes,
                         .zero_point = format.zero_point(),
                         .table = format.table,
                         .num_groups = groups,
                         .group_size = format.group_size > 0 ? format.group_size : padded,
                         .scale_shift = format.scale_shift,
                         .scales_begin = integers,
                         .row_scales_begin = row_scales > 0 ? integers + scales : 0,
                         .panel_bytes = round_up(integers + scales + row_scales, kCacheLine),
                         .has_float_products = format.has_float_products(),
                         .values = {}};
  if (format.values) std::transform(format.values, format.values + 16, layout.values, f32_to_bf16);
  return layout;
}

int64_t quantized_bytes(const LinearFormat& format, int64_t out_features, int64_t in_features) {
  return num_panels(out_features) * layout_of(format, in_features).panel_bytes;
}

LinearWeight pack_quantized(CpuWorkers& workers, const LinearFormat& format, int64_t out_features,
                            int64_t in_features, const QuantizedRowReader& read) {
  LinearWeight weight{.out_features = out_features,
                      .in_features = in_features,
                      .format = &format,
                      .data = Buffer(quantized_bytes(format, out_features, in_features))};
  const QuantizedLayout layout = layout_of(format, in_features);
  const int64_t room = round_up(PanelRows::num_bytes(layout), kCacheLine);
  const Buffer memory(room * workers.num_threads());
  workers.pool().parallel_for(
      num_panels(out_features), 1, [&](int64_t begin, int64_t end, int thread) {
        const PanelRows rows(layout, in_features, memory.data() + thread * room);
        for (int64_t p = begin; p < end; ++p) {
          for (int64_t c = 0; c < kPanelWidth; ++c) {
            if (p * kPanelWidth + c < out_features)
              read(p * kPanelWidth + c, rows.row(c));
            else
              rows.clear(c);
          }
          auto* panel = reinterpret_cast<uint8_t*>(weight.data.data()) + p * layout.panel_bytes;
          rows.weave(workers.kernels(), panel);
          if (layout.has_float_products) part_quads(panel, layout.scales_begin);
          rows.store_scales(panel);
        }
      });
  return weight;
}

}  // namespace llmserve::cpu
