// `llmserve._core_testing.soak_scheduler`: a million random operations in one call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "testing/register.h"
#include "testing/scheduler_soak.h"

namespace py = pybind11;

namespace llmserve {
namespace {

py::dict to_dict(const SoakCounts& counts) {
  py::dict fields;
  fields["num_operations"] = counts.num_operations;
  fields["num_steps"] = counts.num_steps;
  fields["num_requests"] = counts.num_requests;
  fields["num_refused"] = counts.num_refused;
  fields["num_forked"] = counts.num_forked;
  fields["num_copied"] = counts.num_copied;
  fields["num_preemptions"] = counts.num_preemptions;
  fields["num_hits"] = counts.num_hits;
  fields["num_evictions"] = counts.num_evictions;
  fields["num_awaited"] = counts.num_awaited;
  fields["num_dropped"] = counts.num_dropped;
  fields["num_drafted"] = counts.num_drafted;
  fields["num_accepted"] = counts.num_accepted;
  fields["num_late_masks"] = counts.num_late_masks;
  fields["num_adapted"] = counts.num_adapted;
  fields["num_resumed"] = counts.num_resumed;
  fields["num_stores"] = counts.num_stores;
  fields["num_loads"] = counts.num_loads;
  fields["num_sends"] = counts.num_sends;
  fields["num_receives"] = counts.num_receives;
  fields["num_broken"] = counts.num_broken;
  fields["num_snapshots"] = counts.num_snapshots;
  fields["num_restarts"] = counts.num_restarts;
  fields["num_stopped"] = counts.num_stopped;
  fields["num_full"] = counts.num_full;
  fields["num_aborted"] = counts.num_aborted;
  fields["num_failed"] = counts.num_failed;
  fields["longest_stall"] = counts.longest_stall;
  py::dict transitions;
  for (const auto& [transition, count] : counts.transitions)
    transitions[py::str(transition)] = count;
  fields["transitions"] = transitions;
  return fields;
}

}  // namespace

void register_testing_soak(py::module_& testing) {
  const SoakConfig defaults;
  testing.def(
      "soak_scheduler",
      [](int64_t num_operations, const std::string& policy, int32_t num_blocks, int32_t block_size,
         int32_t max_num_seqs, int32_t max_num_batched_tokens, bool enable_prefix_caching,
         bool forge_collisions, const std::vector<int32_t>& windows, int32_t max_in_flight,
         bool runs_ahead, int32_t num_lower_blocks, int32_t num_state_slots,
         int32_t percent_drafted, int32_t percent_handed_over, int32_t percent_late_masks,
         uint64_t seed) {
        SoakCounts counts;
        {
          const py::gil_scoped_release release;
          counts = soak_scheduler({.policy = policy,
                                   .num_blocks = num_blocks,
                                   .block_size = block_size,
                                   .max_num_seqs = max_num_seqs,
                                   .max_num_batched_tokens = max_num_batched_tokens,
                                   .enable_prefix_caching = enable_prefix_caching,
                                   .forge_collisions = forge_collisions,
                                   .windows = windows,
                                   .max_in_flight = max_in_flight,
                                   .runs_ahead = runs_ahead,
                                   .num_lower_blocks = num_lower_blocks,
                                   .num_state_slots = num_state_slots,
                                   .percent_drafted = percent_drafted,
                                   .percent_handed_over = percent_handed_over,
                                   .percent_late_masks = percent_late_masks,
                                   .seed = seed},
                                  num_operations);
        }
        return to_dict(counts);
      },
      py::arg("num_operations"), py::kw_only(), py::arg("policy") = defaults.policy,
      py::arg("num_blocks") = defaults.num_blocks, py::arg("block_size") = defaults.block_size,
      py::arg("max_num_seqs") = defaults.max_num_seqs,
      py::arg("max_num_batched_tokens") = defaults.max_num_batched_tokens,
      py::arg("enable_prefix_caching") = defaults.enable_prefix_caching,
      py::arg("forge_collisions") = defaults.forge_collisions,
      py::arg("windows") = defaults.windows, py::arg("max_in_flight") = defaults.max_in_flight,
      py::arg("runs_ahead") = defaults.runs_ahead,
      py::arg("num_lower_blocks") = defaults.num_lower_blocks,
      py::arg("num_state_slots") = defaults.num_state_slots,
      py::arg("percent_drafted") = defaults.percent_drafted,
      py::arg("percent_handed_over") = defaults.percent_handed_over,
      py::arg("percent_late_masks") = defaults.percent_late_masks, py::arg("seed") = defaults.seed);
}

}  // namespace llmserve
