// Engines without a model, for tests: every token is known in advance, and faults come on request.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <thread>

#include "bindings/from_kwargs.h"
#include "bindings/register.h"
#include "bindings/token_oracle.h"
#include "core/error.h"
#include "engine/engine.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

struct OracleOptions {
  int32_t vocab_size = 256;
  int64_t step_us = 0;              // how long a step takes
  int64_t fail_at_step = -1;        // execute() throws at this step
  int64_t num_failures = 1;         // and at so many steps from it on, itself included
  int64_t invalid_request_id = -1;  // this request's rows come back as not finite
};

class OracleExecutor final : public Executor {
 public:
  explicit OracleExecutor(const OracleOptions& options) : options_(options) {}

  const SampledTokens& execute(const StepPlan& plan) override {
    std::this_thread::sleep_for(std::chrono::microseconds(options_.step_us));
    const int64_t failed = plan.step_id - options_.fail_at_step;
    if (options_.fail_at_step >= 0 && failed >= 0 && failed < options_.num_failures)
      throw DeviceError("the oracle was told to fail");
    sampled_ = sample_oracle(plan, options_.vocab_size);
    for (size_t row = 0; row < plan.logit_rows.size(); ++row) {
      const RequestId id = plan.sequences[plan.logit_rows[row].sequence_idx].request_id;
      sampled_.rows[row].is_valid = id != options_.invalid_request_id;
    }
    return sampled_;
  }
  int64_t vocab_size() const override { return options_.vocab_size; }
  int64_t hidden_size() const override { return 1; }
  std::string description() const override { return "token oracle"; }
  MemoryUse memory_use() const override { return {}; }
  void release(MemoryPart) override {}  // it holds nothing
  void restore(MemoryPart) override {}

 private:
  const OracleOptions options_;
  SampledTokens sampled_;
};

}  // namespace

void register_testing_engine(py::module_& testing) {
  py::class_<OracleOptions>(testing, "OracleOptions")
      .def(py::init(&from_kwargs<OracleOptions>))
      .def_readwrite("vocab_size", &OracleOptions::vocab_size)
      .def_readwrite("step_us", &OracleOptions::step_us)
      .def_readwrite("fail_at_step", &OracleOptions::fail_at_step)
      .def_readwrite("num_failures", &OracleOptions::num_failures)
      .def_readwrite("invalid_request_id", &OracleOptions::invalid_request_id);
  testing.def(
      "oracle_engine",
      [](const EngineConfig& config, const OracleOptions& options,
         std::optional<Vocabulary> vocabulary) {
        return std::make_unique<Engine>(config, std::move(vocabulary),
                                        std::make_unique<OracleExecutor>(options));
      },
      "config"_a, "options"_a, "vocabulary"_a = py::none());
}

}  // namespace llmserve
