// The records of a step, and executors without a model, for tests and benchmarks:
// `llmserve._core.testing`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/register.h"
#include "bindings/token_oracle.h"
#include "scheduler/step_plan.h"

namespace py = pybind11;

namespace llmserve {
namespace {

using Tokens = std::vector<int32_t>;

Tokens to_list(std::span<const int32_t> values) { return {values.begin(), values.end()}; }

void register_plan(py::module_& testing) {
  py::class_<ScheduledSequence>(testing, "ScheduledSequence")
      .def_readonly("request_id", &ScheduledSequence::request_id)
      .def_readonly("sample_index", &ScheduledSequence::sample_index)
      .def_readonly("start_position", &ScheduledSequence::start_position)
      .def_readonly("is_prefill", &ScheduledSequence::is_prefill)
      .def_property_readonly("num_tokens",
                             [](const ScheduledSequence& self) { return self.token_ids.size(); })
      .def_property_readonly("token_ids",
                             [](const ScheduledSequence& self) { return to_list(self.token_ids); })
      .def_property_readonly(
          "block_table", [](const ScheduledSequence& self) { return to_list(self.block_table); });
  py::class_<LogitRow>(testing, "LogitRow")
      .def_readonly("sequence_idx", &LogitRow::sequence_idx)
      .def_readonly("token_offset", &LogitRow::token_offset)
      .def_readonly("sample_index", &LogitRow::sample_index)
      .def_readonly("seed", &LogitRow::seed)
      .def_readonly("position", &LogitRow::position)
      .def_property_readonly("banned_token_ids",
                             [](const LogitRow& self) { return to_list(self.banned_token_ids); });
  py::class_<StepPlan>(testing, "StepPlan")
      .def_readonly("step_id", &StepPlan::step_id)
      .def_readonly("num_tokens", &StepPlan::num_tokens)
      .def_readonly("num_prefill_tokens", &StepPlan::num_prefill_tokens)
      .def_property_readonly("num_sequences",
                             [](const StepPlan& self) { return self.sequences.size(); })
      .def_property_readonly("num_logit_rows",
                             [](const StepPlan& self) { return self.logit_rows.size(); })
      .def_readonly("sequences", &StepPlan::sequences)
      .def_readonly("logit_rows", &StepPlan::logit_rows)
      .def_property_readonly("copies",
                             [](const StepPlan& self) {
                               std::vector<std::pair<int32_t, int32_t>> copies;
                               for (const BlockCopy& copy : self.copies) {
                                 copies.emplace_back(copy.source, copy.destination);
                               }
                               return copies;
                             })
      // (request_id, sample_index, kind, detail)
      .def_property_readonly("decisions", [](const StepPlan& self) {
        py::list list;
        for (const Decision& decision : self.decisions) {
          list.append(py::make_tuple(decision.request_id, decision.sample_index,
                                     std::string(name(decision.kind)), decision.detail));
        }
        return list;
      });
}

void register_executors(py::module_& testing) {
  py::class_<SampledTokens>(testing, "SampledTokens")
      .def(py::init([](const Tokens& token_ids) {
        auto sampled = std::make_unique<SampledTokens>();
        for (const int32_t id : token_ids) sampled->rows.push_back({.token_id = id});
        return sampled;
      }))
      .def_property_readonly("token_ids",
                             [](const SampledTokens& self) {
                               Tokens ids;
                               for (const SampledToken& row : self.rows)
                                 ids.push_back(row.token_id);
                               return ids;
                             })
      .def("invalidate",
           [](SampledTokens& self, size_t row) { self.rows.at(row).is_valid = false; })
      .def("set_logprob", [](SampledTokens& self, size_t row, float logprob, int32_t rank) {
        self.rows.at(row).logprob = logprob;
        self.rows.at(row).rank = rank;
      });
  testing.def("oracle_token", &oracle_token, py::arg("seed"), py::arg("position"),
              py::arg("vocab_size"));
  testing.def("sample_oracle", &sample_oracle, py::arg("plan"), py::arg("vocab_size"));
  py::class_<ShadowModel>(testing, "ShadowModel")
      .def(py::init<int32_t, int32_t, int32_t>(), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("vocab_size"))
      .def("execute", &ShadowModel::execute)
      // What a request must give: num_tokens tokens after the prompt, of which the first
      // min_tokens are none of the banned.
      .def_static(
          "expected",
          [](Tokens context, uint64_t seed, int32_t vocab_size, int32_t num_tokens,
             const Tokens& banned, int32_t min_tokens) {
            Tokens generated;
            for (int32_t i = 0; i < num_tokens; ++i) {
              generated.push_back(ShadowModel::next_token(context, seed, vocab_size,
                                                          i < min_tokens ? banned : Tokens()));
              context.push_back(generated.back());
            }
            return generated;
          },
          py::arg("prompt"), py::arg("seed"), py::arg("vocab_size"), py::arg("num_tokens"),
          py::arg("banned") = Tokens(), py::arg("min_tokens") = 0);
}

}  // namespace

void register_testing_plan(py::module_& testing) {
  register_plan(testing);
  register_executors(testing);
}

}  // namespace llmserve
