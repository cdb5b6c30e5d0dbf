// Frames of KV blocks for tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <vector>

#include "testing/frame_fuzz.h"
#include "testing/kv_frame_round_trip.h"
#include "testing/register.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

int64_t fuzz(int64_t count, uint64_t seed) {
  return fuzz_frames<HandOverError>(count, seed, kv_frame_samples(), kFrameHeadBytes,
                                    [](Bytes frame) { return kv_frame_round_trip(frame); });
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
