// Drafters and their controller by themselves.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/from_kwargs.h"
#include "core/error.h"
#include "sampling/rejection.h"
#include "speculation/controller.h"
#include "speculation/registry.h"
#include "speculation/vocabulary_map.h"
#include "testing/recorded_drafter.h"
#include "testing/register.h"
#include "testing/register_heads.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

using Tokens = std::vector<int32_t>;

// A drafter without a model, asked as the engine would ask it.
class StandaloneDrafter {
 public:
  StandaloneDrafter(const SpeculationConfig& config, int64_t vocab_size)
      : config_(config),
        drafter_(find_drafter(config.method)
                     .make({.config = config_, .vocab_size = vocab_size, .model = nullptr})) {}

  std::vector<Tokens> draft(const std::vector<std::pair<RequestId, Tokens>>& sequences,
                            int32_t max_tokens, const std::string& salt) {
    std::vector<DraftTask> tasks;
    for (const auto& [id, token_ids] : sequences)
      tasks.push_back({.request_id = id,
                       .token_ids = token_ids,
                       .params = &params_,
                       .max_tokens = max_tokens,
                       .cache_salt = salt});
    std::vector<Tokens> drafts(tasks.size());
    drafter_->draft(tasks, drafts);
    return drafts;
  }
  // A request that had this output and has ended.
  void finish(RequestId id, const Tokens& output, std::string salt) {
    drafter_->begin({.id = id, .cache_salt = std::move(salt), .has_drafter = true});
    drafter_->take_output(id, 0, output, std::ssize(output));
    drafter_->forget(id, 0, true);
  }
  int64_t num_sequences() const { return drafter_->num_sequences(); }

 private:
  const SpeculationConfig config_;
  const SamplingParams params_;
  const std::unique_ptr<Drafter> drafter_;
};

// A controller in simulated time: sequences of a known acceptance, steps of a known time.
class SimulatedController {
 public:
  SimulatedController(const SpeculationConfig& config, int32_t num_sequences)
      : config_(config), controller_(config_), histories_(static_cast<size_t>(num_sequences)) {}

  // One step: what each sequence is to guess; then what it came to, in tokens and microseconds.
  // accepted[i][p]: whether the guess at place p of sequence i is right, if it is made.
  std::pair<int64_t, double> step(const std::vector<std::vector<bool>>& accepted, double step_us,
                                  double row_us, double draft_us) {
    std::vector<DraftHistory*> histories;
    for (DraftHistory& history : histories_) {
      history.max_planned = kMaxDraftTokens;
      histories.push_back(&history);
    }
    const auto num_rows = std::ssize(histories_);
    controller_.plan(histories, num_rows);
    int64_t num_all = num_rows, num_tokens = num_rows;
    int32_t depth = 0;
    for (size_t i = 0; i < histories_.size(); ++i) {
      const int32_t num_planned = histories_[i].num_planned;
      num_all += num_planned;
      depth = std::max(depth, num_planned);
      int32_t num_right = 0;
      while (num_right < num_planned && accepted[i][static_cast<size_t>(num_right)]) ++num_right;
      num_tokens += num_right;
      if (num_planned > 0) controller_.note_outcome(histories_[i], num_planned, num_right, false);
    }
    const double elapsed_us = step_us + row_us * static_cast<double>(num_all);
    controller_.note_step(num_all, elapsed_us);
    if (depth > 0) controller_.note_draft(depth, draft_us * depth);
    return {num_tokens, elapsed_us + draft_us * depth};
  }
  std::vector<int32_t> planned() const {
    std::vector<int32_t> counts;
    for (const DraftHistory& history : histories_) counts.push_back(history.num_planned);
    return counts;
  }

 private:
  const SpeculationConfig config_;
  SpeculationController controller_;
  std::vector<DraftHistory> histories_;
};

// Of num_draws tokens by the rejection rule at positions from 0 on: how often each token came, and
// how many guesses stood. guess >= 0: always this one, with certainty; else one drawn from `draft`.
std::pair<std::vector<int64_t>, int64_t> count_draws(const std::vector<float>& target,
                                                     const std::vector<float>& draft, int32_t guess,
                                                     uint64_t seed, int64_t num_draws) {
  std::vector<int64_t> counts(target.size());
  int64_t num_accepted = 0;
  for (int64_t position = 0; position < num_draws; ++position) {
    const int32_t guessed =
        guess >= 0 ? guess : draw_from(draft, seed, position, DrawStream::kGuess);
    const int32_t token_id = draw_after_guess(
        target, guessed, guess >= 0 ? std::span<const float>() : draft, seed, position);
    ++counts[static_cast<size_t>(token_id)];
    num_accepted += token_id == guessed ? 1 : 0;
  }
  return {counts, num_accepted};
}

// Which of the offers (tokens, rows) a controller takes that knows steps of up to 32 rows: those of
// a plain step of one row with num_drafted guesses, of which all are right.
std::vector<bool> choose_branches(const std::vector<std::pair<double, int64_t>>& given,
                                  int32_t num_drafted, double step_us, double row_us) {
  const SpeculationConfig config;
  SpeculationController controller(config);
  for (int64_t rows = 1; rows <= 32; ++rows)
    controller.note_step(rows, step_us + row_us * static_cast<double>(rows));
  std::vector<BranchOffer> offers;
  for (const auto& [tokens, num_rows] : given)
    offers.push_back({.tokens = tokens, .num_rows = num_rows});
  std::vector<BranchOffer*> asked;
  for (BranchOffer& offer : offers) asked.push_back(&offer);
  controller.choose_branches(asked, 1, 1 + num_drafted, 1 + num_drafted, num_drafted);
  std::vector<bool> taken;
  for (const BranchOffer& offer : offers) taken.push_back(offer.is_taken);
  return taken;
}

std::optional<std::vector<float>> probabilities_of(const std::vector<float>& logits,
                                                   const SamplingParams& params) {
  std::vector<float> probabilities;
  if (!fill_probabilities(logits, {.draw = params.draw}, probabilities)) return std::nullopt;
  return probabilities;
}

}  // namespace

void register_testing_speculation(py::module_& testing) {
  register_testing_heads(testing);
  testing.def("count_draws", &count_draws, "target"_a, "draft"_a = std::vector<float>(),
              "guess"_a = -1, "seed"_a = 0, "num_draws"_a = 1);
  testing.def("choose_branches", &choose_branches, "offers"_a, "num_drafted"_a, "step_us"_a,
              "row_us"_a);
  testing.def("probabilities_of", &probabilities_of, "logits"_a, "params"_a);
  py::class_<VocabularyMap>(testing, "VocabularyMap")
      .def(py::init<const Vocabulary&, int64_t, const Vocabulary&, int64_t>(), "target"_a,
           "target_size"_a, "draft"_a, "draft_size"_a)
      .def("to_draft",
           [](const VocabularyMap& self, int32_t id) {
             const std::span<const int32_t> ids = self.to_draft(id);
             return std::vector<int32_t>(ids.begin(), ids.end());
           })
      .def("to_target", &VocabularyMap::to_target)
      .def_property_readonly("shared_draft_ids", &VocabularyMap::shared_draft_ids);
  py::class_<StandaloneDrafter>(testing, "Drafter")
      .def(py::init<const SpeculationConfig&, int64_t>(), "config"_a, "vocab_size"_a = 1000)
      .def("draft", &StandaloneDrafter::draft, "sequences"_a, "max_tokens"_a, "salt"_a = "")
      .def("finish", &StandaloneDrafter::finish, "request_id"_a, "output"_a, "salt"_a = "")
      .def_property_readonly("num_sequences", &StandaloneDrafter::num_sequences);
  py::class_<SimulatedController>(testing, "SpeculationController")
      .def(py::init<const SpeculationConfig&, int32_t>(), "config"_a, "num_sequences"_a = 1)
      .def("step", &SimulatedController::step, "accepted"_a, "step_us"_a, "row_us"_a,
           "draft_us"_a = 0.0)
      .def("planned", &SimulatedController::planned);
  py::class_<RecordedDrafterOptions>(testing, "RecordedDrafter")
      .def(py::init(&from_kwargs<RecordedDrafterOptions>))
      .def_readwrite("recorded", &RecordedDrafterOptions::recorded)
      .def_readwrite("vocab_size", &RecordedDrafterOptions::vocab_size)
      .def_readwrite("accuracy", &RecordedDrafterOptions::accuracy)
      .def_readwrite("change_at", &RecordedDrafterOptions::change_at)
      .def_readwrite("change_back_at", &RecordedDrafterOptions::change_back_at)
      .def_readwrite("later_accuracy", &RecordedDrafterOptions::later_accuracy)
      .def_readwrite("fail_at", &RecordedDrafterOptions::fail_at)
      .def_readwrite("bad_token", &RecordedDrafterOptions::bad_token)
      .def_readwrite("token_us", &RecordedDrafterOptions::token_us)
      .def_readwrite("follows_context", &RecordedDrafterOptions::follows_context);
}

}  // namespace llmserve
