// Reads of a mapping whose file was shortened, or whose disk fails. The system answers such a read
// with SIGBUS, which ends the process and with it every other model. Here the rest of the mapping
// becomes zeros instead, and a flag says so.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

namespace llmserve {

struct BusErrorNode;

// Whether all reads of a file's mapping gave the file's bytes. It outlives the mapping.
struct ReadState {
  explicit ReadState(std::string of) : path(std::move(of)) {}

  const std::string path;
  std::atomic<bool> has_failed{false};  // set by the signal's handler

  // Throws CorruptFile once a read has failed: what was read since is not the file's.
  void check() const;
};

// Watches [data, data + num_bytes), a mapping of its own, until it is destroyed: before the mapping
// is. Faults elsewhere go to the handler that was there before.
class BusErrorGuard {
 public:
  // `state` outlives the guard.
  BusErrorGuard(const std::byte* data, size_t num_bytes, ReadState& state);
  ~BusErrorGuard();
  BusErrorGuard(const BusErrorGuard&) = delete;
  BusErrorGuard& operator=(const BusErrorGuard&) = delete;

 private:
  BusErrorNode* node_;
};

}  // namespace llmserve
