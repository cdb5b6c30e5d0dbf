// Engines without a model, for tests: every token is known in advance, and faults come on request.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/from_kwargs.h"
#include "bindings/stepped_scheduler.h"
#include "core/clock.h"
#include "core/error.h"
#include "engine/engine_group.h"
#include "engine/replicas.h"
#include "engine/step_runner.h"
#include "testing/faulty_ranks.h"
#include "testing/recorded_drafter.h"
#include "testing/register.h"
#include "testing/token_oracle.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

// A step that waits under way, the n-th that is waited for: what a test does meanwhile, it does
// before that step's commit.
class StepGate {
 public:
  explicit StepGate(int64_t step_id) : step_id_(step_id) {}

  // The engine's thread, in the step. A test that never opens the gate fails, but does not hang.
  void pass(int64_t step_id) {
    std::unique_lock lock(mutex_);
    if (step_id != step_id_) return;
    is_held_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kPatience, [this] { return is_open_; });
  }
  void wait_until_held() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kPatience, [this] { return is_held_; }))
      throw InternalError(concat("step ", step_id_, " never began"));
  }
  void open() {
    const std::scoped_lock lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }

 private:
  static constexpr std::chrono::seconds kPatience{30};

  const int64_t step_id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_held_ = false;
  bool is_open_ = false;
};

struct OracleOptions {
  int32_t vocab_size = 256;
  int64_t step_us = 0;              // how long a step takes
  int64_t row_us = 0;               // and besides for each token
  int64_t invalid_request_id = -1;  // this request's rows come back as not finite
  int32_t max_in_flight = 1;
  bool runs_ahead = true;
  int64_t sweep_bytes = 0;           // read by each step: what a forward leaves of the caches
  int64_t num_background_tasks = 0;  // those left are its mapped_bytes
  // Tokens are of the context as it is read back through the block tables (ShadowModel), instead of
  // seed and position alone.
  bool reads_blocks = false;
  int64_t max_exact_rows = 0;
  std::map<RequestId, std::vector<int32_t>> recorded;  // what these requests generate
};

struct FaultOptions {
  int64_t fail_at_step = -1;  // wait() throws at this call, when the step's work is done; from 1
  int64_t num_failures = 1;   // and at so many calls from it on, itself included
  std::string fault = "device";
  int32_t num_replicas = 1;  // the first, of an engine of several
};

[[noreturn]] void throw_fault(std::string_view fault) {
  while (fault == "stuck") std::this_thread::sleep_for(std::chrono::hours(1));
  if (fault == "memory") throw ResourceExhausted("the executor was told to have no memory left");
  if (fault == "allocation") throw std::bad_alloc();
  if (fault == "internal") check_internal(false, "the executor was told to fail");
  throw DeviceError("the executor was told to fail");
}

// Its steps take their time one after another, as a device's do, beside what the engine does.
class OracleExecutor final : public Executor {
 public:
  OracleExecutor(const OracleOptions& options, const CacheConfig& cache,
                 std::shared_ptr<StepGate> gate)
      : options_(options),
        gate_(std::move(gate)),
        num_background_tasks_(options.num_background_tasks) {
    swept_.resize(static_cast<size_t>(options.sweep_bytes / 8), 1);
    if (!options.reads_blocks) return;
    std::vector<int32_t> windows;
    for (const CacheGroupSpec& group : cache.groups) windows.push_back(group.window);
    shadow_.emplace(cache.num_blocks, cache.block_size, options.vocab_size, std::move(windows));
  }

  int32_t max_in_flight() const override { return options_.max_in_flight; }
  bool runs_ahead() const override { return options_.runs_ahead; }
  void launch(const StepPlan& plan) override {
    sum_ = std::accumulate(swept_.begin(), swept_.end(), uint64_t{0});
    SampledTokens sampled =
        shadow_ ? shadow_->execute(plan) : sample_oracle(plan, options_.vocab_size);
    for (size_t row = 0; row < plan.logit_rows.size(); ++row) {
      const RequestId id = plan.sequences[plan.logit_rows[row].sequence_idx].request_id;
      sampled.rows[row].is_valid = id != options_.invalid_request_id;
      if (const auto found = options_.recorded.find(id); found != options_.recorded.end())
        sampled.rows[row].token_id = found->second.at(static_cast<size_t>(
            plan.logit_rows[row].position - plan.logit_rows[row].num_prompt_tokens));
    }
    const Time begin = std::max(Clock::now(), flights_.empty() ? Time() : flights_.back().end);
    const auto time_us = options_.step_us + options_.row_us * plan.num_tokens();
    flights_.push_back(
        {.end = begin + std::chrono::microseconds(time_us), .sampled = std::move(sampled)});
  }
  const SampledTokens& wait() override {
    if (gate_) gate_->pass(++num_waits_);
    std::this_thread::sleep_until(flights_.front().end);
    sampled_ = std::move(flights_.front().sampled);
    flights_.pop_front();
    return sampled_;
  }
  int64_t max_exact_rows() const override { return options_.max_exact_rows; }
  bool do_background_work() override {
    return num_background_tasks_ > 0 && --num_background_tasks_ > 0;
  }
  void abandon() noexcept override { flights_.clear(); }
  void report_to(NewsSink) override {}  // nothing finishes beside its steps
  int64_t vocab_size() const override { return options_.vocab_size; }
  int64_t hidden_size() const override { return 1; }
  std::string description() const override { return "token oracle"; }
  MemoryUse memory_use() const override { return {.mapped_bytes = num_background_tasks_}; }
  void release(MemoryPart) override {}  // it holds nothing
  void restore(MemoryPart) override {}

 private:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;
  struct Flight {
    Time end;
    SampledTokens sampled;
  };

  const OracleOptions options_;
  const std::shared_ptr<StepGate> gate_;
  std::optional<ShadowModel> shadow_;
  std::deque<Flight> flights_;
  int64_t num_waits_ = 0;
  std::vector<uint64_t> swept_;
  volatile uint64_t sum_ = 0;  // so that they are read
  int64_t num_background_tasks_;
  SampledTokens sampled_;
};

// Another executor, until it fails. By then the other has written to the step's blocks. It may have
// a drafter of its own.
class FaultyExecutor final : public Executor {
 public:
  FaultyExecutor(std::unique_ptr<Executor> executor, FaultOptions options,
                 std::optional<RecordedDrafterOptions> drafter)
      : executor_(std::move(executor)),
        options_(std::move(options)),
        drafter_(std::move(drafter)) {}

  int32_t max_in_flight() const override { return executor_->max_in_flight(); }
  bool runs_ahead() const override { return executor_->runs_ahead(); }
  void launch(const StepPlan& plan) override { executor_->launch(plan); }
  const SampledTokens& wait() override {
    const SampledTokens& sampled = executor_->wait();
    const int64_t failed = ++num_waits_ - options_.fail_at_step;
    if (options_.fail_at_step >= 0 && failed >= 0 && failed < options_.num_failures)
      throw_fault(options_.fault);
    return sampled;
  }
  DraftModel* draft_model() override { return executor_->draft_model(); }
  HeadModel* head_model() override { return executor_->head_model(); }
  int64_t max_exact_rows() const override { return executor_->max_exact_rows(); }
  std::unique_ptr<Drafter> make_drafter() override {
    return drafter_ ? std::make_unique<RecordedDrafter>(*drafter_) : nullptr;
  }
  const Tensor* wanted_states() const override { return executor_->wanted_states(); }
  bool do_background_work() override { return executor_->do_background_work(); }
  bool do_idle_work() override { return executor_->do_idle_work(); }
  void report_to(NewsSink sink) override { executor_->report_to(std::move(sink)); }
  void abandon() noexcept override { executor_->abandon(); }
  RankPatience patience() const override { return executor_->patience(); }
  bool has_left_rank() const override { return executor_->has_left_rank(); }
  void forget(RequestId request_id, int32_t sample_index) override {
    executor_->forget(request_id, sample_index);
  }
  void check_idle() const override { executor_->check_idle(); }
  int64_t vocab_size() const override { return executor_->vocab_size(); }
  int64_t hidden_size() const override { return executor_->hidden_size(); }
  std::string description() const override { return executor_->description(); }
  MemoryUse memory_use() const override { return executor_->memory_use(); }
  std::string warning() const override { return executor_->warning(); }
  void fill_metrics(EngineMetrics& metrics) const override { executor_->fill_metrics(metrics); }
  std::shared_ptr<const ExpertBalancer> balance_experts(
      const ExpertBalanceOptions& options) override {
    return executor_->balance_experts(options);
  }
  void release(MemoryPart part) override { executor_->release(part); }
  void restore(MemoryPart part) override { executor_->restore(part); }

 private:
  const std::unique_ptr<Executor> executor_;
  const FaultOptions options_;
  const std::optional<RecordedDrafterOptions> drafter_;
  int64_t num_waits_ = 0;
};

std::unique_ptr<StepRunner> make_runner(const EngineConfig& config,
                                        const RankFaultOptions& faults = {}) {
  config.validate();
  return std::make_unique<StepRunner>(config, open_checkpoint(config.model_path),
                                      faulty_ranks(faults), nullptr, std::stop_token(),
                                      patience_of(faults));
}

void launch(StepRunner& runner, const StepPlanRecord& record, std::vector<int32_t> wanted_layers,
            int32_t adapter, int32_t state_slot) {
  StepPlan plan = record.plan;
  plan.wanted_layers = std::move(wanted_layers);
  for (ScheduledSequence& sequence : plan.sequences) {
    sequence.adapter = adapter;
    sequence.state_slot = state_slot;
  }
  runner.launch(plan);
}

// What the lines of lent connections cost at least: the same bytes to each, and nothing else.
int64_t send_ns(const std::vector<int>& fds, const std::string& line) {
  bool is_sent = true;
  const int64_t begin_ns = thread_cpu_ns();
  for (const int fd : fds)
    is_sent &= send(fd, line.data(), line.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0;
  const int64_t elapsed_ns = thread_cpu_ns() - begin_ns;
  if (!is_sent) throw InvalidArgument("send_ns: a socket is closed, or its reader does not read");
  return elapsed_ns;
}

}  // namespace

void register_testing_engine(py::module_& testing) {
  py::class_<OracleOptions>(testing, "OracleOptions")
      .def(py::init(&from_kwargs<OracleOptions>))
      .def_readwrite("vocab_size", &OracleOptions::vocab_size)
      .def_readwrite("step_us", &OracleOptions::step_us)
      .def_readwrite("row_us", &OracleOptions::row_us)
      .def_readwrite("invalid_request_id", &OracleOptions::invalid_request_id)
      .def_readwrite("max_in_flight", &OracleOptions::max_in_flight)
      .def_readwrite("runs_ahead", &OracleOptions::runs_ahead)
      .def_readwrite("sweep_bytes", &OracleOptions::sweep_bytes)
      .def_readwrite("num_background_tasks", &OracleOptions::num_background_tasks)
      .def_readwrite("reads_blocks", &OracleOptions::reads_blocks)
      .def_readwrite("max_exact_rows", &OracleOptions::max_exact_rows)
      .def_readwrite("recorded", &OracleOptions::recorded);
  py::class_<StepGate, std::shared_ptr<StepGate>>(testing, "StepGate")
      .def(py::init<int64_t>(), "step_id"_a)
      .def("wait_until_held", &StepGate::wait_until_held, py::call_guard<py::gil_scoped_release>())
      .def("open", &StepGate::open);
  py::class_<FaultOptions>(testing, "FaultOptions")
      .def(py::init(&from_kwargs<FaultOptions>))
      .def_readwrite("fail_at_step", &FaultOptions::fail_at_step)
      .def_readwrite("num_failures", &FaultOptions::num_failures)
      .def_readwrite("fault", &FaultOptions::fault)
      .def_readwrite("num_replicas", &FaultOptions::num_replicas);
  py::class_<RankFaultOptions>(testing, "RankFaultOptions")
      .def(py::init(&from_kwargs<RankFaultOptions>))
      .def_readwrite("rank", &RankFaultOptions::rank)
      .def_readwrite("fail_at_exchange", &RankFaultOptions::fail_at_exchange)
      .def_readwrite("num_failures", &RankFaultOptions::num_failures)
      .def_readwrite("in_second_half", &RankFaultOptions::in_second_half)
      .def_readwrite("fault", &RankFaultOptions::fault)
      .def_readwrite("timeout_s", &RankFaultOptions::timeout_s)
      .def_readwrite("still_s", &RankFaultOptions::still_s)
      .def_readwrite("left_s", &RankFaultOptions::left_s);
  testing.def(
      "oracle_engine",
      [](const EngineConfig& config, const OracleOptions& options,
         const std::optional<Vocabulary>& vocabulary, const FaultOptions& faults,
         const std::shared_ptr<StepGate>& gate,
         const std::optional<RecordedDrafterOptions>& drafter) {
        std::vector<std::unique_ptr<Executor>> executors;
        for (int32_t i = 0; i < config.parallel.data; ++i)
          executors.push_back(std::make_unique<FaultyExecutor>(
              std::make_unique<OracleExecutor>(options, config.cache, gate),
              i < faults.num_replicas ? faults : FaultOptions(), drafter));
        return std::make_unique<EngineGroup>(config, vocabulary, std::move(executors));
      },
      "config"_a, "options"_a, "vocabulary"_a = py::none(), "faults"_a = FaultOptions(),
      "gate"_a = py::none(), "drafter"_a = py::none(), "Of replicas the first have the faults.");
  testing.def(
      "faulty_engine",
      [](const EngineConfig& config, const FaultOptions& faults,
         std::optional<Vocabulary> vocabulary, std::optional<RecordedDrafterOptions> drafter,
         const RankFaultOptions& rank_faults) {
        std::vector<std::unique_ptr<Executor>> executors;
        if (config.parallel.data > 1) {
          config.validate();
          executors = make_executors(config, open_checkpoint(config.model_path));
        } else {
          executors.push_back(make_runner(config, rank_faults));
        }
        executors[0] =
            std::make_unique<FaultyExecutor>(std::move(executors[0]), faults, std::move(drafter));
        return std::make_unique<EngineGroup>(config, vocabulary, std::move(executors));
      },
      "config"_a, "faults"_a = FaultOptions(), "vocabulary"_a = py::none(),
      "drafter"_a = py::none(), "rank_faults"_a = RankFaultOptions(),
      "A model's engine; of replicas the first has the faults, but for those of ranks.");
  py::class_<StepRunner>(testing, "StepRunner")
      .def(py::init([](const EngineConfig& config) { return make_runner(config); }), "config"_a)
      .def_property_readonly("description", &StepRunner::description)
      .def("launch", &launch, "plan"_a, py::kw_only(), "wanted_layers"_a = std::vector<int32_t>(),
           "adapter"_a = -1, "state_slot"_a = -1,
           py::keep_alive<1, 2>(),  // the plan owns parameters that samplers keep
           "With what the scheduler does not plan yet.")
      .def_property_readonly(
          "workspace_bytes",
          [](const StepRunner& self) { return self.memory_use().workspace_bytes; })
      .def("layer_states",
           [](const StepRunner& self) {
             const Tensor& states = self.layer_states();
             return py::array_t<float>({states.shape[0], states.shape[1], states.shape[2]},
                                       states.as<const float>());
           })
      .def("wait", [](StepRunner& self) { return SampledTokens(self.wait()); })
      .def("forget", &StepRunner::forget, "request_id"_a, "sample_index"_a = 0)
      .def("check_idle", &StepRunner::check_idle);
  testing.def("send_ns", &send_ns, "fds"_a, "line"_a,
              "Processor time of a send of these bytes to each of the sockets.");
}

}  // namespace llmserve
