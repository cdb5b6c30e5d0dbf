// Maps of bf16 matrices for the tensor memory accelerator of sm_90 (tensor_copies.cuh): boxes of 64
// columns, whose rows of 128 bytes are swizzled as products of warpgroups read them (wgmma.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>
#include <string>

namespace llmserve::cuda {

class TensorMaps {
 public:
  static constexpr int kBoxColumns = 64;

  // None, and the reason in `problem`, where the driver cannot make maps.
  static std::optional<TensorMaps> find(std::string& problem);

  // Of [rows, columns], contiguous, from a multiple of 16 bytes on, whose columns are a multiple of
  // 8: boxes of `box_rows` (at most 256) rows, at (column, row). Throws NotSupported if the
  // driver refuses.
  CUtensorMap rows(const void* data, int64_t rows, int64_t columns, int box_rows) const;
  // The same of rows in two halves, each a multiple of 8: a box has by turns eight rows of the
  // first half and the eight of the second that have their places. At (column, 0, 0, eights).
  CUtensorMap halves(const void* data, int64_t rows, int64_t columns, int box_rows) const;

 private:
  using Encode = decltype(&cuTensorMapEncodeTiled);
  explicit TensorMaps(Encode encode) : encode_(encode) {}
  CUtensorMap make(const void* data, uint32_t rank, const cuuint64_t* sizes,
                   const cuuint64_t* strides, const cuuint32_t* box) const;

  Encode encode_;
};

}  // namespace llmserve::cuda
