// What the processes of one model send each other, for tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "comm/rank_frame.h"
#include "comm/short_code.h"
#include "core/error.h"
#include "engine/step_wire.h"
#include "testing/rank_frame_round_trip.h"
#include "testing/register.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

Bytes bytes_of_text(std::string_view text) { return std::as_bytes(std::span(text)); }

py::bytes to_python(Bytes bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

RankBytes mutated(std::mt19937_64& random, const std::vector<RankBytes>& frames) {
  RankBytes frame = frames[random() % frames.size()];
  for (uint64_t i = random() % 4; i-- > 0;) {
    const size_t at = frame.empty() ? 0 : random() % frame.size();
    switch (random() % 4) {
      case 0:
        if (!frame.empty()) frame[at] = static_cast<std::byte>(random());
        break;
      case 1:
        if (!frame.empty()) frame[at] ^= std::byte{1} << (random() % 8);
        break;
      case 2:
        frame.resize(at);
        break;
      default:
        frame.insert(frame.begin() + static_cast<int64_t>(at), random() % 9,
                     static_cast<std::byte>(random()));
    }
  }
  return frame;
}

// Reads `count` frames that are nearly right; returns how many were.
int64_t fuzz(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<RankBytes> frames = rank_frame_samples();
  int64_t num_read = 0;
  for (int64_t i = 0; i < count; ++i) {
    const RankBytes frame = mutated(random, frames);
    try {
      check_internal(rank_frame_round_trip(frame) == frame, "a frame is written as it was read");
      ++num_read;
    } catch (const DeviceError&) {
    }
  }
  return num_read;
}

}  // namespace

void register_testing_nodes(py::module_& testing) {
  testing.def(
      "short_code",
      [](std::string_view key, const std::vector<std::string_view>& parts) {
        ShortKey short_key;
        if (key.size() != short_key.size() || parts.size() > 2)
          throw InvalidArgument("a key has 16 bytes, and a message up to two parts");
        std::memcpy(short_key.data(), key.data(), key.size());
        const Bytes last = parts.empty() ? Bytes() : bytes_of_text(parts.back());
        return to_python(parts.size() < 2 ? short_code(short_key, {last})
                                          : short_code(short_key, {bytes_of_text(parts[0]), last}));
      },
      "key"_a, "parts"_a);
  testing.def("rank_frame_samples", [] {
    std::vector<py::bytes> frames;
    for (const RankBytes& frame : rank_frame_samples()) frames.push_back(to_python(frame));
    return frames;
  });
  testing.def(
      "read_rank_frame",
      [](std::string_view frame) { return to_python(rank_frame_round_trip(bytes_of_text(frame))); },
      "frame"_a, "The frame as it is written. Raises for what is none.");
  testing.def("fuzz_rank_frames", &fuzz, "count"_a, "seed"_a,
              py::call_guard<py::gil_scoped_release>());
}

}  // namespace llmserve
