// Ranks that fail on request, in the middle of a step.
#pragma once

#include <cstdint>
#include <string>

#include "engine/node_follower.h"
#include "engine/step_runner.h"

namespace llmserve {

struct RankFaultOptions {
  int32_t rank = -1;             // that fails; -1: none does
  int64_t fail_at_exchange = 1;  // at this gathering of what it has, from 1
  bool in_second_half = false;   // of half batches on a node; else in the first, or the whole
  int64_t num_failures = 1;      // and, in later groups, at so many first ones in all
  // "throw": the rank throws. "leave": it goes without a word. "hang": it does nothing, until the
  // others give it up.
  std::string fault = "throw";
  // "stuck": it does nothing, for good.
  double timeout_s = 60;  // of the group
  // RankPatience.
  double still_s = static_cast<double>(kHostPatience.still.count()) / 1000;
  double left_s = 10;
};

RankPatience patience_of(const RankFaultOptions& options);
// Makes of a node's ends some that fail as they say. Throws InvalidArgument.
NodeFollower::WrapEnds faulty_ends(const RankFaultOptions& options);
// What ranks meet through. Throws InvalidArgument.
StepRunner::MakeGroup faulty_ranks(const RankFaultOptions& options);

}  // namespace llmserve
