#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "bindings/array.h"
#include "bindings/block_events.h"
#include "bindings/field_repr.h"
#include "bindings/register.h"
#include "core/error.h"
#include "core/start_thread.h"
#include "engine/engine_group.h"
#include "engine/kv_mover.h"
#include "engine/replicas.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

py::object finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return py::none();
    case FinishReason::kStop:
      return py::str("stop");
    case FinishReason::kLength:
      return py::str("length");
    case FinishReason::kAbort:
      return py::str("abort");
    case FinishReason::kError:
    case FinishReason::kInvalid:
      return py::str("error");
  }
  return py::none();
}

// What stopped it: the string, the token id, or None (end of sequence, length, abort).
py::object stop_reason(const TokenEvent& event) {
  if (!event.stop_string.empty()) return py::str(event.stop_string);
  if (event.stop_token_id >= 0) return py::int_(event.stop_token_id);
  return py::none();
}

// The answer of a pooling request, in place: [E] or [T, E] or [T, V].
std::optional<Array> pooled_array(const TokenEvent& event) {
  if (!event.pooled) return std::nullopt;
  const HostArray& values = event.pooled->values;
  const bool is_vector = event.pooled->params.task == PoolingTask::kEmbed;
  const Tensor matrix(values.row(0), DType::kF32, {values.num_rows, values.width});
  const Tensor vector(values.row(0), DType::kF32, {values.width});
  return Array(is_vector ? vector : matrix, event.pooled);
}

void register_events(py::module_& module) {
  py::class_<TokenLogprob>(module, "TokenLogprob")
      .def("__repr__", &field_repr)
      .def_readonly("token_id", &TokenLogprob::token_id)
      .def_readonly("logprob", &TokenLogprob::logprob)
      .def_readonly("rank", &TokenLogprob::rank);
  py::class_<RequestTimes>(module, "RequestTimes")
      .def("__repr__", &field_repr)
      .def_readonly("arrival_us", &RequestTimes::arrival_us)
      .def_readonly("scheduled_us", &RequestTimes::scheduled_us)
      .def_readonly("first_token_us", &RequestTimes::first_token_us)
      .def_readonly("last_token_us", &RequestTimes::last_token_us);
  py::class_<TokenEvent>(module, "TokenEvent")
      .def("__repr__", &field_repr)
      .def_readonly("request_id", &TokenEvent::request_id)
      .def_readonly("sample_index", &TokenEvent::sample_index)
      .def_readonly("token_ids", &TokenEvent::token_ids)
      .def_readonly("text", &TokenEvent::text)
      .def_readonly("logprobs", &TokenEvent::logprobs)
      .def_readonly("top_logprobs", &TokenEvent::top_logprobs)
      .def_readonly("prompt_logprobs", &TokenEvent::prompt_logprobs)
      .def_readonly("prompt_top_logprobs", &TokenEvent::prompt_top_logprobs)
      .def_property_readonly("pooled", &pooled_array)
      .def_property_readonly(
          "finish_reason",
          [](const TokenEvent& event) { return finish_reason_name(event.finish_reason); })
      .def_property_readonly("stop_reason", &stop_reason)
      .def_readonly("error", &TokenEvent::error)
      .def_readonly("num_cached_tokens", &TokenEvent::num_cached_tokens)
      .def_readonly("num_preemptions", &TokenEvent::num_preemptions)
      .def_readonly("num_draft_tokens", &TokenEvent::num_draft_tokens)
      .def_readonly("num_accepted_tokens", &TokenEvent::num_accepted_tokens)
      .def_readonly("seed", &TokenEvent::seed)
      .def_readonly("times", &TokenEvent::times)
      .def_readonly("is_request_finished", &TokenEvent::is_request_finished);
}

void register_metrics(py::module_& module) {
  py::class_<EngineMetrics>(module, "EngineMetrics")
      .def("__repr__", &field_repr)
      .def_readonly("num_requests_running", &EngineMetrics::num_requests_running)
      .def_readonly("num_requests_waiting", &EngineMetrics::num_requests_waiting)
      .def_readonly("num_requests_finished", &EngineMetrics::num_requests_finished)
      .def_readonly("num_requests_aborted", &EngineMetrics::num_requests_aborted)
      .def_readonly("num_preemptions", &EngineMetrics::num_preemptions)
      .def_readonly("num_rank_failures", &EngineMetrics::num_rank_failures)
      .def_readonly("num_nccl_errors", &EngineMetrics::num_nccl_errors)
      .def_readonly("num_seats", &EngineMetrics::num_seats)
      .def_readonly("weight_read_us", &EngineMetrics::weight_read_us)
      .def_readonly("weight_pack_us", &EngineMetrics::weight_pack_us)
      .def_readonly("num_overlapped_steps", &EngineMetrics::num_overlapped_steps)
      .def_readonly("num_prefill_steps", &EngineMetrics::num_prefill_steps)
      .def_readonly("num_decode_steps", &EngineMetrics::num_decode_steps)
      .def_readonly("prefill_us", &EngineMetrics::prefill_us)
      .def_readonly("decode_us", &EngineMetrics::decode_us)
      .def_readonly("num_graph_captures", &EngineMetrics::num_graph_captures)
      .def_readonly("num_graph_replays", &EngineMetrics::num_graph_replays)
      .def_readonly("num_prompt_tokens", &EngineMetrics::num_prompt_tokens)
      .def_readonly("num_prefill_tokens", &EngineMetrics::num_prefill_tokens)
      .def_readonly("num_recomputed_tokens", &EngineMetrics::num_recomputed_tokens)
      .def_readonly("num_generation_tokens", &EngineMetrics::num_generation_tokens)
      .def_readonly("num_drafts", &EngineMetrics::num_drafts)
      .def_readonly("num_draft_tokens", &EngineMetrics::num_draft_tokens)
      .def_readonly("num_accepted_tokens", &EngineMetrics::num_accepted_tokens)
      .def_property_readonly("num_accepted_per_pos",
                             [](const EngineMetrics& metrics) {
                               return std::vector<int64_t>(metrics.num_accepted_per_pos.begin(),
                                                           metrics.num_accepted_per_pos.end());
                             })
      .def_readonly("draft_us", &EngineMetrics::draft_us)
      .def_readonly("num_lines", &EngineMetrics::num_lines)
      .def_readonly("line_us", &EngineMetrics::line_us)
      .def_readonly("num_leased_blocks", &EngineMetrics::num_leased_blocks)
      .def_readonly("num_hand_overs_sent", &EngineMetrics::num_hand_overs_sent)
      .def_readonly("num_hand_overs_lapsed", &EngineMetrics::num_hand_overs_lapsed)
      .def_readonly("num_hand_overs_received", &EngineMetrics::num_hand_overs_received)
      .def_property_readonly("num_hand_overs_failed",
                             [](const EngineMetrics& metrics) {
                               py::dict result;
                               for (size_t i = 0; i < kNumHandOverCauses; ++i)
                                 result[py::str(name(static_cast<HandOverCause>(i)))] =
                                     metrics.num_hand_overs_failed[i];
                               return result;
                             })
      .def_readonly("hand_over_sent_bytes", &EngineMetrics::hand_over_sent_bytes)
      .def_readonly("hand_over_received_bytes", &EngineMetrics::hand_over_received_bytes)
      .def_readonly("hand_over_receive_us", &EngineMetrics::hand_over_receive_us)
      .def_readonly("prefix_cache_queries", &EngineMetrics::prefix_cache_queries)
      .def_readonly("prefix_cache_hits", &EngineMetrics::prefix_cache_hits)
      .def_readonly("prefix_cache_evictions", &EngineMetrics::prefix_cache_evictions)
      .def_readonly("num_blocks_total", &EngineMetrics::num_blocks_total)
      .def_readonly("num_blocks_free", &EngineMetrics::num_blocks_free)
      .def_readonly("num_blocks_cached", &EngineMetrics::num_blocks_cached)
      .def_readonly("num_blocks_used", &EngineMetrics::num_blocks_used);
}

void register_histograms(py::module_& module) {
  py::class_<Histogram>(module, "Histogram")
      .def("__repr__", &field_repr)
      .def_property_readonly("bounds",
                             [](const Histogram& histogram) {
                               return std::vector<double>(histogram.bounds.begin(),
                                                          histogram.bounds.end());
                             })
      .def_readonly("counts", &Histogram::counts)
      .def_readonly("sum", &Histogram::sum);
  py::class_<EngineHistograms>(module, "EngineHistograms")
      .def("__repr__", &field_repr)
      .def_property_readonly("by_name",
                             [](const EngineHistograms& all) {
                               py::dict result;
                               for (size_t i = 0; i < kNumDistributions; ++i)
                                 result[py::str(name(static_cast<Distribution>(i)))] =
                                     all.histograms[i];
                               return result;
                             })
      .def_property_readonly(
          "num_finished",
          [](const EngineHistograms& all) {
            py::dict result;
            for (const FinishReason reason : {FinishReason::kStop, FinishReason::kLength,
                                              FinishReason::kAbort, FinishReason::kError})
              result[finish_reason_name(reason)] = all.num_finished[static_cast<size_t>(reason)];
            result["invalid"] = all.num_finished[static_cast<size_t>(FinishReason::kInvalid)];
            return result;
          })
      .def_readonly("num_cached_prompt_tokens", &EngineHistograms::num_cached_prompt_tokens);
}

void register_memory_use(py::module_& module) {
  py::class_<MemoryUse>(module, "MemoryUse")
      .def("__repr__", &field_repr)
      .def_readonly("weight_bytes", &MemoryUse::weight_bytes)
      .def_readonly("mapped_bytes", &MemoryUse::mapped_bytes)
      .def_readonly("workspace_bytes", &MemoryUse::workspace_bytes)
      .def_readonly("kv_cache_bytes", &MemoryUse::kv_cache_bytes)
      .def_readonly("pool_used_bytes", &MemoryUse::pool_used_bytes)
      .def_readonly("pool_used_high_bytes", &MemoryUse::pool_used_high_bytes)
      .def_readonly("pool_reserved_bytes", &MemoryUse::pool_reserved_bytes)
      .def_readonly("pool_reserved_high_bytes", &MemoryUse::pool_reserved_high_bytes)
      .def_readonly("graph_bytes", &MemoryUse::graph_bytes);
}

void register_trace(py::module_& module) {
  py::class_<Decision>(module, "Decision")
      .def("__repr__", &field_repr)
      .def_readonly("request_id", &Decision::request_id)
      .def_readonly("sample_index", &Decision::sample_index)
      .def_property_readonly("kind", [](const Decision& decision) { return name(decision.kind); })
      .def_readonly("detail", &Decision::detail);
  py::class_<ExchangeRecord>(module, "ExchangeRecord")
      .def("__repr__", &field_repr)
      .def_property_readonly("name", [](const ExchangeRecord& record) { return record.name; })
      .def_readonly("half", &ExchangeRecord::half)
      .def_readonly("start_us", &ExchangeRecord::start_us)
      .def_readonly("duration_us", &ExchangeRecord::duration_us);
  py::class_<StepRecord>(module, "StepRecord")
      .def("__repr__", &field_repr)
      .def_readonly("step_id", &StepRecord::step_id)
      .def_readonly("replica", &StepRecord::replica)
      .def_property_readonly("phase", &StepRecord::phase)
      .def_readonly("start_us", &StepRecord::start_us)
      .def_readonly("draft_us", &StepRecord::draft_us)
      .def_readonly("schedule_us", &StepRecord::schedule_us)
      .def_readonly("execute_us", &StepRecord::execute_us)
      .def_readonly("wait_us", &StepRecord::wait_us)
      .def_readonly("commit_us", &StepRecord::commit_us)
      .def_readonly("num_sequences", &StepRecord::num_sequences)
      .def_readonly("num_tokens", &StepRecord::num_tokens)
      .def_readonly("num_prefill_tokens", &StepRecord::num_prefill_tokens)
      .def_readonly("num_in_flight", &StepRecord::num_in_flight)
      .def_readonly("num_draft_tokens", &StepRecord::num_draft_tokens)
      .def_readonly("num_accepted_tokens", &StepRecord::num_accepted_tokens)
      .def_readonly("num_running", &StepRecord::num_running)
      .def_readonly("num_waiting", &StepRecord::num_waiting)
      .def_readonly("num_blocks_used", &StepRecord::num_blocks_used)
      .def_readonly("decisions", &StepRecord::decisions);
  py::class_<RequestRecord>(module, "RequestRecord")
      .def("__repr__", &field_repr)
      .def_readonly("request_id", &RequestRecord::request_id)
      .def_readonly("arrival_us", &RequestRecord::arrival_us)
      .def_readonly("queued_us", &RequestRecord::queued_us)
      .def_readonly("scheduled_us", &RequestRecord::scheduled_us)
      .def_readonly("first_token_us", &RequestRecord::first_token_us)
      .def_readonly("last_token_us", &RequestRecord::last_token_us)
      .def_readonly("finished_us", &RequestRecord::finished_us)
      .def_readonly("num_samples", &RequestRecord::num_samples)
      .def_readonly("num_preemptions", &RequestRecord::num_preemptions)
      .def_readonly("num_prompt_tokens", &RequestRecord::num_prompt_tokens)
      .def_readonly("num_cached_tokens", &RequestRecord::num_cached_tokens)
      .def_readonly("num_generation_tokens", &RequestRecord::num_generation_tokens)
      .def_readonly("num_draft_tokens", &RequestRecord::num_draft_tokens)
      .def_readonly("num_accepted_tokens", &RequestRecord::num_accepted_tokens)
      .def_readonly("former_replica", &RequestRecord::former_replica)
      .def_readonly("taken_over_us", &RequestRecord::taken_over_us)
      .def_readonly("replica", &RequestRecord::replica)
      .def_property_readonly("finish_reason", [](const RequestRecord& record) {
        return finish_reason_name(record.finish_reason);
      });
}

// A model on its way, on a thread of its own: who wants an engine reads the tokenizer meanwhile,
// which keeps one thread busy for as long as the look at the weights keeps all.
class LoadingModel {
 public:
  // `checkpoint` is config.model_path, opened.
  LoadingModel(const EngineConfig& config, std::shared_ptr<Checkpoint> checkpoint)
      : config_(config) {
    config_.validate();
    std::packaged_task<Executors()> load(
        [config, checkpoint = std::move(checkpoint), given_up = given_up_.get_token()] {
          return make_executors(config, *checkpoint, given_up);
        });
    executors_ = load.get_future();
    thread_ = start_thread(std::move(load));
  }
  ~LoadingModel() { close(); }
  LoadingModel(const LoadingModel&) = delete;
  LoadingModel& operator=(const LoadingModel&) = delete;

  // Until it is loaded, or the time is over.
  bool is_loaded(std::chrono::milliseconds timeout) const {
    return !executors_.valid() || executors_.wait_for(timeout) == std::future_status::ready;
  }
  // Once, not after close(). Throws what loading has thrown.
  std::unique_ptr<EngineGroup> make_engine(const std::optional<Vocabulary>& vocabulary,
                                           const std::optional<Vocabulary>& draft_vocabulary) {
    if (!executors_.valid()) throw InvalidArgument("the loaded model has been taken, or given up");
    return std::make_unique<EngineGroup>(config_, vocabulary, executors_.get(), draft_vocabulary);
  }
  const EngineConfig& config() const { return config_; }
  // Gives up what was not taken.
  void close() {
    given_up_.request_stop();
    if (thread_.joinable()) thread_.join();
    executors_ = {};
  }

 private:
  const EngineConfig config_;
  std::stop_source given_up_;
  std::future<Executors> executors_;
  std::thread thread_;
};

// A forked child leaves its parent's engine where it is, and so does a thread that hangs.
struct DeleteInOwnProcess {
  void operator()(EngineGroup* engine) const {
    if (!engine->is_of_this_process()) return;
    engine->close();
    if (!engine->has_left_thread()) delete engine;
  }
};
using EngineHolder = std::unique_ptr<EngineGroup, DeleteInOwnProcess>;

// A number as Python writes it, where it writes one of so many digits at all.
std::string text_of(py::handle number) {
  PyObject* const text = PyObject_Str(number.ptr());
  if (text != nullptr) return py::reinterpret_steal<py::str>(text);
  PyErr_Clear();
  return "a number of thousands of digits";
}

// Token ids of any sequence: for lists several times as fast as pybind11's caster. Throws
// InvalidArgument for what no vocabulary has an entry for, which would not fit.
std::vector<int32_t> read_token_ids(py::handle sequence) {
  // A tuple: what an item's __index__ does to a list would be done to the loop.
  const auto items = py::reinterpret_steal<py::object>(PySequence_Tuple(sequence.ptr()));
  if (!items) throw py::error_already_set();
  const Py_ssize_t count = PyTuple_GET_SIZE(items.ptr());
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const item = PyTuple_GET_ITEM(items.ptr(), i);
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(item, &overflow);
    if (value == -1 && overflow == 0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    ids[static_cast<size_t>(i)] = static_cast<int32_t>(value);
    if (overflow != 0 || ids[static_cast<size_t>(i)] != value) {
      throw InvalidArgument(concat("prompt_token_ids[", i, "] is ", text_of(item),
                                   ", and the ids of every vocabulary have 32 bits"));
    }
  }
  return ids;
}

void register_request(py::module_& module) {
  py::class_<Request>(module, "EngineRequest")
      .def(
          py::init(
              [](py::handle prompt_token_ids, const SamplingParams& params, int32_t priority,
                 std::string cache_salt, bool is_streamed, std::shared_ptr<HostArray> prompt_embeds,
                 std::optional<PoolingParams> pooling, std::optional<BeamSearchParams> beam_search,
                 std::vector<int32_t> resumed_token_ids, std::optional<int64_t> send_to,
                 std::optional<std::pair<int32_t, int64_t>> receive_from) {
                std::optional<HandOver> to, from;
                if (send_to) to = {.peer = 0, .id = *send_to};
                if (receive_from) from = {.peer = receive_from->first, .id = receive_from->second};
                return Request{.prompt_token_ids = read_token_ids(prompt_token_ids),
                               .prompt_embeds = std::move(prompt_embeds),
                               .params = params,
                               .pooling = pooling,
                               .beam_search = beam_search,
                               .priority = priority,
                               .cache_salt = std::move(cache_salt),
                               .receive_from = from,
                               .send_to = to,
                               .resumed_token_ids = std::move(resumed_token_ids),
                               .is_streamed = is_streamed};
              }),
          "prompt_token_ids"_a, "params"_a, "priority"_a = 0, "cache_salt"_a = "",
          "is_streamed"_a = true, "prompt_embeds"_a = py::none(), "pooling"_a = py::none(),
          "beam_search"_a = py::none(), "resumed_token_ids"_a = std::vector<int32_t>(),
          "send_to"_a = py::none(), "receive_from"_a = py::none())
      .def_readwrite("params", &Request::params)
      .def_readwrite("is_streamed", &Request::is_streamed);
}

}  // namespace

void register_engine(py::module_& module) {
  register_events(module);
  register_metrics(module);
  register_histograms(module);
  register_trace(module);
  register_memory_use(module);
  register_request(module);
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<LoadingModel>(module, "LoadingModel")
      .def(py::init<const EngineConfig&, std::shared_ptr<Checkpoint>>(), "config"_a, "checkpoint"_a)
      .def_property_readonly("config", &LoadingModel::config)
      .def("__enter__", [](py::object self) { return self; })
      .def(
          "__exit__",
          [](LoadingModel& model, const py::object&, const py::object&, const py::object&) {
            const py::gil_scoped_release release;
            model.close();
          },
          "exception_type"_a, "exception"_a, "traceback"_a);
  py::class_<EngineGroup, EngineHolder>(module, "Engine")
      .def(py::init([](LoadingModel& model, const std::optional<Vocabulary>& vocabulary,
                       const std::optional<Vocabulary>& draft_vocabulary) {
             // Other nodes may take minutes to come: Ctrl-C is heard.
             for (bool is_loaded = false; !is_loaded;) {
               {
                 const py::gil_scoped_release release;
                 is_loaded = model.is_loaded(std::chrono::milliseconds(200));
               }
               if (PyErr_CheckSignals() != 0) throw py::error_already_set();
             }
             // Not Release(), under which pybind11 would register the instance without the GIL.
             const py::gil_scoped_release release;
             return EngineHolder(model.make_engine(vocabulary, draft_vocabulary).release());
           }),
           "model"_a, "vocabulary"_a = py::none(), "draft_vocabulary"_a = py::none(),
           "Waits for the model and starts the engine's thread.")
      .def(
          "check",
          [](const EngineGroup& engine, const std::vector<const Request*>& requests) {
            engine.check(requests);
          },
          "requests"_a)
      .def("add_requests", &EngineGroup::add_requests, "requests"_a, Release())
      .def("wait_for_room", &EngineGroup::wait_for_room, "timeout_s"_a, Release())
      .def("abort", &EngineGroup::abort, "request_id"_a, Release())
      .def("wait_events", &EngineGroup::wait_events, "timeout_s"_a, Release())
      .def_property_readonly("event_fd", &EngineGroup::event_fd)
      .def("lend", &EngineGroup::lend, "connection"_a, Release())
      .def("take_back", &EngineGroup::take_back, "connection"_a, Release())
      .def("reset_prefix_cache", &EngineGroup::reset_prefix_cache, Release())
      .def("allow_seats", &EngineGroup::allow_seats, "num_seats"_a, Release())
      .def(
          "block_events",
          [](EngineGroup& engine, int64_t sequence,
             std::optional<int64_t> replica) -> std::optional<py::list> {
            const auto batches = replica ? engine.replica(*replica).block_events(sequence)
                                         : engine.block_events(sequence);
            if (!batches) return std::nullopt;
            py::list list;
            for (const BlockEventBatch& batch : *batches)
              list.append(py::make_tuple(batch.sequence, block_event_runs(batch.events)));
            return list;
          },
          "sequence"_a, "replica"_a = py::none())
      .def(
          "block_snapshot",
          [](EngineGroup& engine, std::optional<int64_t> replica) {
            BlockSnapshot snapshot;
            {
              const py::gil_scoped_release release;
              snapshot =
                  replica ? engine.replica(*replica).block_snapshot() : engine.block_snapshot();
            }
            return py::make_tuple(snapshot.sequence, bytes_of_hashes(snapshot.hashes));
          },
          "replica"_a = py::none())
      .def(
          "open_hand_over",
          [](EngineGroup& engine, std::string key, std::string numerics_class,
             std::vector<std::string> addresses, double lease_s, double timeout_s,
             double max_share) {
            KvPeer self;
            {
              const py::gil_scoped_release release;
              self = engine.open_hand_over({.key = std::move(key),
                                            .numerics_class = std::move(numerics_class),
                                            .addresses = std::move(addresses),
                                            .lease_s = lease_s,
                                            .timeout_s = timeout_s,
                                            .max_share = max_share});
            }
            return py::make_tuple(self.addresses, self.epoch);
          },
          "key"_a, "numerics_class"_a, "addresses"_a, "lease_s"_a, "timeout_s"_a, "max_share"_a,
          "Returns the addresses at which others fetch, and the epoch of this start.")
      .def(
          "add_peer",
          [](EngineGroup& engine, std::vector<std::string> addresses, uint64_t epoch) {
            return engine.add_peer({.addresses = std::move(addresses), .epoch = epoch});
          },
          "addresses"_a, "epoch"_a, Release())
      .def("has_begun_hand_over", &EngineGroup::has_begun_hand_over, "id"_a, Release())
      .def("take_hand_over_failure", &EngineGroup::take_hand_over_failure)
      .def("metrics", &EngineGroup::metrics, Release())
      .def("histograms", &EngineGroup::histograms, Release())
      .def("trace", &EngineGroup::trace, Release())
      .def("exchanges", &EngineGroup::exchanges, Release())
      .def("request_records", &EngineGroup::request_records, Release())
      .def("request_record", &EngineGroup::request_record, "request_id"_a, Release())
      .def_property_readonly("failure", &EngineGroup::failure)
      .def_property_readonly(
          "stood_still_s", &EngineGroup::stood_still_s,
          "Of each replica, for how long its thread has stood still in a step; 0: it goes on.")
      .def("take_notice", &EngineGroup::take_notice)
      .def("sleep", &EngineGroup::sleep, "level"_a, Release())
      .def(
          "wake_up",
          [](EngineGroup& engine, const std::vector<std::string>& tags) {
            std::vector<MemoryPart> parts;
            for (const std::string& tag : tags) parts.push_back(parse_memory_part(tag));
            const py::gil_scoped_release release;
            engine.wake_up(parts);
          },
          "tags"_a)
      .def_property_readonly("is_sleeping", &EngineGroup::is_sleeping)
      .def_property_readonly("description", &EngineGroup::description)
      .def_property_readonly("warning", &EngineGroup::warning)
      .def_property_readonly("memory_use", &EngineGroup::memory_use)
      .def("count_expert_loads",
           [](EngineGroup& engine) {
             if (!engine.start_expert_loads())
               throw NotSupported(concat("count_expert_loads: ", engine.description(),
                                         " has no experts; leave it out"));
           })
      .def_property_readonly("expert_loads", &EngineGroup::expert_rows)
      .def(
          "balance_experts",
          [](EngineGroup& engine, int64_t window_size, int64_t step_interval,
             int64_t num_redundant_experts, double capacity_factor) {
            engine.balance_experts({.window_size = window_size,
                                    .step_interval = step_interval,
                                    .num_redundant_experts = num_redundant_experts,
                                    .capacity_factor = capacity_factor});
          },
          "window_size"_a, "step_interval"_a, "num_redundant_experts"_a, "capacity_factor"_a,
          Release())
      .def_property_readonly("expert_rank_rows", &EngineGroup::expert_rank_rows)
      .def_property_readonly("num_replicas", &EngineGroup::num_replicas)
      .def(
          "replica_metrics",
          [](const EngineGroup& engine, int64_t idx) { return engine.replica(idx).metrics(); },
          "replica"_a, Release())
      .def(
          "replica_failure",
          [](const EngineGroup& engine, int64_t idx) { return engine.replica(idx).failure(); },
          "replica"_a, Release())
      .def("replica_taken_over", &EngineGroup::num_taken_over, "replica"_a, Release())
      .def("loads", &EngineGroup::loads, Release())
      .def_property_readonly("vocab_size", &EngineGroup::vocab_size)
      .def_property_readonly("config", &EngineGroup::config)
      .def_property_readonly("is_of_this_process", &EngineGroup::is_of_this_process)
      .def("close", &EngineGroup::close, Release());
}

}  // namespace llmserve
