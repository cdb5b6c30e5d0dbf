// Reads the input as a frame of KV blocks: what is one is written as it was.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "testing/kv_frame_round_trip.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace llmserve;
  const Bytes input(reinterpret_cast<const std::byte*>(data), size);
  try {
    const FrameBytes written = kv_frame_round_trip(input);
    if (written.size() != size || std::memcmp(written.data(), data, size) != 0) std::abort();
  } catch (const HandOverError&) {
  }
  return 0;
}
