// The fused ops of every backend on NumPy arrays: testing.Backend's.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/op_call.h"
#include "core/error.h"
#include "kernels/backend.h"
#include "testing/staging.h"

namespace py = pybind11;

namespace llmserve {
namespace {

py::object fused_linear(Backend& backend, const py::object& x, const LinearWeight& weight,
                        const py::object& bias, const py::object& norm_weight, float eps,
                        float weight_offset, const py::object& activation, const py::object& given,
                        bool accumulate, const py::object& given_normed,
                        const py::object& given_gate_up, const LinearWeight* down) {
  Staging staging(backend);
  const ConstTensor rows = staging.in(x);
  const int64_t m = rows.shape[0];
  const int64_t n = weight.out_features;
  FusedLinearArgs args{
      .linear = {.x = rows, .weight = &weight, .bias = staging.in(bias), .accumulate = accumulate}};
  if (!norm_weight.is_none()) {
    const Tensor normed = staging.make_work(given_normed, m, rows.shape[1]);
    args.norm = RmsNormArgs{.x = rows,
                            .weight = staging.in(norm_weight),
                            .out = normed,
                            .numbers = {.eps = eps, .weight_offset = weight_offset}};
    args.linear.x = normed;
  }
  if (activation.is_none()) {
    args.linear.out = staging.make_out(given, {m, n});
  } else {
    args.linear.out = staging.make_work(given_gate_up, m, n);
    args.gate =
        GatedActivationArgs{.gate_up = args.linear.out,
                            .out = down == nullptr ? staging.make_out(given, {m, n / 2})
                                                   : staging.make_work(py::none(), m, n / 2),
                            .activation = parse_activation(activation.cast<std::string>())};
  }
  if (down != nullptr) {
    FusedMlpArgs both{.up = args, .down = {.weight = down, .accumulate = accumulate}};
    both.up.linear.accumulate = false;
    if (args.gate) both.down.x = args.gate->out;
    both.down.out = staging.make_out(given, {m, down->out_features});
    py::gil_scoped_release release;
    backend.fused_mlp(both);
    staging.finish();
    return staging.result();
  }
  py::gil_scoped_release release;
  backend.fused_linear(args);
  staging.finish();
  return staging.result();
}

using Weights = std::vector<const LinearWeight*>;

py::object fused_experts(Backend& backend, const py::object& x, const Weights& up,
                         const Weights& down, const py::object& ids, const py::object& weights,
                         const py::object& up_bias, const py::object& down_bias,
                         const std::string& activation, const py::object& given) {
  if (up.empty() || down.empty()) throw InvalidArgument("fused_experts: expected weights");
  Staging staging(backend);
  const ConstTensor rows = staging.in(x);
  const ConstTensor of_rows = staging.in(ids);
  const Tensor gate_up = staging.make_work(py::none(), of_rows.shape[0], up[0]->out_features);
  const Tensor gated = staging.make_work(py::none(), of_rows.shape[0], up[0]->out_features / 2);
  const Tensor each = staging.make_work(py::none(), of_rows.shape[0], down[0]->out_features);
  const FusedExpertsArgs args{
      .up = {.x = rows,
             .weights = up,
             .weight_ids = of_rows,
             .bias = staging.in(up_bias),
             .out = gate_up},
      .gate = {.gate_up = gate_up, .out = gated, .activation = parse_activation(activation)},
      .down = {.x = gated,
               .weights = down,
               .weight_ids = of_rows,
               .bias = staging.in(down_bias),
               .out = each},
      .combine = {.x = each,
                  .weights = staging.in(weights),
                  .out = staging.make_out(given, {rows.shape[0], down[0]->out_features}),
                  .accumulate = !given.is_none()}};
  py::gil_scoped_release release;
  backend.fused_experts(args);
  staging.finish();
  return staging.result();
}

using Slots = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

struct QkvOptions {
  NormNumbers numbers;
  bool interleaved;
  std::string key_layout;
};

// Rows of heads of queries, keys and values side by side, and where the latter go.
PrepareQkvArgs stage_qkv(Staging& staging, const py::object& qkv, int64_t num_heads,
                         const py::object& key_cache, const py::object& value_cache,
                         const Slots& slots, const py::object& norms, const py::object& angles,
                         const QkvOptions& options) {
  const Tensor rows = staging.out(qkv);
  const PagedKvCache cache{staging.cache(key_cache), staging.cache(value_cache),
                           parse_key_layout(options.key_layout)};
  const int64_t kv_heads = cache.keys.shape[1];
  const int64_t dim = cache.keys.shape[3];
  const int64_t value_dim = cache.values.shape[3];
  const auto heads = [&](int64_t begin, int64_t count, int64_t width) {
    Tensor view = rows.slice(1, begin, count * width);
    view.rank = 3;
    view.shape = {rows.shape[0], count, width};
    view.strides = {rows.strides[0], width, 1};
    return view;
  };
  const auto pair_of = [&](const py::object& pair) {
    if (pair.is_none()) return std::pair<ConstTensor, ConstTensor>{};
    const ConstTensor first = staging.in(pair[py::int_(0)]);
    const bool is_one = pair[py::int_(0)].is(pair[py::int_(1)]);
    return std::pair(first, is_one ? first : staging.in(pair[py::int_(1)]));
  };
  const auto [q_norm, k_norm] = pair_of(norms);
  const auto [q_cos_sin, k_cos_sin] = pair_of(angles);
  return {.q = heads(0, num_heads, dim),
          .k = heads(num_heads * dim, kv_heads, dim),
          .v = heads((num_heads + kv_heads) * dim, kv_heads, value_dim),
          .q_norm = q_norm,
          .k_norm = k_norm,
          .numbers = options.numbers,
          .q_cos_sin = q_cos_sin,
          .k_cos_sin = k_cos_sin,
          .interleaved = options.interleaved,
          .slots = {slots.data(), static_cast<size_t>(slots.size())},
          .cache = cache};
}

using Indices = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

// Where the sequences are, and how they are attended to.
struct Attended {
  Indices query_starts;
  Indices kv_lens;
  Indices block_tables;
  float scale;
  int32_t window;
  float soft_cap;
  py::object sinks;
};

py::object prepared_attention(Backend& backend, const PrepareQkvArgs& prepare, Staging& staging,
                              const Attended& attended, const LinearWeight& output,
                              const py::object& given, const py::object& given_out) {
  const auto span_of = [](const Indices& array) {
    return std::span(array.data(), static_cast<size_t>(array.size()));
  };
  const int64_t num_tokens = prepare.q.shape[0];
  const int64_t width = prepare.q.shape[1] * prepare.v.shape[2];
  const Tensor rows = staging.make_work(given, num_tokens, width);
  Tensor heads = rows;
  heads.rank = 3;
  heads.shape = {num_tokens, prepare.q.shape[1], prepare.v.shape[2]};
  heads.strides = {width, prepare.v.shape[2], 1};
  const FusedAttentionArgs args{
      .prepare = prepare,
      .attention = {.q = prepare.q,
                    .cache = prepare.cache,
                    .query_starts = span_of(attended.query_starts),
                    .kv_lens = span_of(attended.kv_lens),
                    .block_tables = span_of(attended.block_tables),
                    .max_blocks = attended.block_tables.shape(1),
                    .scale = attended.scale,
                    .window = attended.window,
                    .soft_cap = attended.soft_cap,
                    .sinks = staging.in(attended.sinks),
                    .out = heads},
      .output = {.x = rows,
                 .weight = &output,
                 .out = staging.make_out(given_out, {num_tokens, output.out_features})}};
  py::gil_scoped_release release;
  backend.fused_attention(args);
  staging.finish();
  return staging.result();
}

}  // namespace

void register_testing_fused(py::class_<Backend>& backend) {
  using namespace py::literals;
  backend.def("fused_linear", &fused_linear, "x"_a, "weight"_a, "bias"_a = py::none(),
              "norm_weight"_a = py::none(), "eps"_a = 1e-6f, "weight_offset"_a = 0.0f,
              "activation"_a = py::none(), "out"_a = py::none(), "accumulate"_a = false,
              "normed"_a = py::none(), "gate_up"_a = py::none(), "down"_a = py::none(),
              "With `down`, the weight of the layer that reads the gate's output: fused_mlp.");
  backend.def("fused_experts", &fused_experts, "x"_a, "up"_a, "down"_a, "ids"_a, "weights"_a,
              "up_bias"_a = py::none(), "down_bias"_a = py::none(), "activation"_a = "silu",
              "out"_a = py::none(), "Adds to what `out` holds, where it is given.");
  backend.def(
      "prepare_qkv",
      [](Backend& self, const py::object& qkv, int64_t num_heads, const py::object& key_cache,
         const py::object& value_cache, const Slots& slots, const py::object& norms,
         const py::object& angles, float eps, float weight_offset, bool interleaved,
         const std::string& key_layout) {
        Staging staging(self);
        const PrepareQkvArgs args =
            stage_qkv(staging, qkv, num_heads, key_cache, value_cache, slots, norms, angles,
                      {{.eps = eps, .weight_offset = weight_offset}, interleaved, key_layout});
        py::gil_scoped_release release;
        self.prepare_qkv(args);
        staging.finish();
      },
      "qkv"_a, "num_heads"_a, "key_cache"_a, "value_cache"_a, "slots"_a, "norms"_a = py::none(),
      "angles"_a = py::none(), "eps"_a = 1e-6f, "weight_offset"_a = 0.0f, "interleaved"_a = false,
      "key_layout"_a = "rows",
      "Rows of heads of queries, keys and values side by side; norms and angles are pairs.");
  backend.def(
      "prepared_attention",
      [](Backend& self, const py::object& qkv, int64_t num_heads, const py::object& key_cache,
         const py::object& value_cache, const Slots& slots, const Indices& query_starts,
         const Indices& kv_lens, const Indices& block_tables, float scale,
         const LinearWeight& output, const py::object& norms, const py::object& angles, float eps,
         bool interleaved, const std::string& key_layout, int32_t window, float soft_cap,
         const py::object& sinks, const py::object& attended, const py::object& out) {
        if (block_tables.ndim() != 2) throw InvalidArgument("block_tables: expected [B, M]");
        Staging staging(self);
        const PrepareQkvArgs prepare =
            stage_qkv(staging, qkv, num_heads, key_cache, value_cache, slots, norms, angles,
                      {{.eps = eps}, interleaved, key_layout});
        return prepared_attention(
            self, prepare, staging,
            {query_starts, kv_lens, block_tables, scale, window, soft_cap, sinks}, output, attended,
            out);
      },
      "qkv"_a, "num_heads"_a, "key_cache"_a, "value_cache"_a, "slots"_a, "query_starts"_a,
      "kv_lens"_a, "block_tables"_a, "scale"_a, "output"_a, "norms"_a = py::none(),
      "angles"_a = py::none(), "eps"_a = 1e-6f, "interleaved"_a = false, "key_layout"_a = "rows",
      "window"_a = 0, "soft_cap"_a = 0.0f, "sinks"_a = py::none(), "attended"_a = py::none(),
      "out"_a = py::none(), "fused_attention of what prepare_qkv makes.");
}

}  // namespace llmserve
