#include "comm/wire_bytes.h"

namespace llmserve {

WireWriter& WireWriter::number(uint64_t value, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; ++i) bytes_.push_back(static_cast<std::byte>(value >> (8 * i)));
  return *this;
}

WireWriter& WireWriter::raw(Bytes bytes) {
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  return *this;
}

}  // namespace llmserve
