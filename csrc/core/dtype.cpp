#include "core/dtype.h"

#include <array>
#include <cstddef>

namespace llmserve {
namespace {

struct Row {
  std::string_view name;
  int64_t size_bytes;
};

// In the order of the enumeration.
constexpr std::array<Row, 12> kRows{{{"float32", 4},
                                     {"float16", 2},
                                     {"bfloat16", 2},
                                     {"float64", 8},
                                     {"int8", 1},
                                     {"uint8", 1},
                                     {"int16", 2},
                                     {"int32", 4},
                                     {"int64", 8},
                                     {"bool", 1},
                                     {"float8_e4m3fn", 1},
                                     {"float8_e5m2", 1}}};

}  // namespace

int64_t size_bytes(DType dtype) { return kRows[static_cast<size_t>(dtype)].size_bytes; }

std::string_view name(DType dtype) { return kRows[static_cast<size_t>(dtype)].name; }

}  // namespace llmserve
