// The tensor memory accelerator by the PTX ISA, "cp.async.bulk.tensor" and "Swizzling modes", and
// the driver's maps by its documentation: of bf16, in boxes of 128 swizzled bytes.
#include "tensor_copies.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "async_copies.h"
#include "device.h"
#include "phases.h"

namespace llmserve::cuda::emulator {
namespace {

constexpr int kMaxRank = 4;

// What a map holds here.
struct Matrix {
  uint64_t data;
  uint64_t sizes[kMaxRank];
  uint64_t strides[kMaxRank];  // bytes; of the innermost index 2
  uint32_t box[kMaxRank];
  uint64_t rank;
};
static_assert(sizeof(Matrix) <= sizeof(CUtensorMap));

struct Copy {
  std::byte* to;
  Matrix matrix;
  uint64_t* barrier;
  int64_t at[kMaxRank];
};
std::vector<Copy> on_their_way;
bool lands_at_once = false;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "a copy of a box, emulated: %s\n", what);
  std::abort();
}

void land(const Copy& copy) {
  const Matrix& m = copy.matrix;
  uint64_t count = 1;
  for (uint64_t i = 0; i < m.rank; ++i) count *= m.box[i];
  for (uint64_t e = 0; e < count; ++e) {
    bool is_there = true;
    uint64_t rest = e;
    uint64_t from = m.data;
    for (uint64_t i = 0; i < m.rank; ++i) {
      const int64_t index = copy.at[i] + static_cast<int64_t>(rest % m.box[i]);
      rest /= m.box[i];
      is_there &= index >= 0 && index < static_cast<int64_t>(m.sizes[i]);
      from += static_cast<uint64_t>(index) * m.strides[i];
    }
    uint16_t value = 0;
    if (is_there) std::memcpy(&value, reinterpret_cast<const void*>(from), sizeof value);
    // By addresses: bits 4 to 6 are those of the row, 7 to 9, or not.
    const uint32_t address = shared_address(copy.to) + static_cast<uint32_t>(e * 2);
    const auto swizzled = static_cast<int64_t>(address ^ (address >> 7 & 7) << 4);
    std::memcpy(copy.to + (swizzled - static_cast<int64_t>(shared_address(copy.to))), &value,
                sizeof value);
  }
  count_bytes(copy.barrier, static_cast<int>(count * 2));
}

void copy(void* to, const CUtensorMap* map, uint64_t* barrier, std::initializer_list<int> at) {
  Copy mine{static_cast<std::byte*>(to), {}, barrier, {}};
  std::memcpy(&mine.matrix, map, sizeof mine.matrix);
  if (mine.matrix.rank != at.size()) fail("the map has another number of indices");
  if (shared_address(to) % 1024 != 0) fail("it goes to no multiple of 1,024 bytes");
  int64_t* index = mine.at;
  for (const int i : at) *index++ = i;
  if (lands_at_once)
    land(mine);
  else
    on_their_way.push_back(mine);
}

// The driver's, with what its documentation says of such maps.
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* gaps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const bool is_emulated = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && rank >= 1 &&
                           rank <= kMaxRank && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
                           swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] * 2 == 128 &&
                           fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  if (!is_emulated || reinterpret_cast<uintptr_t>(map) % 64 != 0 ||
      reinterpret_cast<uintptr_t>(data) % 16 != 0)
    return CUDA_ERROR_INVALID_VALUE;
  Matrix matrix{.data = reinterpret_cast<uint64_t>(data), .rank = rank};
  for (cuuint32_t i = 0; i < rank; ++i) {
    matrix.sizes[i] = sizes[i];
    matrix.strides[i] = i == 0 ? 2 : strides[i - 1];
    matrix.box[i] = box[i];
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32 || box[i] == 0 || box[i] > 256 ||
        gaps[i] != 1 || (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >> 40 != 0)))
      return CUDA_ERROR_INVALID_VALUE;
  }
  std::memset(static_cast<void*>(map), 0, sizeof *map);
  std::memcpy(static_cast<void*>(map), &matrix, sizeof matrix);
  return CUDA_SUCCESS;
}

}  // namespace

void clear_tensor_copies(bool land_at_once) {
  if (!on_their_way.empty()) fail("nobody waited for it");
  lands_at_once = land_at_once;
}

void land_copies(uint64_t* barrier) {
  std::vector<Copy> others;
  for (const Copy& copy : on_their_way) {
    if (copy.barrier == barrier)
      land(copy);
    else
      others.push_back(copy);
  }
  on_their_way = std::move(others);
}

void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int i, int j) {
  copy(to, map, barrier, {i, j});
}
void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int i, int j, int k, int l) {
  copy(to, map, barrier, {i, j, k, l});
}

}  // namespace llmserve::cuda::emulator

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* found) {
  // LLMSERVE_EMULATOR_DRIVER=old: without maps.
  const char* age = std::getenv("LLMSERVE_EMULATOR_DRIVER");
  const bool is_there = std::strcmp(name, "cuTensorMapEncodeTiled") == 0 &&
                        (age == nullptr || std::strcmp(age, "old") != 0);
  *function = is_there ? reinterpret_cast<void*>(&llmserve::cuda::emulator::encode) : nullptr;
  *found = is_there ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
