// Whole models for the tests.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/engine_config.h"
#include "bindings/model_records.h"
#include "comm/registry.h"
#include "comm/single_communicator.h"
#include "engine/kv_storage.h"
#include "models/config_reader.h"
#include "models/model_loader.h"
#include "testing/register.h"
#include "testing/split_mlp.h"

namespace py = pybind11;

namespace llmserve {
namespace {

template <class T>
using InArray = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::span<const T> as_span(const InArray<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

py::array_t<float> to_numpy(Memory& memory, const Tensor& tensor) {
  py::array_t<float> out({tensor.shape[0], tensor.shape[1]});
  memory.copy_to_host(out.mutable_data(), tensor.data, tensor.num_bytes());
  return out;
}

// A loaded model with a paged cache of its own, run on batches that the test lays out.
class TestModel {
 public:
  TestModel(const std::string& path, const std::string& device, const std::string& isa,
            const std::string& dtype, const std::string& quantization, int64_t max_model_len,
            int num_threads, int64_t num_blocks, int64_t block_size, const std::string& kv_dtype,
            int64_t max_tokens, int64_t max_logit_rows, bool defer_packing, bool splits_mlp)
      : backend_(make_backend(device, {.num_threads = num_threads, .isa = isa})) {
    const Checkpoint checkpoint = open_checkpoint(path);
    ModelConfig config = read_model_config(checkpoint.config(), max_model_len);
    if (splits_mlp)
      for (LayerTraits& layer : config.layers) layer.feed_forward = &kSplitMlp;
    model_ = load_model(checkpoint, config, *backend_,
                        resolve_weight_format(resolve_dtype(dtype, checkpoint), quantization),
                        nullptr, defer_packing ? &deferred_ : nullptr);
    arena_ = std::make_unique<Arena>(model_->workspace_bytes(max_tokens, max_logit_rows),
                                     backend_->memory());
    const DType cache_dtype = kv_cache_dtype_from_name(kv_dtype, resolve_dtype("auto", checkpoint));
    num_groups_ = std::ssize(row_groups(config.cache_groups));
    num_slots_ = num_blocks * block_size;
    num_blocks_ = num_blocks;
    storage_ = std::make_unique<KvStorage>(
        model_->cache_groups(), model_->kv_places(),
        KvStorage::Shape{
            .num_blocks = num_groups_ * num_blocks, .block_size = block_size, .dtype = cache_dtype},
        *backend_);
  }

  // The hidden states [T, E] and the logits [S, V] of one step.
  std::pair<py::array_t<float>, py::array_t<float>> forward(
      const InArray<int32_t>& token_ids, const InArray<int32_t>& positions,
      const InArray<int64_t>& slots, const InArray<int32_t>& query_starts,
      const InArray<int32_t>& kv_lens, const InArray<int32_t>& block_tables,
      const InArray<int32_t>& logit_rows, const InArray<int32_t>& wanted_layers,
      const InArray<int32_t>& wanted_tokens) {
    // Each cache group has a part of the pool for itself, with the same blocks in it.
    std::vector<std::vector<int64_t>> group_slots;
    std::vector<std::vector<int32_t>> group_tables;
    std::vector<KvGroupInput> inputs;
    group_slots.reserve(static_cast<size_t>(num_groups_));
    group_tables.reserve(static_cast<size_t>(num_groups_));
    for (int64_t g = 0; g < num_groups_; ++g) {
      group_slots.emplace_back(slots.data(), slots.data() + slots.size());
      for (int64_t& slot : group_slots.back())
        if (slot >= 0) slot += g * num_slots_;
      group_tables.emplace_back(block_tables.data(), block_tables.data() + block_tables.size());
      for (int32_t& block : group_tables.back()) block += static_cast<int32_t>(g * num_blocks_);
      inputs.push_back({.slots = group_slots.back(), .block_tables = group_tables.back()});
    }
    const ModelInput input{.token_ids = as_span(token_ids),
                           .positions = as_span(positions),
                           .query_starts = as_span(query_starts),
                           .kv_lens = as_span(kv_lens),
                           .max_blocks = block_tables.shape(1),
                           .kv_groups = inputs,
                           .logit_rows = as_span(logit_rows),
                           .wanted_layers = as_span(wanted_layers),
                           .wanted_tokens = as_span(wanted_tokens)};
    const int64_t num_wanted = std::ssize(input.wanted_layers) * std::ssize(input.wanted_tokens);
    layer_states_ = Buffer(num_wanted * model_->config().hidden_size * 4, backend_->memory());
    const ForwardContext context{
        .backend = *backend_,
        .arena = *arena_,
        .input = input,
        .kv_caches = storage_->layers(),
        .groups = *groups_,
        .layer_states = Tensor(layer_states_.data(), DType::kF32,
                               {std::ssize(input.wanted_layers), std::ssize(input.wanted_tokens),
                                model_->config().hidden_size})};
    const Arena::Scope scope(*arena_);
    Tensor hidden;
    Tensor logits;
    {
      const py::gil_scoped_release release;
      hidden = model_->forward(context);
      logits = model_->compute_logits(context, hidden, input.logit_rows);
    }
    return {to_numpy(backend_->memory(), hidden), to_numpy(backend_->memory(), logits)};
  }

  // [L, W, E] of the last forward().
  py::array_t<float> layer_states(int64_t num_layers, int64_t num_tokens) const {
    py::array_t<float> out({num_layers, num_tokens, model_->config().hidden_size});
    backend_->memory().copy_to_host(out.mutable_data(), layer_states_.data(),
                                    layer_states_.num_bytes());
    return out;
  }
  // Ranks among which the layers would be shared out.
  void set_pp(int world_size) {
    pp_ = find_communicator("shm").make({.world_size = world_size})->join(0, {});
    groups_.emplace(ParallelGroups{.tp = alone_, .pp = *pp_, .ep = alone_, .cp = alone_});
  }

  // How many weights are still to be packed.
  size_t num_deferred() const { return deferred_.size(); }
  void pack_one() {
    deferred_.back().pack(*backend_);
    deferred_.pop_back();
  }

  py::dict weights() const { return to_dict(model_->weights()); }
  int64_t kv_bytes_per_token(const std::string& dtype) const {
    return model_->kv_bytes_per_token(kv_cache_dtype_from_name(dtype, DType::kF32));
  }
  int64_t workspace_bytes(int64_t max_tokens, int64_t max_logit_rows) const {
    return model_->workspace_bytes(max_tokens, max_logit_rows);
  }
  int64_t peak_bytes() const { return arena_->peak_bytes(); }

 private:
  SingleCommunicator alone_;
  std::unique_ptr<Communicator> pp_;
  std::optional<ParallelGroups> groups_{
      ParallelGroups{.tp = alone_, .pp = alone_, .ep = alone_, .cp = alone_}};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  std::vector<DeferredWeight> deferred_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<KvStorage> storage_;
  Buffer layer_states_;
  int64_t num_groups_ = 0;
  int64_t num_blocks_ = 0;  // of a group
  int64_t num_slots_ = 0;   // of a group
};

}  // namespace

void register_testing_models(py::module_& testing) {
  py::class_<TestModel>(testing, "Model")
      .def(py::init<const std::string&, const std::string&, const std::string&, const std::string&,
                    const std::string&, int64_t, int, int64_t, int64_t, const std::string&, int64_t,
                    int64_t, bool, bool>(),
           py::arg("path"), py::kw_only(), py::arg("device") = "ref", py::arg("isa") = "",
           py::arg("dtype") = "auto", py::arg("quantization") = "", py::arg("max_model_len") = 0,
           py::arg("num_threads") = 1, py::arg("num_blocks") = 64, py::arg("block_size") = 16,
           py::arg("kv_dtype") = "float32", py::arg("max_tokens") = 512,
           py::arg("max_logit_rows") = 512, py::arg("defer_packing") = false,
           py::arg("splits_mlp") = false)
      .def("forward", &TestModel::forward, py::arg("token_ids"), py::arg("positions"),
           py::arg("slots"), py::arg("query_starts"), py::arg("kv_lens"), py::arg("block_tables"),
           py::arg("logit_rows"), py::arg("wanted_layers") = InArray<int32_t>(0),
           py::arg("wanted_tokens") = InArray<int32_t>(0))
      .def("layer_states", &TestModel::layer_states, py::arg("num_layers"), py::arg("num_tokens"))
      .def("set_pp", &TestModel::set_pp, py::arg("world_size"))
      .def("weights", &TestModel::weights)
      .def("pack_one", &TestModel::pack_one)
      .def_property_readonly("num_deferred", &TestModel::num_deferred)
      .def("kv_bytes_per_token", &TestModel::kv_bytes_per_token)
      .def("workspace_bytes", &TestModel::workspace_bytes)
      .def_property_readonly("peak_bytes", &TestModel::peak_bytes);
}

}  // namespace llmserve
