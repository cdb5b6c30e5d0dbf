// What tests and benchmarks do with an `llmserve.Scheduler` and users do not, and executors without
// a model: `llmserve._core_testing`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/stepped_scheduler.h"
#include "testing/fair_policy.h"
#include "testing/register.h"
#include "testing/token_oracle.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

using Tokens = std::vector<int32_t>;

// (microseconds of schedule(), of commit(), sequences in the step) of each step.
std::vector<std::tuple<double, double, int64_t>> time_steps(SteppedScheduler& stepped,
                                                            int32_t num_steps, int32_t vocab_size) {
  using Time = std::chrono::steady_clock;
  using Microseconds = std::chrono::duration<double, std::micro>;
  Scheduler& scheduler = stepped.scheduler();
  std::vector<std::tuple<double, double, int64_t>> times;
  for (int32_t i = 0; i < num_steps && scheduler.has_unfinished(); ++i) {
    const auto start = Time::now();
    const StepPlan& plan = scheduler.schedule();
    const auto scheduled = Time::now();
    const SampledTokens sampled = sample_oracle(plan, vocab_size);
    const auto num_sequences = static_cast<int64_t>(plan.sequences.size());
    const auto before_commit = Time::now();
    scheduler.commit(sampled);
    const auto committed = Time::now();
    times.emplace_back(Microseconds(scheduled - start).count(),
                       Microseconds(committed - before_commit).count(), num_sequences);
  }
  return times;
}

using Adapter =
    std::tuple<std::string, int32_t, std::string>;  // name, index, what its digest is of
using Peer = std::pair<int32_t, int64_t>;           // peer, id of the hand-over

std::optional<AdapterRef> to_adapter(const std::optional<Adapter>& given) {
  if (!given) return std::nullopt;
  const auto& [name, index, contents] = *given;
  Sha256 sha;
  sha.update({reinterpret_cast<const uint8_t*>(contents.data()), contents.size()});
  return AdapterRef{.name = name, .index = index, .digest = sha.finish()};
}

std::optional<HandOver> to_hand_over(const std::optional<Peer>& given) {
  if (!given) return std::nullopt;
  return HandOver{.peer = given->first, .id = given->second};
}

// What `llmserve.Scheduler` does not take: beam searches, pooling requests, prompts of embeddings,
// adapters, requests that go on, and those that something beside the steps has a part in.
void add_request(SteppedScheduler& stepped, RequestId id, Tokens prompt_token_ids,
                 const SamplingParams& params, std::optional<BeamSearchParams> beam_search,
                 bool is_pooled, bool has_embeds, int32_t priority, std::string cache_salt,
                 Tokens resumed_token_ids, bool has_drafter, bool awaits_grammar,
                 std::string tenant, bool is_streamed, const std::optional<Adapter>& adapter,
                 const std::optional<Peer>& receive_from, const std::optional<Peer>& send_to) {
  Request request{.id = id,
                  .prompt_token_ids = std::move(prompt_token_ids),
                  .params = params,
                  .beam_search = beam_search,
                  .seed = params.seed.value_or(0),
                  .priority = priority,
                  .cache_salt = std::move(cache_salt),
                  .tenant = std::move(tenant),
                  .adapter = to_adapter(adapter),
                  .receive_from = to_hand_over(receive_from),
                  .send_to = to_hand_over(send_to),
                  .resumed_token_ids = std::move(resumed_token_ids),
                  .has_drafter = has_drafter,
                  .awaits_grammar = awaits_grammar,
                  .arrival_us = stepped.now_us(),
                  .is_streamed = is_streamed};
  if (is_pooled) {
    request.pooling = PoolingParams();
    request.pooled = std::make_shared<PooledOutput>();
  }
  if (has_embeds) {
    std::ranges::fill(request.prompt_token_ids, kNoTokenId);
    request.prompt_embeds =
        std::make_shared<HostArray>(std::ssize(request.prompt_token_ids), int64_t{1});
  }
  stepped.scheduler().admission().admit(request);
  stepped.scheduler().add(std::move(request));
}

std::vector<std::pair<int32_t, float>> top_logprobs(const Tokens& context, int32_t vocab_size,
                                                    int32_t count) {
  std::vector<std::pair<int32_t, float>> result;
  for (const TokenLogprob& top : ShadowModel::top_logprobs(context, vocab_size, count))
    result.emplace_back(top.token_id, top.logprob);
  return result;
}

void register_executors(py::module_& testing) {
  testing.def("oracle_token", &oracle_token, py::arg("seed"), py::arg("position"),
              py::arg("vocab_size"));
  testing.def(
      "sample_oracle",
      [](const StepPlanRecord& record, int32_t vocab_size) {
        return sample_oracle(record.plan, vocab_size);
      },
      py::arg("plan"), py::arg("vocab_size"));
  py::class_<ShadowModel>(testing, "ShadowModel")
      .def(py::init<int32_t, int32_t, int32_t, Tokens>(), py::arg("num_blocks"),
           py::arg("block_size"), py::arg("vocab_size"), py::arg("windows") = Tokens{0})
      .def("forget", &ShadowModel::forget)
      .def("carry_out",
           [](ShadowModel& self, const Transfer& transfer) {
             self.carry_out(transfer, transfer.moves.size());
           })
      .def("execute", [](ShadowModel& self,
                         const StepPlanRecord& record) { return self.execute(record.plan); })
      .def_static(
          "logprob",
          [](const Tokens& context, int32_t token_id) {
            return ShadowModel::logprob(context, token_id);
          },
          "context"_a, "token_id"_a)
      .def_static("top_logprobs", &top_logprobs, "context"_a, "vocab_size"_a, "count"_a)
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

// News by their names, as they enter the scheduler.
void register_news(py::module_& testing) {
  testing.def(
      "draft_ready",
      [](SteppedScheduler& stepped, RequestId id, int32_t sample_index, int64_t position,
         Tokens token_ids, std::vector<Tokens> branches) {
        stepped.scheduler().take(DraftReady{.request_id = id,
                                            .sample_index = sample_index,
                                            .position = position,
                                            .token_ids = std::move(token_ids),
                                            .branches = std::move(branches)});
      },
      "scheduler"_a, "request_id"_a, "sample_index"_a, "position"_a, "token_ids"_a,
      "branches"_a = std::vector<Tokens>());
  testing.def("transfers", [](const StepPlanRecord& record) { return record.plan.transfers; });
  testing.def(
      "transfer_done",
      [](SteppedScheduler& stepped, TransferId id) { stepped.scheduler().take(TransferDone{id}); },
      "scheduler"_a, "id"_a);
  testing.def(
      "cancel_sends", [](SteppedScheduler& stepped) { stepped.scheduler().cancel_sends(); },
      "scheduler"_a);
  testing.def(
      "transfer_failed",
      [](SteppedScheduler& stepped, TransferId id) {
        stepped.scheduler().take(TransferFailed{id});
      },
      "scheduler"_a, "id"_a);
  testing.def(
      "grammar_failed",
      [](SteppedScheduler& stepped, RequestId id, std::string error) {
        stepped.scheduler().take(
            GrammarReady{.request_id = id, .grammar = nullptr, .error = std::move(error)});
      },
      "scheduler"_a, "request_id"_a, "error"_a);
  testing.def(
      "grammar_ready",
      [](SteppedScheduler& stepped, RequestId id, const SamplingParams& params) {
        stepped.scheduler().take(
            GrammarReady{.request_id = id, .grammar = params.grammar, .error = {}});
      },
      "scheduler"_a, "request_id"_a, "params"_a);
  testing.def(
      "rank_lost", [](SteppedScheduler& stepped, int32_t rank) { stepped.lose_rank(rank); },
      "scheduler"_a, "rank"_a, "Steps in flight are not committed any more.");
  testing.def("num_transitions", [](const SteppedScheduler& stepped) {
    std::map<std::string, int64_t> counts;
    for (const SequenceTransition& t : sequence_transitions()) {
      counts[concat(name(t.from), " ", name(t.event))] =
          stepped.scheduler().book().num_transitions(t.from, t.event);
    }
    return counts;
  });
  testing.def(
      "fair_scheduler",
      [](const SchedulerConfig& config, const CacheConfig& cache, int32_t max_in_flight) {
        return std::make_unique<SteppedScheduler>(
            config, cache, std::nullopt,
            SchedulerOptions{.max_in_flight = max_in_flight,
                             .policy = std::make_unique<FairPolicy>()});
      },
      "config"_a, "cache"_a, "max_in_flight"_a = 1, "Its policy is FairPolicy.");
  testing.def("sequence_states", [] {
    std::vector<std::string> names;
    for (const SequenceStateRow& row : sequence_states()) names.emplace_back(row.name);
    return names;
  });
  testing.def("sequence_transitions", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> rows;
    for (const SequenceTransition& t : sequence_transitions())
      rows.emplace_back(name(t.from), name(t.event), name(t.to));
    return rows;
  });
}

}  // namespace

void register_testing_scheduler(py::module_& testing) {
  register_executors(testing);
  testing.def("add_request", &add_request, "scheduler"_a, "request_id"_a, "prompt_token_ids"_a,
              "params"_a, "beam_search"_a = py::none(), "is_pooled"_a = false,
              "has_embeds"_a = false, "priority"_a = 0, "cache_salt"_a = "",
              "resumed_token_ids"_a = Tokens(), "has_drafter"_a = false, "awaits_grammar"_a = false,
              "tenant"_a = "", "is_streamed"_a = true, "adapter"_a = py::none(),
              "receive_from"_a = py::none(), "send_to"_a = py::none());
  testing.def(
      "with_peers",
      [](Request request, const std::optional<Adapter>& adapter,
         const std::optional<Peer>& receive_from, const std::optional<Peer>& send_to) {
        request.adapter = to_adapter(adapter);
        request.receive_from = to_hand_over(receive_from);
        request.send_to = to_hand_over(send_to);
        return request;
      },
      "request"_a, py::kw_only(), "adapter"_a = py::none(), "receive_from"_a = py::none(),
      "send_to"_a = py::none(), "An EngineRequest with what Python gives none.");
  register_news(testing);
  testing.def("time_steps", &time_steps, "scheduler"_a, "num_steps"_a, "vocab_size"_a);
  testing.def(
      "forged_scheduler",
      [](const SchedulerConfig& config, const CacheConfig& cache) {
        return std::make_unique<SteppedScheduler>(config, cache, std::nullopt,
                                                  SchedulerOptions{.hasher = &forged_hash});
      },
      "config"_a, "cache"_a, "All block hashes collide.");
  testing.def(
      "commit_unchecked",
      [](SteppedScheduler& stepped, const SampledTokens& sampled) {
        stepped.scheduler().commit(sampled);
      },
      "scheduler"_a, "sampled"_a, "The engine's commit, without the checks of the caller.");
}

}  // namespace llmserve
