// Single weights, cut among ranks, and the memory of KV caches, for the tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "api/engine_config.h"
#include "bindings/from_kwargs.h"
#include "core/error.h"
#include "engine/kv_storage.h"
#include "layers/weight_loader.h"
#include "models/model_loader.h"
#include "testing/register.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

// How a weight is made of tensors, and which share of it is asked for.
struct WeightRequest {
  std::string path;
  std::string quantization;
  std::vector<WeightPart> parts;
  int64_t in_features = 0;
  bool is_transposed = false;
  Shard shard;
};

// Loads it, and says what a plan says of it. Both must agree.
class LoadedWeights {
 public:
  explicit LoadedWeights(const WeightRequest& request)
      : backend_(make_backend("ref", {})),
        checkpoint_(open_checkpoint(request.path)),
        format_(resolve_weight_format(resolve_dtype("auto", checkpoint_), request.quantization)),
        plan_(checkpoint_, *backend_, format_, {}),
        load_(checkpoint_, *backend_, format_, {.load = true}) {}

  WeightLoader& load() { return load_; }
  WeightLoader& plan() { return plan_; }
  void check() const {
    check_internal(plan_.report().group_bytes == load_.report().group_bytes,
                   "a plan says what a load takes");
  }

 private:
  std::unique_ptr<Backend> backend_;
  Checkpoint checkpoint_;
  WeightFormat format_;
  WeightLoader plan_;
  WeightLoader load_;
};

// (N, K, format or "", packed bytes) of each of the weights that the parts make.
py::list load_linear(const WeightRequest& request) {
  LoadedWeights weights(request);
  const auto linear = [&](WeightLoader& loader) {
    return loader.linear(WeightGroup::kMlp, request.parts, request.in_features,
                         request.is_transposed, request.shard);
  };
  const std::vector<LinearWeight> planned = linear(weights.plan());
  const std::vector<LinearWeight> loaded = linear(weights.load());
  weights.check();
  py::list out;
  for (size_t i = 0; i < loaded.size(); ++i) {
    const LinearWeight& weight = loaded[i];
    check_internal(planned[i].out_features == weight.out_features &&
                       planned[i].in_features == weight.in_features &&
                       planned[i].format == weight.format,
                   "a plan has the sizes of a load");
    out.append(py::make_tuple(weight.out_features, weight.in_features,
                              weight.format ? std::string(weight.format->name) : "",
                              py::bytes(reinterpret_cast<const char*>(weight.bytes()),
                                        static_cast<size_t>(weight.num_bytes()))));
  }
  return out;
}

std::vector<float> load_vector(const WeightRequest& request) {
  LoadedWeights weights(request);
  weights.plan().vector(WeightGroup::kNorm, request.parts, request.shard);
  const VectorWeight loaded =
      weights.load().vector(WeightGroup::kNorm, request.parts, request.shard);
  weights.check();
  const ConstTensor view = loaded.view();
  return {view.as<float>(), view.as<float>() + loaded.size};
}

// Offsets of a KV cache's parts in its memory, and their strides, in bytes.
py::dict lay_out_cache(const std::vector<CacheGroupSpec>& groups, int64_t num_blocks,
                       int64_t block_size, int64_t num_state_slots, const std::string& dtype) {
  const std::unique_ptr<Backend> backend = make_backend("cpu", {});
  std::vector<KvPlace> places;  // of all layers of a group, then those of the next
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto group = static_cast<int32_t>(g);
    for (int32_t lane = 0; lane < groups[g].num_layers; ++lane)
      places.push_back(groups[g].is_state() ? KvPlace{.state_group = group, .state_lane = lane}
                                            : KvPlace{.group = group, .lane = lane});
  }
  const KvStorage::Shape shape{.num_blocks = num_blocks,
                               .block_size = block_size,
                               .dtype = kv_cache_dtype_from_name(dtype, DType::kF32),
                               .num_state_slots = num_state_slots};
  const KvStorage storage(groups, places, shape, *backend);
  const auto* start = static_cast<const std::byte*>(storage.layers()[0].keys.data);
  const auto offset = [&](const Tensor& tensor) {
    return tensor ? static_cast<const std::byte*>(tensor.data) - start : -1;
  };
  py::list keys, values, value_strides, states;
  for (const PagedKvCache& cache : storage.layers()) {
    keys.append(offset(cache.keys));
    values.append(offset(cache.values));
    value_strides.append(cache.values ? cache.values.strides[2] * size_bytes(cache.values.dtype)
                                      : -1);
  }
  for (const Tensor& state : storage.states()) states.append(offset(state));
  py::dict out;
  out["num_bytes"] = storage.num_bytes();
  out["block_bytes"] = storage.block_bytes();
  out["keys"] = keys;
  out["values"] = values;
  out["value_strides"] = value_strides;
  out["states"] = states;
  return out;
}

}  // namespace

void register_testing_weights(py::module_& testing) {
  py::class_<WeightPart>(testing, "WeightPart")
      .def(py::init(&from_kwargs<WeightPart>))
      .def_readwrite("name", &WeightPart::name)
      .def_readwrite("size", &WeightPart::size)
      .def_readwrite("begin", &WeightPart::begin)
      .def_readwrite("of", &WeightPart::of)
      .def_readwrite("width", &WeightPart::width)
      .def_readwrite("num_runs", &WeightPart::num_runs)
      .def_readwrite("stride", &WeightPart::stride);
  py::class_<WeightRequest>(testing, "WeightRequest")
      .def(py::init(&from_kwargs<WeightRequest>))
      .def_readwrite("path", &WeightRequest::path)
      .def_readwrite("quantization", &WeightRequest::quantization)
      .def_readwrite("parts", &WeightRequest::parts)
      .def_readwrite("in_features", &WeightRequest::in_features)
      .def_readwrite("is_transposed", &WeightRequest::is_transposed)
      .def_property(
          "axis",
          [](const WeightRequest& request) {
            return request.shard.axis == ShardAxis::kInput ? "input" : "output";
          },
          [](WeightRequest& request, const std::string& axis) {
            request.shard.axis = axis == "input" ? ShardAxis::kInput : ShardAxis::kOutput;
          })
      .def_property(
          "rank", [](const WeightRequest& request) { return request.shard.rank; },
          [](WeightRequest& request, int32_t rank) { request.shard.rank = rank; })
      .def_property(
          "num_ranks", [](const WeightRequest& request) { return request.shard.size; },
          [](WeightRequest& request, int32_t size) { request.shard.size = size; })
      .def_property(
          "num_units", [](const WeightRequest& request) { return request.shard.num_units; },
          [](WeightRequest& request, int64_t units) { request.shard.num_units = units; });
  testing.def("load_linear", &load_linear, "request"_a,
              "(N, K, format, packed bytes) of each of the weights; the plan agrees.");
  testing.def("load_vector", &load_vector, "request"_a);
  testing.def("lay_out_cache", &lay_out_cache, "groups"_a, py::kw_only(), "num_blocks"_a,
              "block_size"_a, "num_state_slots"_a = 0, "dtype"_a = "float32");
}

}  // namespace llmserve
