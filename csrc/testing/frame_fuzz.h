// What the tests of frames share: bytes as Python has them, and frames that are nearly right.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "comm/message_code.h"
#include "core/error.h"

namespace llmserve {

inline Bytes bytes_of_text(std::string_view text) { return std::as_bytes(std::span(text)); }

inline pybind11::bytes to_python(Bytes bytes) {
  return pybind11::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

using Frame = std::vector<std::byte>;

// One of the frames, each of which has head_bytes at least, with up to five changes.
inline Frame mutated(std::mt19937_64& random, const std::vector<Frame>& frames, size_t head_bytes) {
  Frame frame = frames[random() % frames.size()];
  const auto any_byte = [&] { return static_cast<std::byte>(random()); };
  for (uint64_t i = random() % 6; i-- > 0;) {
    const size_t at = frame.empty() ? 0 : random() % frame.size();
    switch (random() % 5) {
      case 0:
        if (!frame.empty()) frame[at] = any_byte();
        break;
      case 1:
        if (!frame.empty()) frame[at] ^= std::byte{1} << (random() % 8);
        break;
      case 2:
        frame.resize(at);
        break;
      case 3:
        frame.insert(frame.begin() + static_cast<int64_t>(at), random() % 9, any_byte());
        break;
      default: {  // the payload of another
        const Frame& other = frames[random() % frames.size()];
        frame.resize(std::min(frame.size(), head_bytes));
        frame.insert(frame.end(), other.begin() + static_cast<int64_t>(head_bytes), other.end());
      }
    }
  }
  return frame;
}

// Reads `count` frames that are nearly right; returns how many were. Throws InternalError for one
// that is read as something else than what is written.
template <class Refusal, class RoundTrip>
int64_t fuzz_frames(int64_t count, uint64_t seed, const std::vector<Frame>& frames,
                    size_t head_bytes, const RoundTrip& round_trip) {
  std::mt19937_64 random(seed);
  int64_t num_read = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Frame frame = mutated(random, frames, head_bytes);
    try {
      check_internal(round_trip(frame) == frame, "a frame is written as it was read");
      ++num_read;
    } catch (const Refusal&) {
    }
  }
  return num_read;
}

}  // namespace llmserve
