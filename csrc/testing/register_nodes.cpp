// What the processes of one model send each other, for tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/rank_frame.h"
#include "comm/rank_link.h"
#include "comm/short_code.h"
#include "core/error.h"
#include "engine/node_follower.h"
#include "engine/step_wire.h"
#include "testing/faulty_ranks.h"
#include "testing/frame_fuzz.h"
#include "testing/rank_frame_round_trip.h"
#include "testing/register.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

int64_t fuzz(int64_t count, uint64_t seed) {
  return fuzz_frames<DeviceError>(count, seed, rank_frame_samples(), kRankHeadBytes,
                                  [](Bytes frame) { return rank_frame_round_trip(frame); });
}

// A frame says that it has `claimed` bytes, of which so many come: what its reader says.
std::string receive_claimed(uint64_t claimed, size_t num_sent) {
  const auto [sender, receiver] = RankLink::make_pair();
  const RankHeadBytes head =
      to_bytes(RankHead{.type = RankFrameType::kStep, .num_bytes = claimed, .number = 0});
  std::vector<std::byte> sent(head.begin(), head.end());
  sent.resize(sent.size() + num_sent);
  if (send(sender->fd(), sent.data(), sent.size(), MSG_NOSIGNAL) != std::ssize(sent))
    throw InvalidArgument("receive_claimed: a socket takes less at a time");
  try {
    receiver->receive(std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "";
}

// A node of which one rank fails; all of its code is of this module.
struct FaultyNode {
  FaultyNode(const ConfigRequest& request, std::shared_ptr<Checkpoint> checkpoint,
             const RankFaultOptions& faults)
      : follower(std::make_unique<NodeFollower>(request, std::move(checkpoint), patience_of(faults),
                                                faulty_ends(faults))) {}
  ~FaultyNode() {
    if (!follower->left().empty()) static_cast<void>(follower.release());
  }
  FaultyNode(const FaultyNode&) = delete;
  FaultyNode& operator=(const FaultyNode&) = delete;

  std::unique_ptr<NodeFollower> follower;
};

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
  testing.def("receive_claimed", &receive_claimed, "claimed"_a, "num_sent"_a,
              py::call_guard<py::gil_scoped_release>());
  py::class_<FaultyNode>(testing, "FaultyNode")
      .def(py::init<const ConfigRequest&, std::shared_ptr<Checkpoint>, const RankFaultOptions&>(),
           "request"_a, "checkpoint"_a, "faults"_a)
      .def(
          "run", [](FaultyNode& node) { node.follower->run(); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("left", [](const FaultyNode& node) { return node.follower->left(); });
  testing.def("fuzz_rank_frames", &fuzz, "count"_a, "seed"_a,
              py::call_guard<py::gil_scoped_release>());
}

}  // namespace llmserve
