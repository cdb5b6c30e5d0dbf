// Hashes and events of blocks cross as bytes, 32 a hash.
#pragma once

#include <pybind11/pybind11.h>

#include <span>
#include <vector>

#include "api/block_events.h"

namespace llmserve {

inline pybind11::bytes bytes_of_hashes(std::span<const TokenHash> hashes) {
  return {reinterpret_cast<const char*>(hashes.data()), hashes.size_bytes()};
}

// [("stored" | "removed" | "cleared", hashes)], as Router.apply() takes them: a row for all events
// of one kind in a row.
inline pybind11::list block_event_runs(std::span<const BlockEvent> events) {
  using Kind = BlockEvent::Kind;
  pybind11::list runs;
  for (size_t begin = 0; begin < events.size();) {
    const Kind kind = events[begin].kind;
    std::vector<TokenHash> hashes;
    size_t end = begin;
    for (; end < events.size() && events[end].kind == kind; ++end)
      if (kind != Kind::kCleared) hashes.push_back(events[end].hash);
    const char* const name = kind == Kind::kStored    ? "stored"
                             : kind == Kind::kRemoved ? "removed"
                                                      : "cleared";
    runs.append(pybind11::make_tuple(name, bytes_of_hashes(hashes)));
    begin = end;
  }
  return runs;
}

}  // namespace llmserve
