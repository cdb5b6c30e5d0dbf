// Frames of KV blocks for tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "testing/kv_frame_round_trip.h"
#include "testing/register.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

Bytes bytes_of_text(std::string_view text) { return std::as_bytes(std::span(text)); }

py::bytes to_python(Bytes bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

FrameBytes mutated(std::mt19937_64& random, const std::vector<FrameBytes>& frames) {
  FrameBytes frame = frames[random() % frames.size()];
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
        const FrameBytes& other = frames[random() % frames.size()];
        frame.resize(std::min(frame.size(), kFrameHeadBytes));
        frame.insert(frame.end(), other.begin() + kFrameHeadBytes, other.end());
      }
    }
  }
  return frame;
}

// Reads `count` frames that are nearly right; returns how many were. Throws InternalError for one
// that is read as something else than what is written.
int64_t fuzz(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<FrameBytes> frames = kv_frame_samples();
  int64_t num_read = 0;
  for (int64_t i = 0; i < count; ++i) {
    const FrameBytes frame = mutated(random, frames);
    try {
      check_internal(kv_frame_round_trip(frame) == frame, "a frame is written as it was read");
      ++num_read;
    } catch (const HandOverError&) {
    }
  }
  return num_read;
}

}  // namespace

void register_testing_hand_over(py::module_& testing) {
  testing.def(
      "message_code",
      [](std::string_view key, const std::vector<std::string_view>& parts) {
        std::string text;
        for (const std::string_view part : parts) text += part;
        const TokenHash whole = message_code(bytes_of_text(key), {bytes_of_text(text)});
        if (parts.size() == 2)
          check_internal(whole == message_code(bytes_of_text(key),
                                               {bytes_of_text(parts[0]), bytes_of_text(parts[1])}),
                         "parts are one after the other");
        return to_python(bytes_of(whole));
      },
      "key"_a, "parts"_a);
  testing.def("kv_frame_samples", [] {
    std::vector<py::bytes> frames;
    for (const FrameBytes& frame : kv_frame_samples()) frames.push_back(to_python(frame));
    return frames;
  });
  testing.def(
      "read_kv_frame",
      [](std::string_view frame) { return to_python(kv_frame_round_trip(bytes_of_text(frame))); },
      "frame"_a, "The frame as it is written. Raises for what is none.");
  testing.def("fuzz_kv_frames", &fuzz, "count"_a, "seed"_a,
              py::call_guard<py::gil_scoped_release>());
}

}  // namespace llmserve
