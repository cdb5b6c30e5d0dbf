// Heads that draft, by themselves: their logits behind a text that their target has read.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "engine/batch_builder.h"
#include "engine/config_resolver.h"
#include "engine/head_worker.h"
#include "engine/memory_planner.h"
#include "engine/worker.h"
#include "io/checkpoint.h"
#include "testing/register_heads.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

class NoSink final : public StepSink {
 public:
  void take_hidden(const ConstTensor&) override {}
  void take_pooled_logits(const ConstTensor&, const PooledRows&) override {}
  void take_logits(const ConstTensor&, size_t) override {}
};

EngineConfig config_of(const std::string& target, const std::string& method,
                       const std::string& head) {
  ConfigRequest request;
  request.model = target;
  request.dtype = "float32";
  request.num_threads = 1;
  request.num_blocks = 16;
  request.max_model_len = 128;
  request.max_num_seqs = 64;
  request.max_num_batched_tokens = 64;
  request.settings.speculation = {
      .method = method, .model = head, .num_speculative_tokens = 4, .draft_dtype = "float32"};
  return resolve_config(request, open_checkpoint(target));
}

// A target and its head in f32, and one sequence.
class TestHead {
 public:
  TestHead(const std::string& target, const std::string& method, const std::string& head)
      : config_(config_of(target, method, head)),
        worker_(config_, open_checkpoint(target)),
        masks_(worker_.vocab_size()),
        head_(head_kind(method), *config_.draft,
              {.workers = {&worker_},
               .on_each_rank = [](const std::function<void(int rank)>& work) { work(0); },
               .run_on_ranks = [](const std::function<void(int rank)>& work) { work(0); },
               .masks = masks_,
               .tell = {}}) {
    head_.keep_logits();
  }

  // [N - 1, D]: of the first guess behind each token but the last, which all have run.
  py::array_t<float> read(const std::vector<int32_t>& token_ids) {
    run_target(token_ids);
    token_ids_ = token_ids;
    step_.clear();
    place_ = 0;
    const auto num_rows = static_cast<int32_t>(token_ids.size()) - 1;
    std::vector<int32_t> kept(token_ids.size(), -1);
    std::iota(kept.begin(), kept.begin() + num_rows, 0);
    head_.keep(worker_.layer_states(), kept);
    for (int32_t i = 0; i < num_rows; ++i) {
      step_.token_ids.push_back(token_ids[static_cast<size_t>(i) + 1]);
      step_.positions.push_back(i);
      step_.sources.push_back(i);
      step_.logit_rows.push_back(i);
    }
    step_.sequences.push_back({.num_rows = num_rows, .block_tables = tables()});
    return run();
  }
  // [N - 1 - place, D]: of the guess at the next place behind each token, where each place has its
  // layer.
  py::array_t<float> read_next() {
    step_.clear();
    step_.place = ++place_;
    const auto num_rows = static_cast<int32_t>(token_ids_.size()) - 1 - place_;
    for (int32_t i = 0; i < num_rows; ++i) {
      step_.token_ids.push_back(token_ids_[static_cast<size_t>(i + 1 + place_)]);
      step_.positions.push_back(i);
      step_.sources.push_back(i);
      step_.logit_rows.push_back(i);
    }
    step_.sequences.push_back({.num_rows = num_rows, .block_tables = tables()});
    return run();
  }
  // [1, D]: behind a guess for the token behind the last.
  py::array_t<float> go_on(int32_t token_id) {
    const auto last = static_cast<int32_t>(step_.logit_rows.size()) - 1;
    const auto row = static_cast<int64_t>(token_ids_.size()) - 1;
    token_ids_.push_back(token_id);
    step_.clear();
    step_.place = ++place_;
    step_.token_ids = {token_id};
    step_.positions = {static_cast<int32_t>(row)};
    step_.sources = {last};
    step_.logit_rows = {0};
    step_.sequences.push_back({.num_rows = 1, .first_row = row, .block_tables = tables()});
    return run();
  }
  std::vector<int32_t> wanted_layers() const { return head_.wanted_layers(); }

 private:
  std::span<const std::vector<int32_t>> tables() const {
    return head_.cache().groups.empty() ? std::span<const std::vector<int32_t>>() : tables_;
  }
  void run_target(const std::vector<int32_t>& token_ids) {
    StepPlan plan;
    plan.token_ids = token_ids;
    plan.wanted_layers = head_.wanted_layers();
    plan.sequences.push_back({.num_tokens = static_cast<int32_t>(token_ids.size()),
                              .block_tables = tables_,
                              .is_prefill = true});
    BatchBuilder builder(config_.cache.block_size, 1);
    const BatchShape shape = builder.shape_of(plan);
    std::vector<std::byte> block(static_cast<size_t>(builder.num_bytes(shape)));
    StepBatch& batch = builder.build(plan, shape, block);
    worker_.prepare(batch);
    NoSink sink;
    worker_.run(batch, sink);
  }
  py::array_t<float> run() {
    step_.samples.assign(step_.logit_rows.size(), {.params = &params_, .only_draws = true});
    head_.run(step_);
    const auto num_rows = static_cast<py::ssize_t>(step_.logit_rows.size());
    const std::vector<float>& logits = head_.last_logits();
    py::array_t<float> out({num_rows, static_cast<py::ssize_t>(logits.size()) / num_rows});
    std::copy(logits.begin(), logits.end(), out.mutable_data());
    return out;
  }

  const EngineConfig config_;
  Worker worker_;
  MaskFiller masks_;
  HeadWorker head_;
  const SamplingParams params_;
  const std::vector<std::vector<int32_t>> tables_{{0, 1, 2, 3, 4, 5, 6, 7}};
  std::vector<int32_t> token_ids_;
  HeadStep step_;
  int32_t place_ = 0;
};

}  // namespace

void register_testing_heads(py::module_& testing) {
  py::class_<TestHead>(testing, "DraftHead")
      .def(py::init<const std::string&, const std::string&, const std::string&>(), "target"_a,
           "method"_a, "head"_a)
      .def("read", &TestHead::read, "token_ids"_a)
      .def("read_next", &TestHead::read_next)
      .def("go_on", &TestHead::go_on, "token_id"_a)
      .def_property_readonly("wanted_layers", &TestHead::wanted_layers);
}

}  // namespace llmserve
