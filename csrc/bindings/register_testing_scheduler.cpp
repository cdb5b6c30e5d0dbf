// The scheduler for tests and benchmarks: `llmserve._core.testing`. A test steps it by hand and
// looks at every sequence and block; the records of a step are in register_testing_plan.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/register.h"
#include "bindings/token_oracle.h"
#include "scheduler/scheduler.h"

namespace py = pybind11;

namespace llmserve {
namespace {

using Tokens = std::vector<int32_t>;

// A scheduler with what it refers to.
struct ScriptedScheduler {
  ScriptedScheduler(const SchedulerConfig& config, const CacheConfig& cache,
                    const std::optional<std::vector<std::string>>& bytes_by_id,
                    const Tokens& special_token_ids, bool forge_collisions)
      : vocabulary(bytes_by_id ? std::make_unique<Vocabulary>(*bytes_by_id, special_token_ids)
                               : nullptr),
        scheduler(config, cache, vocabulary.get(), clock,
                  forge_collisions ? &forged_hash : &chain_hash) {}
  ManualClock clock;
  std::unique_ptr<Vocabulary> vocabulary;
  Scheduler scheduler;
};

// Sets the fields of a config from keyword arguments; an unknown one is an error.
class Fields {
 public:
  explicit Fields(py::kwargs& values) : values_(values) {}
  template <class Value>
  Fields& take(const char* field, Value& value) {
    if (values_.contains(field)) value = values_.attr("pop")(field).cast<Value>();
    return *this;
  }
  void done() const {
    if (!values_.empty()) {
      throw py::type_error("unknown fields: " + std::string(py::str(values_)));
    }
  }

 private:
  py::kwargs& values_;
};

std::unique_ptr<ScriptedScheduler> make_scheduler(py::kwargs values) {
  SchedulerConfig config;
  config.max_model_len = 1024;
  CacheConfig cache;
  std::optional<std::vector<std::string>> bytes_by_id;
  Tokens special_token_ids;
  bool forge_collisions = false;
  Fields(values)
      .take("policy", config.policy)
      .take("max_num_batched_tokens", config.max_num_batched_tokens)
      .take("max_num_seqs", config.max_num_seqs)
      .take("max_num_queued_reqs", config.max_num_queued_reqs)
      .take("max_model_len", config.max_model_len)
      .take("enable_chunked_prefill", config.enable_chunked_prefill)
      .take("max_batch_delay_us", config.max_batch_delay_us)
      .take("eos_token_ids", config.eos_token_ids)
      .take("block_size", cache.block_size)
      .take("num_blocks", cache.num_blocks)
      .take("enable_prefix_caching", cache.enable_prefix_caching)
      .take("bytes_by_id", bytes_by_id)
      .take("special_token_ids", special_token_ids)
      .take("forge_collisions", forge_collisions)
      .done();
  return std::make_unique<ScriptedScheduler>(config, cache, bytes_by_id, special_token_ids,
                                             forge_collisions);
}

void add(ScriptedScheduler& self, RequestId id, Tokens prompt_token_ids, py::kwargs values) {
  Request request;
  request.id = id;
  request.prompt_token_ids = std::move(prompt_token_ids);
  request.arrival_us = self.clock.now_us();
  SamplingParams& params = request.params;
  Fields(values)
      .take("seed", request.seed)
      .take("priority", request.priority)
      .take("cache_salt", request.cache_salt)
      .take("n", params.n)
      .take("stop", params.stop)
      .take("stop_token_ids", params.stop_token_ids)
      .take("ignore_eos", params.ignore_eos)
      .take("max_tokens", params.max_tokens)
      .take("min_tokens", params.min_tokens)
      .take("logprobs", params.logprobs)
      .take("detokenize", params.detokenize)
      .take("skip_special_tokens", params.skip_special_tokens)
      .take("include_stop_str_in_output", params.include_stop_str_in_output)
      .done();
  self.scheduler.add(std::move(request));
}

const char* name(FinishReason reason) {
  constexpr const char* kNames[] = {"", "stop", "length", "abort", "error"};
  return kNames[static_cast<int>(reason)];
}

py::object make_namespace(const py::dict& fields) {
  static const py::handle type =
      py::object(py::module_::import("types").attr("SimpleNamespace")).release();
  return type(**fields);
}

py::list to_namespaces(const std::vector<TokenEvent>& events) {
  py::list list;
  for (const TokenEvent& event : events) {
    py::list logprobs;
    for (const TokenLogprob& entry : event.logprobs) {
      logprobs.append(py::make_tuple(entry.token_id, entry.logprob, entry.rank));
    }
    py::dict fields;
    fields["request_id"] = event.request_id;
    fields["sample_index"] = event.sample_index;
    fields["token_ids"] = event.token_ids;
    fields["text"] = py::bytes(event.text);
    fields["logprobs"] = logprobs;
    fields["finish_reason"] = name(event.finish_reason);
    fields["stop_token_id"] = event.stop_token_id;
    fields["stop_string"] = event.stop_string;
    fields["error"] = event.error;
    fields["num_cached_tokens"] = event.num_cached_tokens;
    fields["num_preemptions"] = event.num_preemptions;
    fields["seed"] = event.seed;
    fields["arrival_us"] = event.times.arrival_us;
    fields["scheduled_us"] = event.times.scheduled_us;
    fields["first_token_us"] = event.times.first_token_us;
    fields["last_token_us"] = event.times.last_token_us;
    fields["is_request_finished"] = event.is_request_finished;
    list.append(make_namespace(fields));
  }
  return list;
}

py::list sequences(const ScriptedScheduler& self) {
  py::list list;
  for (const Sequence* sequence : self.scheduler.sequences()) {
    py::dict fields;
    fields["request_id"] = sequence->context->request.id;
    fields["sample_index"] = sequence->sample_index;
    fields["state"] = std::string(name(sequence->state));
    fields["token_ids"] = sequence->token_ids;
    fields["num_prompt_tokens"] = sequence->num_prompt_tokens;
    fields["num_computed"] = sequence->num_computed;
    fields["num_scheduled"] = sequence->num_scheduled;
    fields["num_preemptions"] = sequence->num_preemptions;
    fields["blocks"] = sequence->table.blocks;
    list.append(make_namespace(fields));
  }
  return list;
}

// (microseconds of schedule(), of commit(), sequences in the step) of each step.
std::vector<std::tuple<double, double, int64_t>> time_steps(ScriptedScheduler& self,
                                                            int32_t num_steps, int32_t vocab_size) {
  using Time = std::chrono::steady_clock;
  using Microseconds = std::chrono::duration<double, std::micro>;
  std::vector<std::tuple<double, double, int64_t>> times;
  for (int32_t i = 0; i < num_steps && self.scheduler.has_unfinished(); ++i) {
    const auto start = Time::now();
    const StepPlan& plan = self.scheduler.schedule();
    const auto scheduled = Time::now();
    const SampledTokens sampled = sample_oracle(plan, vocab_size);
    const auto num_sequences = static_cast<int64_t>(plan.sequences.size());
    const auto before_commit = Time::now();
    self.scheduler.commit(sampled);
    const auto committed = Time::now();
    times.emplace_back(Microseconds(scheduled - start).count(),
                       Microseconds(committed - before_commit).count(), num_sequences);
  }
  return times;
}

py::dict metrics(const ScriptedScheduler& self) {
  EngineMetrics metrics;
  self.scheduler.fill_metrics(metrics);
  py::dict fields;
  fields["num_requests_running"] = metrics.num_requests_running;
  fields["num_requests_waiting"] = metrics.num_requests_waiting;
  fields["num_requests_finished"] = metrics.num_requests_finished;
  fields["num_preemptions"] = metrics.num_preemptions;
  fields["num_prefill_steps"] = metrics.num_prefill_steps;
  fields["num_decode_steps"] = metrics.num_decode_steps;
  fields["prefill_us"] = metrics.prefill_us;
  fields["decode_us"] = metrics.decode_us;
  fields["num_prompt_tokens"] = metrics.num_prompt_tokens;
  fields["num_prefill_tokens"] = metrics.num_prefill_tokens;
  fields["num_generation_tokens"] = metrics.num_generation_tokens;
  fields["prefix_cache_queries"] = metrics.prefix_cache_queries;
  fields["prefix_cache_hits"] = metrics.prefix_cache_hits;
  fields["prefix_cache_evictions"] = metrics.prefix_cache_evictions;
  fields["num_blocks_total"] = metrics.num_blocks_total;
  fields["num_blocks_free"] = metrics.num_blocks_free;
  fields["num_blocks_cached"] = metrics.num_blocks_cached;
  fields["num_blocks_used"] = metrics.num_blocks_used;
  return fields;
}

}  // namespace

void register_testing_scheduler(py::module_& testing) {
  testing.def("scheduling_policies", [] {
    std::vector<std::pair<std::string, std::string>> rows;
    for (const PolicyRow& row : scheduling_policies()) rows.emplace_back(row.name, row.summary);
    return rows;
  });
  py::class_<ScriptedScheduler>(testing, "Scheduler")
      .def(py::init(&make_scheduler))
      .def("add", &add)
      .def("abort", [](ScriptedScheduler& self, RequestId id) { self.scheduler.abort(id); })
      .def("fail",
           [](ScriptedScheduler& self, const std::string& reason) { self.scheduler.fail(reason); })
      .def("preempt", [](ScriptedScheduler& self, RequestId id) { self.scheduler.preempt(id); })
      .def(
          "schedule",
          [](ScriptedScheduler& self) -> const StepPlan& { return self.scheduler.schedule(); },
          py::return_value_policy::reference_internal)
      .def("commit",
           [](ScriptedScheduler& self, const SampledTokens& sampled) {
             return to_namespaces(self.scheduler.commit(sampled).events);
           })
      .def("take_events",
           [](ScriptedScheduler& self) { return to_namespaces(self.scheduler.take_events()); })
      .def("has_unfinished",
           [](const ScriptedScheduler& self) { return self.scheduler.has_unfinished(); })
      .def("wake_us",
           [](const ScriptedScheduler& self) -> std::optional<int64_t> {
             const int64_t wake_us = self.scheduler.wake_us();
             if (wake_us == SchedulingPolicy::kNever) return std::nullopt;
             return wake_us;
           })
      .def("advance_us",
           [](ScriptedScheduler& self, int64_t delta_us) { self.clock.advance_us(delta_us); })
      .def("reset_prefix_cache",
           [](ScriptedScheduler& self) { self.scheduler.reset_prefix_cache(); })
      .def("check_integrity",
           [](const ScriptedScheduler& self) { self.scheduler.check_integrity(); })
      .def("ref_count", [](const ScriptedScheduler& self,
                           int32_t block) { return self.scheduler.kv_cache().ref_count(block); })
      .def("time_steps", &time_steps, py::arg("num_steps"), py::arg("vocab_size"))
      .def("sequences", &sequences)
      // (token slots in the blocks of the running sequences, shared ones once a holder; tokens
      // there)
      .def("kv_usage",
           [](const ScriptedScheduler& self) {
             int64_t num_slots = 0;
             int64_t num_tokens = 0;
             for (const Sequence* sequence : self.scheduler.sequences()) {
               num_slots += static_cast<int64_t>(sequence->table.blocks.size()) *
                            self.scheduler.kv_cache().block_size();
               num_tokens += sequence->num_scheduled;
             }
             return std::make_pair(num_slots, num_tokens);
           })
      .def("metrics", &metrics);
}

}  // namespace llmserve
