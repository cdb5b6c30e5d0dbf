// What edits the rows of one sequence, without a model: penalties, bad words, thinking, grammars.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/mask_filler.h"
#include "sampling/sampling_slot.h"
#include "testing/register.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

using Tokens = std::vector<int32_t>;

// A row's tokens before it, and how many of them are drafted.
using Context = std::pair<Tokens, int32_t>;

std::vector<SampleTask> make_tasks(const SamplingParams& params, const std::vector<Context>& rows,
                                   int64_t num_prompt_tokens) {
  std::vector<SampleTask> tasks;
  for (const auto& [token_ids, num_drafted] : rows)
    tasks.push_back({.params = &params,
                     .position = std::ssize(token_ids),
                     .token_ids = token_ids,
                     .num_prompt_tokens = num_prompt_tokens,
                     .num_drafted_tokens = num_drafted});
  return tasks;
}

// Of one row: what its draw is edited by.
struct RowEdits {
  std::map<int32_t, std::pair<bool, int32_t>> counts;  // in the prompt; generated
  Tokens banned;
  int32_t forced_token_id = -1;
};

// The sampler's slot of one sequence.
class TestSlot {
 public:
  TestSlot(SamplingParams params, int64_t vocab_size)
      : params_(std::move(params)), slot_(params_, vocab_size) {}

  // The rows of one step, looked at when all have been prepared.
  std::vector<RowEdits> prepare(const std::vector<Context>& contexts, int64_t num_prompt_tokens) {
    const std::vector<SampleTask> tasks = make_tasks(params_, contexts, num_prompt_tokens);
    std::vector<SampleRow> rows(tasks.size());
    for (size_t i = 0; i < tasks.size(); ++i)
      slot_.prepare(tasks[i], ConstTensor(nullptr, DType::kF32, {0}), host_memory(), rows[i]);
    std::vector<RowEdits> edits;
    for (const SampleRow& row : rows) {
      RowEdits& found = edits.emplace_back();
      for (const TokenCount& count : row.counts)
        found.counts[count.token_id] = {count.is_in_prompt, count.num_generated};
      found.banned.assign(row.banned_token_ids.begin(), row.banned_token_ids.end());
      found.forced_token_id = row.forced_token_id;
    }
    return edits;
  }

 private:
  const SamplingParams params_;
  SamplingSlot slot_;
};

// What a grammar says of one row: the allowed tokens, or none where it says nothing; the end that
// has to come, or -1; why there is no mask.
using RowMask = std::tuple<std::optional<Tokens>, int32_t, std::string>;

class TestMasks {
 public:
  TestMasks(SamplingParams params, int64_t vocab_size)
      : params_(std::move(params)), vocab_size_(vocab_size), filler_(vocab_size) {}

  // The rows of one step.
  std::vector<RowMask> fill(const std::vector<Context>& contexts, int64_t num_prompt_tokens) {
    std::vector<SampleTask> tasks = make_tasks(params_, contexts, num_prompt_tokens);
    filler_.begin(tasks);
    filler_.finish(tasks);
    std::vector<RowMask> masks;
    for (const SampleTask& task : tasks) {
      std::optional<Tokens> allowed;
      if (!task.allowed.empty()) allowed.emplace();
      for (int32_t id = 0; allowed && id < vocab_size_; ++id)
        if ((task.allowed[static_cast<size_t>(id / 32)] >> (id % 32) & 1) != 0)
          allowed->push_back(id);
      masks.emplace_back(std::move(allowed), task.end_token_id, task.mask_error);
    }
    return masks;
  }

 private:
  const SamplingParams params_;
  const int64_t vocab_size_;
  MaskFiller filler_;
};

}  // namespace

void register_testing_sampling(py::module_& testing) {
  py::class_<RowEdits>(testing, "RowEdits")
      .def_readonly("counts", &RowEdits::counts)
      .def_readonly("banned", &RowEdits::banned)
      .def_readonly("forced_token_id", &RowEdits::forced_token_id);
  py::class_<TestSlot>(testing, "SamplingSlot")
      .def(py::init<SamplingParams, int64_t>(), "params"_a, "vocab_size"_a)
      .def("prepare", &TestSlot::prepare, "contexts"_a, "num_prompt_tokens"_a,
           "contexts: a row's tokens before it, and how many of them are drafted.");
  py::class_<TestMasks>(testing, "MaskFiller")
      .def(py::init<SamplingParams, int64_t>(), "params"_a, "vocab_size"_a)
      .def("fill", &TestMasks::fill, "contexts"_a, "num_prompt_tokens"_a,
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace llmserve
