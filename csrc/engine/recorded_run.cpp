#include "engine/recorded_run.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace llmserve {
namespace {

using Recording = DeviceSteps::Recording;

// What a rank has beside ranks without it is of no use: that of all is of one moment.
bool record_on_all(const RecordedRun& run) {
  std::atomic<bool> is_whole{true};
  run.on_ranks([&](int rank) {
    DeviceSteps& steps = *run.ranks[static_cast<size_t>(rank)];
    if (!steps.record(run.key, [&] { run.work(rank); })) is_whole = false;
  });
  if (!is_whole)
    for (DeviceSteps* const steps : run.ranks) steps->refuse_recording(run.key);
  return is_whole;
}

}  // namespace

bool run_recorded(const RecordedRun& run) {
  std::vector<Recording> recordings;
  for (DeviceSteps* const steps : run.ranks) recordings.push_back(steps->recording(run.key));
  const auto count = [&](Recording recording) { return std::ranges::count(recordings, recording); };
  const bool is_recorded = count(Recording::kThere) == std::ssize(recordings) ||
                           (count(Recording::kNone) == 0 && record_on_all(run));
  run.on_ranks([&](int rank) {
    DeviceSteps& steps = *run.ranks[static_cast<size_t>(rank)];
    if (is_recorded)
      steps.replay(run.key);
    else
      steps.run_asked(run.key, [&] { run.work(rank); });
    run.end(rank);
  });
  return is_recorded;
}

}  // namespace llmserve
