// The scheduler by itself and the records of its steps: `llmserve.Scheduler`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/field_repr.h"
#include "bindings/register.h"
#include "bindings/stepped_scheduler.h"
#include "core/error.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

using Tokens = std::vector<int32_t>;

Tokens to_list(std::span<const int32_t> values) { return {values.begin(), values.end()}; }

void register_plan(py::module_& module) {
  using Scheduled = ScheduledSequenceRecord;
  py::class_<Scheduled>(module, "ScheduledSequence")
      .def("__repr__", &field_repr)
      .def_readonly("request_id", &Scheduled::request_id)
      .def_readonly("sample_index", &Scheduled::sample_index)
      .def_readonly("start_position", &Scheduled::start_position)
      .def_readonly("is_prefill", &Scheduled::is_prefill)
      .def_readonly("awaited_row", &Scheduled::awaited_row)
      .def_readonly("num_tokens", &Scheduled::num_tokens)
      .def_readonly("num_drafted", &Scheduled::num_drafted)
      .def_readonly("adapter", &Scheduled::adapter)
      .def_readonly("token_ids", &Scheduled::token_ids)
      .def_property_readonly(
          "block_table", [](const Scheduled& self) { return self.tables.front(); },
          "Of the first cache group; position p is in entry p // block_size.")
      .def_readonly(
          "block_tables", &Scheduled::tables,
          "One for each cache group; -1 stands for a block that has left the group's window.");
  py::class_<LogitRow>(module, "LogitRow")
      .def("__repr__", &field_repr)
      .def_readonly("sequence_idx", &LogitRow::sequence_idx)
      .def_readonly("token_offset", &LogitRow::token_offset)
      .def_readonly("sample_index", &LogitRow::sample_index)
      .def_readonly("seed", &LogitRow::seed)
      .def_readonly("position", &LogitRow::position)
      .def_readonly("given_token_id", &LogitRow::given_token_id)
      .def_property_readonly("banned_token_ids",
                             [](const LogitRow& self) { return to_list(self.banned_token_ids); });
  // Elements refer into the record, which they keep alive.
  using Record = StepPlanRecord;
  py::class_<Record>(module, "StepPlan")
      .def_property_readonly("step_id", [](const Record& self) { return self.plan.step_id; })
      .def_property_readonly("num_tokens",
                             [](const Record& self) { return self.plan.num_tokens(); })
      .def_property_readonly("num_prefill_tokens",
                             [](const Record& self) { return self.plan.num_prefill_tokens; })
      .def_readonly("sequences", &Record::sequences)
      .def_property_readonly(
          "logit_rows",
          [](const Record& self) -> const std::vector<LogitRow>& { return self.plan.logit_rows; })
      .def_property_readonly("copies",
                             [](const Record& self) {
                               std::vector<std::pair<int32_t, int32_t>> copies;
                               for (const BlockCopy& copy : self.plan.copies)
                                 copies.emplace_back(copy.source, copy.destination);
                               return copies;
                             })
      .def_property_readonly("decisions", [](const Record& self) -> const std::vector<Decision>& {
        return self.plan.decisions;
      });
}

void register_sampled_tokens(py::module_& module) {
  py::class_<SampledTokens>(module, "SampledTokens")
      .def(py::init([](const Tokens& token_ids) {
             auto sampled = std::make_unique<SampledTokens>();
             for (const int32_t id : token_ids) sampled->rows.push_back({.token_id = id});
             return sampled;
           }),
           "token_ids"_a)
      .def_property_readonly("token_ids",
                             [](const SampledTokens& self) {
                               Tokens ids;
                               for (const SampledToken& row : self.rows)
                                 ids.push_back(row.token_id);
                               return ids;
                             })
      .def(
          "invalidate", [](SampledTokens& self, size_t row) { self.rows.at(row).is_valid = false; },
          "row"_a, "A row whose logits were not finite: its sequence ends with an error.")
      .def(
          "set_logprob",
          [](SampledTokens& self, size_t row, float logprob, int32_t rank) {
            self.rows.at(row).logprob = logprob;
            self.rows.at(row).rank = rank;
          },
          "row"_a, "logprob"_a, "rank"_a);
  py::implicitly_convertible<py::list, SampledTokens>();
}

void register_sequence_record(py::module_& module) {
  py::class_<SequenceRecord>(module, "SequenceRecord")
      .def("__repr__", &field_repr)
      .def_readonly("request_id", &SequenceRecord::request_id)
      .def_readonly("sample_index", &SequenceRecord::sample_index)
      .def_readonly("state", &SequenceRecord::state)
      .def_readonly("token_ids", &SequenceRecord::token_ids)
      .def_readonly("num_prompt_tokens", &SequenceRecord::num_prompt_tokens)
      .def_readonly("num_computed", &SequenceRecord::num_computed)
      .def_readonly("num_scheduled", &SequenceRecord::num_scheduled)
      .def_readonly("num_preemptions", &SequenceRecord::num_preemptions)
      .def_property_readonly(
          "block_table",
          [](const SequenceRecord& self) {
            return self.block_tables.empty() ? Tokens() : self.block_tables.front();
          },
          "Of the first cache group; empty while the sequence waits.")
      .def_readonly("block_tables", &SequenceRecord::block_tables);
}

}  // namespace

void register_scheduler(py::module_& module) {
  register_plan(module);
  register_sampled_tokens(module);
  register_sequence_record(module);
  using Self = SteppedScheduler;
  py::class_<Self>(module, "Scheduler")
      .def(py::init([](const SchedulerConfig& config, const CacheConfig& cache,
                       std::optional<Vocabulary> vocabulary, int32_t max_in_flight,
                       bool runs_ahead) {
             const int32_t limit = runs_ahead ? Scheduler::kMaxAhead : Scheduler::kMaxInFlight;
             if (max_in_flight < 1 || max_in_flight > limit) {
               throw InvalidArgument(concat("max_in_flight must be 1 to ", limit,
                                            runs_ahead ? " where plans run ahead" : "", ", got ",
                                            max_in_flight));
             }
             return std::make_unique<Self>(
                 config, cache, std::move(vocabulary),
                 SchedulerOptions{.max_in_flight = max_in_flight, .runs_ahead = runs_ahead});
           }),
           "config"_a, "cache"_a, "vocabulary"_a = py::none(), "max_in_flight"_a = 1,
           "runs_ahead"_a = true,
           "With two plans in flight the second may run what the first one draws, by awaited_row; "
           "without runs_ahead each of up to 4 decodes its share of the sequences instead.")
      .def(
          "add",
          [](Self& self, RequestId request_id, Tokens prompt_token_ids,
             const SamplingParams& params, int32_t priority, std::string cache_salt,
             bool is_streamed) {
            self.add({.id = request_id,
                      .prompt_token_ids = std::move(prompt_token_ids),
                      .params = params,
                      .priority = priority,
                      .cache_salt = std::move(cache_salt),
                      .is_streamed = is_streamed});
          },
          "request_id"_a, "prompt_token_ids"_a, "params"_a, "priority"_a = 0, "cache_salt"_a = "",
          "is_streamed"_a = true)
      .def("schedule", &Self::schedule,
           "The next step: who runs which tokens in which blocks. Empty when nothing can run.")
      .def("commit", &Self::commit, "sampled"_a,
           "Takes the token drawn for each of the plan's logit_rows, in order; returns the events.")
      .def(
          "abort", [](Self& self, RequestId id) { self.scheduler().abort(id); }, "request_id"_a,
          "Ends a request; during a step, with its commit. An unknown id has finished.")
      .def("preempt", &Self::preempt, "request_id"_a,
           "Takes the blocks of a request's running sequences; they are computed again later.")
      .def("fail", &Self::fail, "reason"_a,
           "Ends all requests with an error, and empties the prefix cache.")
      .def("fail_step", &Self::fail_step, "reason"_a,
           "Instead of commit(): ends the requests of the plan with an error, and no others.")
      .def(
          "take_events", [](Self& self) { return self.scheduler().take_result().events; },
          "The events of abort(), fail_step() and fail() that no commit has given out.")
      .def("reset_prefix_cache", [](Self& self) { self.scheduler().reset_prefix_cache(); })
      .def("has_unfinished", [](const Self& self) { return self.scheduler().has_unfinished(); })
      .def(
          "wake_us", &Self::wake_us,
          "After an empty plan: when the next one may not be, though nothing arrives. None: never.")
      .def_property_readonly("now_us", &Self::now_us)
      .def("advance_us", &Self::advance_us, "delta_us"_a, "Lets time pass.")
      .def("sequences", &Self::sequences,
           "All unfinished sequences, running ones first, in the order of service.")
      .def("metrics", &Self::metrics)
      .def("ref_count", &Self::ref_count, "block"_a, "Sequences that refer to a block.")
      .def(
          "check_integrity", [](const Self& self) { self.scheduler().check_integrity(); },
          "Raises InternalError unless blocks, sequences and queues agree.");
}

}  // namespace llmserve
