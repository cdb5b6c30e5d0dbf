// What ranks have of a layer, and the layers that end a branch, for the tests.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "api/engine_config.h"
#include "bindings/from_kwargs.h"
#include "comm/single_communicator.h"
#include "core/error.h"
#include "layers/output_linear.h"
#include "models/model_loader.h"
#include "testing/register.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

LinearCut cut_of(const std::string& name) {
  const auto found = std::ranges::find(kTensorParallelCuts, name);
  if (found == kTensorParallelCuts.end()) throw InvalidArgument(concat("cut: got ", name));
  return static_cast<LinearCut>(found - kTensorParallelCuts.begin());
}

using Range = std::pair<int64_t, int64_t>;
Range pair_of(const IndexRange& range) { return {range.begin, range.size}; }

py::dict head_cut(int32_t rank, int32_t num_ranks, int64_t num_heads, int64_t num_kv_heads,
                  const std::string& cut) {
  const TensorRank place{.rank = rank, .size = num_ranks, .cut = cut_of(cut)};
  const HeadCut heads(place, num_heads, num_kv_heads);
  const ProductShare share = share_products(place, head_input(place, heads, 1), 1);
  std::vector<Range> segments;
  for (const IndexRange& segment : share.segments) segments.push_back(pair_of(segment));
  py::dict out;
  out["heads"] = Range(heads.first_head, heads.num_heads);
  out["kv_heads"] = Range(heads.first_kv_head, heads.num_kv_heads);
  out["given"] = heads.given;
  out["num_segments"] = share.num_segments;
  out["segments"] = segments;
  out["shares_products"] = share.shares_products;
  return out;
}

// A layer whose input are activations, of a rank that gives its own of `x` alone.
struct OutputLayer {
  std::string path;
  std::string name;
  int64_t out_features = 0;
  int64_t in_features = 0;
  bool has_bias = false;
  bool is_transposed = false;
  std::string quantization;
  std::string cut = "columns";
};

// out [M, N] (+ old) on the communicator's rank.
void run_output_layer(const OutputLayer& layer, Communicator& ranks, Backend& backend,
                      const py::array_t<float>& x, py::array_t<float>& out, bool accumulate) {
  const auto* from = x.data();
  const int64_t num_rows = x.shape(0);
  Tensor result(out.mutable_data(), DType::kF32, {num_rows, layer.out_features});
  const py::gil_scoped_release release;
  const Checkpoint checkpoint = open_checkpoint(layer.path);
  const WeightFormat format =
      resolve_weight_format(resolve_dtype("auto", checkpoint), layer.quantization);
  const TensorRank rank{.rank = ranks.rank(), .size = ranks.world_size(), .cut = cut_of(layer.cut)};
  const OutputLinearSpec spec{.name = layer.name,
                              .out_features = layer.out_features,
                              .has_bias = layer.has_bias,
                              .is_transposed = layer.is_transposed};
  const auto make = [&](WeightLoader& weights) {
    const InputCut input =
        activation_input(rank, layer.in_features,
                         OutputLinear::input_unit(weights, spec, layer.in_features), "activations");
    return std::pair(input.made, OutputLinear(weights, WeightGroup::kMlp, spec, input));
  };
  WeightLoader plan(checkpoint, backend, format, {}, rank);
  WeightLoader load(checkpoint, backend, format, {.load = true}, rank);
  make(plan);
  const auto [made, linear] = make(load);
  check_internal(plan.report().group_bytes == load.report().group_bytes,
                 "a plan says what a load takes");
  backend.reserve_scratch({.max_tokens = num_rows,
                           .max_in_features = layer.in_features,
                           .activation_bytes = load.report().activation_bytes});

  Arena arena(linear.workspace_bytes(num_rows));
  SingleCommunicator alone;
  const ParallelGroups groups{.tp = ranks, .pp = alone, .ep = alone, .cp = alone};
  const ModelInput input;
  const ForwardContext context{
      .backend = backend, .arena = arena, .input = input, .kv_caches = {}, .groups = groups};
  const OutputLinear::Input activated = linear.allocate_input(context, num_rows);
  for (int64_t row = 0; row < num_rows; ++row)
    std::memcpy(activated.own.slice(0, row, 1).data, from + row * layer.in_features + made.begin,
                static_cast<size_t>(made.size) * sizeof(float));
  const OutputLinear::Target target = linear.begin(context, result, accumulate);
  if (const auto one = linear.as_one(context, activated, target))
    backend.linear(*one);
  else
    linear.run(context, activated, target);
  linear.finish(context, target, result, accumulate);
  check_internal(arena.peak_bytes() == arena.capacity_bytes(), "a plan says what a step takes");
}

}  // namespace

void register_testing_rank_cut(py::module_& testing) {
  testing.def("head_cut", &head_cut, "rank"_a, "num_ranks"_a, "num_heads"_a, "num_kv_heads"_a,
              "cut"_a = "columns",
              "A rank's heads, and which segments of o_proj it multiplies, in heads.");
  py::class_<OutputLayer>(testing, "OutputLayer")
      .def(py::init(&from_kwargs<OutputLayer>))
      .def_readwrite("path", &OutputLayer::path)
      .def_readwrite("name", &OutputLayer::name)
      .def_readwrite("out_features", &OutputLayer::out_features)
      .def_readwrite("in_features", &OutputLayer::in_features)
      .def_readwrite("has_bias", &OutputLayer::has_bias)
      .def_readwrite("is_transposed", &OutputLayer::is_transposed)
      .def_readwrite("quantization", &OutputLayer::quantization)
      .def_readwrite("cut", &OutputLayer::cut);
  testing.def("run_output_layer", &run_output_layer, "layer"_a, "ranks"_a, "backend"_a, "x"_a,
              py::arg("out").noconvert(), "accumulate"_a = false);
}

}  // namespace llmserve
