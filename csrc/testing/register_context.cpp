// Attention of ranks that keep one KV cache together, each on a thread and a backend of its own,
// for tests.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/op_call.h"
#include "comm/registry.h"
#include "comm/single_communicator.h"
#include "engine/rank_threads.h"
#include "kernels/cpu/cpu_backend.h"
#include "layers/context_cut.h"
#include "testing/staging.h"

namespace py = pybind11;

namespace llmserve {

void register_testing_context(py::class_<Backend>& backend);

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

// out [T, H, Dv], each head as its rank gives it, and the spans that each rank has walked for all.
py::tuple attention_among_ranks(const py::object& self, std::vector<Backend*> others,
                                int32_t context_size, const py::object& q, const py::object& keys,
                                const py::object& values, const Array<int32_t>& query_starts,
                                const Array<int32_t>& kv_lens, const Array<int32_t>& block_tables,
                                float scale, int32_t window, float soft_cap,
                                const std::string& key_layout, const py::object& sinks) {
  std::vector<Backend*> backends{&self.cast<Backend&>()};
  backends.insert(backends.end(), others.begin(), others.end());
  const auto num_ranks = static_cast<int32_t>(backends.size());
  Staging staging(*backends[0]);
  const ConstTensor queries = staging.in(q);
  const ConstTensor all_sinks = staging.in(sinks);
  PagedKvCache cache{staging.cache(keys), {}, parse_key_layout(key_layout)};
  cache.values = py::isinstance<py::int_>(values) ? cache.keys.slice(3, 0, values.cast<int64_t>())
                                                  : staging.cache(values);
  const int64_t num_tokens = queries.shape[0];
  const int64_t num_heads = queries.shape[1];
  const int64_t value_dim = cache.values.shape[3];
  const Tensor out = staging.make_out(py::none(), {num_tokens, num_heads, value_dim});
  std::vector<int64_t> num_walked(backends.size());
  {
    const py::gil_scoped_release release;
    std::vector<std::unique_ptr<Communicator>> ends(backends.size());
    const auto group = find_communicator("shm").make({.world_size = num_ranks});
    RankThreads ranks(num_ranks, [&] {
      for (const auto& end : ends)
        if (end) end->abort();
    });
    ranks.run([&](int rank) {
      const auto at = static_cast<size_t>(rank);
      Backend& backend = *backends[at];
      ends[at] = group->join(rank, {.memory = &backend.memory()});
    });
    ranks.run([&](int rank) {
      const auto at = static_cast<size_t>(rank);
      const TensorRank place{.rank = rank, .size = num_ranks, .context_size = context_size};
      const HeadCut cut(place, num_heads, 1);
      const ContextCut context_cut(place, num_heads, 1);
      Arena arena(context_cut.workspace_bytes() +
                      Arena::footprint_bytes(DType::kF32, {num_tokens, cut.num_heads, value_dim}),
                  host_memory());
      SingleCommunicator alone;
      const ModelInput input;
      const ParallelGroups groups{.tp = *ends[at], .pp = alone, .ep = alone, .cp = alone};
      const ForwardContext context{.backend = *backends[at],
                                   .arena = arena,
                                   .input = input,
                                   .kv_caches = {},
                                   .groups = groups};
      const Tensor own = arena.allocate(DType::kF32, {num_tokens, cut.num_heads, value_dim});
      context_cut.attend(
          context,
          {.q = queries.slice(1, cut.first_head, cut.num_heads),
           .cache = cache,
           .query_starts = span_of(query_starts),
           .kv_lens = span_of(kv_lens),
           .block_tables = span_of(block_tables),
           .max_blocks = block_tables.ndim() == 2 ? block_tables.shape(1) : 0,
           .scale = scale,
           .window = window,
           .soft_cap = soft_cap,
           .sinks = all_sinks ? all_sinks.slice(0, cut.first_head, cut.num_heads) : all_sinks,
           .out = own});
      ends[at]->barrier();  // others read this rank's arena until here
      const int64_t num_given = cut.given[at];
      for (int64_t t = 0; t < num_tokens; ++t)
        std::copy_n(own.as<float>() + t * own.strides[0], num_given * value_dim,
                    out.as<float>() + t * out.strides[0] + cut.first_head * value_dim);
      const auto* cpu = dynamic_cast<const CpuBackend*>(backends[at]);
      if (cpu != nullptr) num_walked[at] = cpu->num_shared_spans();
    });
  }
  staging.finish();
  return py::make_tuple(staging.result(), num_walked);
}

}  // namespace

void register_testing_context(py::class_<Backend>& backend) {
  using namespace py::literals;
  backend.def("attention_among_ranks", &attention_among_ranks, "others"_a, "context_size"_a, "q"_a,
              "key_cache"_a, "value_cache"_a, "query_starts"_a, "kv_lens"_a, "block_tables"_a,
              "scale"_a, "window"_a = 0, "soft_cap"_a = 0.0f, "key_layout"_a = "rows",
              "sinks"_a = py::none(),
              "paged_attention of this and other backends, a rank each, over one cache.");
}

}  // namespace llmserve
