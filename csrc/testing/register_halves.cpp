// A step in halves of which one hangs while it computes.
#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "comm/single_communicator.h"
#include "core/error.h"
#include "engine/executor.h"
#include "engine/half_batches.h"
#include "layers/attention_order.h"
#include "testing/register.h"

namespace llmserve {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;

constexpr int64_t kTokens = 4;
constexpr RankPatience kShort{.still = std::chrono::milliseconds(300),
                              .left = std::chrono::milliseconds(300)};

ModelConfig small_config() {
  ModelConfig config;
  config.hidden_size = 8;
  return config;
}

// One half exchanges until the other hangs, which does so when it has the turn.
class HangingModel final : public Model {
 public:
  explicit HangingModel(bool in_second_half)
      : Model(small_config()), in_second_half_(in_second_half) {}

  Tensor forward(const ForwardContext& context) const override {
    AttentionOrder& order = *AttentionOrder::of(context);
    order.begin_attention();
    order.end_attention();
    const bool is_second = context.input.positions[0] > 0;
    while (is_second != in_second_half_ && !hangs_) context.groups.tp.barrier();
    context.groups.tp.barrier();
    while (is_second == in_second_half_ && !is_released_) {
      hangs_ = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return context.arena.allocate(DType::kF32, {context.input.num_tokens(), config().hidden_size});
  }
  void embed(const ForwardContext&, const Tensor&) const override {}
  Tensor compute_logits(const ForwardContext&, const ConstTensor&,
                        std::span<const int32_t>) const override {
    return {};
  }
  int64_t workspace_bytes(int64_t, int64_t) const override { return 1 << 16; }

  void release() { is_released_ = true; }

 private:
  const bool in_second_half_;
  mutable std::atomic<bool> hangs_{false};
  std::atomic<bool> is_released_{false};
};

// Why the rank was left; empty: it was not.
std::string hang_in_half(bool in_second_half) {
  const std::unique_ptr<Backend> backend = make_backend("ref", {});
  HangingModel model(in_second_half);
  HalfBatches halves(model.workspace_bytes(kTokens, 1), 0, backend->memory(), kShort);
  Arena arena(model.workspace_bytes(kTokens, 1), backend->memory());
  const std::array<int32_t, kTokens> numbers{0, 1, 2, 3};
  const std::array<int32_t, 2> query_starts{0, kTokens};
  const std::array<int32_t, 1> kv_lens{kTokens};
  ModelInput input;
  input.token_ids = numbers;
  input.positions = numbers;
  input.query_starts = query_starts;
  input.kv_lens = kv_lens;
  SingleCommunicator alone;
  const ParallelGroups groups{.tp = alone, .pp = alone, .ep = alone, .cp = alone};
  SingleCommunicator first;
  SingleCommunicator second;
  RankThreads ranks(2, {.patience = kShort, .has_far_ranks = true});
  const RankThreads::Awaited awaited(ranks);
  const auto work = [&](int rank) {
    if (rank == 0) return;
    const Arena::Scope scope(arena);
    halves.forward(model,
                   {.backend = *backend,
                    .arena = arena,
                    .input = input,
                    .kv_caches = {},
                    .groups = groups,
                    .layer_states = {}},
                   kTokens / 2, first, second, nullptr);
  };
  std::string reason;
  try {
    ranks.run(work);
  } catch (const RankLeft& error) {
    reason = error.what();
  }
  model.release();  // so that all threads come back
  return reason;
}

}  // namespace

void register_testing_halves(py::module_& testing) {
  testing.def("hang_in_half", &hang_in_half, "in_second_half"_a,
              py::call_guard<py::gil_scoped_release>());
}

}  // namespace llmserve
