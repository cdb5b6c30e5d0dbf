// Every op of every backend on NumPy arrays, for tests and benchmarks: `llmserve._core_testing`.
// bf16 arrays are uint16 arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings/op_call.h"
#include "core/error.h"
#include "kernels/backend.h"
#include "kernels/backend_choice.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cuda_loader.h"
#include "testing/register.h"
#include "testing/staging.h"

namespace py = pybind11;

namespace llmserve {

// Their parts of this module: register_{blocks,context,cuda,fused,transfers}.cpp.
void register_testing_blocks(py::module_& testing, py::class_<Backend>& backend);
void register_testing_context(py::class_<Backend>& backend);
void register_testing_cuda(py::module_& testing);
void register_testing_fused(py::class_<Backend>& backend);
void register_testing_transfers(py::module_& testing, py::class_<Backend>& backend);

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

DType parse_dtype(const std::string& text) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    if (name(dtype) == text) return dtype;
  if (text == "fp8") return DType::kF8E4M3;
  throw InvalidArgument(concat("expected float32, bfloat16, float16 or fp8, got ", text));
}

template <class T>
T get(const py::dict& dict, const char* key, T fallback) {
  return dict.contains(key) ? dict[key].cast<T>() : fallback;
}

// Owns what a SampleRow points to.
struct OwnedSampleRow {
  std::vector<TokenBias> biases;
  std::vector<uint32_t> allowed;
  std::vector<int32_t> banned_token_ids;
  std::vector<TokenCount> counts;
  std::vector<int32_t> reported_token_ids;
  std::optional<py::array> draw_logits;

  explicit OwnedSampleRow(const py::dict& param)
      : allowed(get(param, "allowed", std::vector<uint32_t>{})),
        banned_token_ids(get(param, "banned_token_ids", std::vector<int32_t>{})),
        reported_token_ids(get(param, "reported_token_ids", std::vector<int32_t>{})),
        draw_logits(get(param, "draw_logits", std::optional<py::array>{})) {
    using Biases = std::vector<std::pair<int32_t, float>>;
    using Counts = std::vector<std::tuple<int32_t, int32_t, bool>>;
    for (const auto& [id, bias] : get(param, "biases", Biases{})) biases.push_back({id, bias});
    for (const auto& [id, num_generated, is_in_prompt] : get(param, "counts", Counts{}))
      counts.push_back({id, num_generated, is_in_prompt});
  }

  SampleRow row(const py::dict& param) const {
    SampleRow row;
    for_each_draw_field([&](const auto& field) {
      row.draw.*field.member = get(param, field.name, row.draw.*field.member);
    });
    row.seed = get(param, "seed", row.seed);
    row.position = get(param, "position", row.position);
    if (draw_logits) row.draw_logits = host_view(*draw_logits);
    row.biases = biases;
    row.allowed = allowed;
    row.banned_token_ids = banned_token_ids;
    row.counts = counts;
    row.forced_token_id = get(param, "forced_token_id", row.forced_token_id);
    row.num_top = get(param, "num_top", row.num_top);
    row.reported_token_ids = reported_token_ids;
    return row;
  }
};

// Rows that were made of dicts once: what a call costs beside that can be seen.
struct OwnedSampleRows {
  std::vector<OwnedSampleRow> owned;
  std::vector<SampleRow> rows;

  explicit OwnedSampleRows(const std::vector<py::dict>& params) {
    owned.reserve(params.size());
    for (const py::dict& param : params) rows.push_back(owned.emplace_back(param).row(param));
  }
};

py::list top_list(const std::vector<TopToken>& tokens) {
  py::list result;
  for (const TopToken& token : tokens)
    result.append(py::make_tuple(token.token_id, token.logprob, token.rank));
  return result;
}

py::list sample_rows(Backend& backend, const py::object& logits, const OwnedSampleRows& params) {
  const std::vector<SampleRow>& rows = params.rows;
  std::vector<SampledRow> sampled(rows.size());
  Staging staging(backend);
  const ConstTensor x = staging.in(logits);
  {
    py::gil_scoped_release release;
    backend.sample({.logits = x, .rows = rows, .out = sampled});
  }
  py::list result;
  for (const SampledRow& row : sampled) {
    py::dict dict;
    dict["token_id"] = row.token_id;
    dict["logprob"] = row.logprob;
    dict["rank"] = row.rank;
    dict["is_valid"] = row.is_valid;
    dict["is_raw_valid"] = row.is_raw_valid;
    dict["top"] = top_list(row.top);
    dict["reported"] = top_list(row.reported);
    result.append(dict);
  }
  return result;
}

py::list sample(Backend& backend, const py::object& logits, const std::vector<py::dict>& params) {
  return sample_rows(backend, logits, OwnedSampleRows(params));
}

py::object paged_attention(Backend& backend, const py::object& q, const py::object& keys,
                           const py::object& values, const Array<int32_t>& query_starts,
                           const Array<int32_t>& kv_lens, const Array<int32_t>& block_tables,
                           float scale, int32_t window, float soft_cap, const py::object& given,
                           const std::string& key_layout, const LinearWeight* output,
                           const py::object& sinks) {
  Staging staging(backend);
  const ConstTensor queries = staging.in(q);
  PagedKvCache cache{staging.cache(keys), {}, parse_key_layout(key_layout)};
  cache.values = py::isinstance<py::int_>(values) ? cache.keys.slice(3, 0, values.cast<int64_t>())
                                                  : staging.cache(values);
  PagedAttentionArgs args{.q = queries,
                          .cache = cache,
                          .query_starts = span_of(query_starts),
                          .kv_lens = span_of(kv_lens),
                          .block_tables = span_of(block_tables),
                          .max_blocks = block_tables.ndim() == 2 ? block_tables.shape(1) : 0,
                          .scale = scale,
                          .window = window,
                          .soft_cap = soft_cap,
                          .sinks = staging.in(sinks)};
  if (output == nullptr) {
    args.out = staging.make_out(given, {queries.shape[0], queries.shape[1], cache.values.shape[3]});
    py::gil_scoped_release release;
    backend.paged_attention(args);
    staging.finish();
    return staging.result();
  }
  const int64_t width = queries.shape[1] * cache.values.shape[3];
  const Tensor rows = staging.make_work(py::none(), queries.shape[0], width);
  args.out = rows;
  args.out.rank = 3;
  args.out.shape = {queries.shape[0], queries.shape[1], cache.values.shape[3]};
  args.out.strides = {width, cache.values.shape[3], 1};
  const LinearArgs linear{.x = rows,
                          .weight = output,
                          .out = staging.make_out(given, {rows.shape[0], output->out_features})};
  py::gil_scoped_release release;
  backend.fused_attention({.attention = args, .output = linear});
  staging.finish();
  return staging.result();
}

LinearWeight pack_linear(Backend& backend, const std::vector<py::array>& parts,
                         const std::string& dtype) {
  std::vector<ConstTensor> views;
  for (const py::array& part : parts) views.push_back(host_view(part));
  py::gil_scoped_release release;
  return backend.pack_linear(views, parse_dtype(dtype));
}

// The arrays have to stay.
LinearWeight defer_linear(Backend& backend, const std::vector<py::array>& parts,
                          const std::string& dtype) {
  std::vector<ConstTensor> views;
  for (const py::array& part : parts) views.push_back(host_view(part));
  return backend.defer_linear(views, parse_dtype(dtype));
}

void pack_rows(Backend& backend, const LinearWeight& weight) {
  const py::gil_scoped_release release;
  if (weight.rows) backend.pack_rows(*weight.rows);
}

// The rows [N, K] as integers.
LinearWeight pack_quantized(Backend& backend, const py::array& rows, const std::string& name) {
  const ConstTensor view = host_view(rows);
  const LinearFormat& format = find_linear_format(name);
  const int64_t k = view.shape[1];
  check_fits(format, "rows", k);
  py::gil_scoped_release release;
  return backend.pack_quantized(format, view.shape[0], k, [&](int64_t i, const QuantizedRow& row) {
    quantize_row(format, view.as<float>() + i * k, k, row);
  });
}

// A copy of the array that stays in the backend's memory.
DeviceArray to_device(Backend& backend, const py::array& array) {
  const ConstTensor host = host_view(array);
  if (!host.is_contiguous()) throw InvalidArgument("to_device: expected a contiguous array");
  DeviceArray result{Buffer(host.num_bytes(), backend.memory()), {}};
  backend.memory().copy_from_host(result.data.data(), host.data, host.num_bytes());
  result.view.data = result.data.data();
  result.view.dtype = host.dtype;
  result.view.rank = host.rank;
  result.view.shape = host.shape;
  result.view.strides = host.strides;
  return result;
}

// Zeros that never were in host memory.
DeviceArray empty_device(Backend& backend, const std::vector<int64_t>& shape,
                         const std::string& dtype) {
  if (shape.size() > kMaxRank) throw InvalidArgument("empty_device: expected at most 4 dimensions");
  DeviceArray result;
  result.view.dtype = parse_dtype(dtype);
  result.view.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int d = result.view.rank - 1; d >= 0; --d) {
    result.view.shape[d] = shape[static_cast<size_t>(d)];
    result.view.strides[d] = stride;
    stride *= result.view.shape[d];
  }
  result.data = Buffer(result.view.num_bytes(), backend.memory());
  result.view.data = result.data.data();
  return result;
}

py::array read_device_array(Backend& backend, const DeviceArray& array) {
  const bool is_bytes = array.view.dtype == DType::kU8;
  if (!is_bytes && array.view.dtype != DType::kF32)
    throw InvalidArgument("to_numpy: expected float32 or uint8");
  const auto* shape = array.view.shape.data();
  py::array result(is_bytes ? py::dtype::of<uint8_t>() : py::dtype::of<float>(),
                   std::vector<py::ssize_t>(shape, shape + array.view.rank));
  backend.memory().copy_to_host(static_cast<std::byte*>(result.mutable_data()), array.view.data,
                                array.view.num_bytes());
  return result;
}

// The operands of one call, by Staging.
class StagedOperands {
 public:
  explicit StagedOperands(Backend& backend) : staging_(backend) {}

  ConstTensor in(const char*, const py::object& given) { return staging_.in(given); }
  Tensor updated(const char*, const py::object& given) { return staging_.out(given); }
  Tensor cache(const char*, const py::object& given) { return staging_.cache(given); }
  Tensor result(const char*, const py::object& given, const std::vector<int64_t>& shape, bool) {
    return staging_.make_out(given, {shape.begin(), shape.end()});
  }
  template <class T>
  std::span<const T> list(const char* name, const py::object& given) {
    if constexpr (std::is_arithmetic_v<T>) {
      const auto array = op_call::cast<Array<T>>(name, given);
      kept_.push_back(array);
      const auto* data = staging_.guarded(array.data(), array.nbytes());
      return {static_cast<const T*>(data), static_cast<size_t>(array.size())};
    } else {
      const auto values =
          std::make_shared<std::vector<T>>(op_call::cast<std::vector<T>>(name, given));
      lists_.push_back(values);
      return *values;
    }
  }
  const LinearWeight* weight(const char*, const py::object& given) {
    return &given.cast<const LinearWeight&>();
  }
  void finish() { staging_.finish(); }
  py::object returned() const { return staging_.result() ? staging_.result() : py::none(); }

 private:
  Staging staging_;
  std::vector<py::object> kept_;
  std::vector<std::shared_ptr<const void>> lists_;
};

// Ops whose Args have fields; others are bound by hand.
template <class Args>
void def_staged_op(py::class_<Backend>& backend, const char* name,
                   void (Backend::*op)(const Args&)) {
  if constexpr (op_call::has_fields<Args>()) {
    op_call::def<Args>(backend, name, [op](Backend& self, const auto& given) {
      StagedOperands operands(self);
      const Args args = op_call::make<Args>(operands, given);
      {
        py::gil_scoped_release release;
        (self.*op)(args);
        operands.finish();
      }
      return operands.returned();
    });
  }
}

void register_plain_ops(py::class_<Backend>& backend) {
#define LLMSERVE_OP(name, Args) def_staged_op<Args>(backend, #name, &Backend::name);
#include "kernels/op_list.inc"
}

}  // namespace

void register_testing_ops(py::module_& testing) {
  using namespace py::literals;
  register_testing_cuda(testing);
  py::class_<LinearWeight>(testing, "LinearWeight", "A weight in its backend's own layout.")
      .def_readonly("out_features", &LinearWeight::out_features)
      .def_readonly("in_features", &LinearWeight::in_features)
      .def_property_readonly("num_bytes",
                             [](const LinearWeight& self) { return self.data.num_bytes(); });

  py::class_<OwnedSampleRows>(testing, "SampleRows", "Rows of Backend.sample, read once.")
      .def(py::init<const std::vector<py::dict>&>(), "rows"_a);
  py::class_<DeviceArray>(testing, "DeviceArray", "An array in a backend's memory.");
  py::class_<Backend> backend(testing, "Backend",
                              "The ops of one backend on NumPy arrays and its own DeviceArrays.");
  backend.def_property_readonly("name", &Backend::name)
      .def_property_readonly("description", &Backend::description)
      .def_property_readonly("num_prefix_items",
                             [](const Backend& self) {
                               const auto* cpu = dynamic_cast<const CpuBackend*>(&self);
                               return cpu == nullptr ? 0 : cpu->num_prefix_items();
                             })
      .def("pack_linear", &pack_linear, "parts"_a, "dtype"_a, py::keep_alive<0, 1>())
      .def("defer_linear", &defer_linear, "parts"_a, "dtype"_a, py::keep_alive<0, 1>())
      .def("pack_rows", &pack_rows, "weight"_a)
      .def("pack_quantized", &pack_quantized, "rows"_a, "format"_a, py::keep_alive<0, 1>())
      .def(
          "packed_bytes_quantized",
          [](const Backend& self, int64_t n, int64_t k, const std::string& format) {
            return self.packed_bytes(n, k, find_linear_format(format));
          },
          "out_features"_a, "in_features"_a, "format"_a)
      .def(
          "packed_bytes",
          [](const Backend& self, int64_t n, int64_t k, const std::string& dtype) {
            return self.packed_bytes(n, k, parse_dtype(dtype));
          },
          "out_features"_a, "in_features"_a, "dtype"_a)
      .def("paged_attention", &paged_attention, "q"_a, "key_cache"_a, "value_cache"_a,
           "query_starts"_a, "kv_lens"_a, "block_tables"_a, "scale"_a, "window"_a = 0,
           "soft_cap"_a = 0.0f, "out"_a = py::none(), "key_layout"_a = "rows",
           "output"_a = py::none(), "sinks"_a = py::none(),
           "With `output`, a weight: fused_attention. An int as value_cache: values in the keys.")
      .def("sample", &sample, "logits"_a, "rows"_a)
      .def("sample", &sample_rows, "logits"_a, "rows"_a);
  register_plain_ops(backend);
  backend.def(
      "key_layout",
      [](const Backend& self, int64_t block_size, int64_t key_dim, int64_t value_dim,
         const std::string& dtype) {
        const bool has_panels = self.key_layout(block_size, key_dim, value_dim,
                                                parse_dtype(dtype)) == KeyLayout::kPanels;
        return has_panels ? "panels" : "rows";
      },
      "block_size"_a, "key_dim"_a, "value_dim"_a, "dtype"_a,
      "What the engine's cache takes: \"rows\" or \"panels\".");
  backend.def(
      "first_non_finite",
      [](Backend& self, const py::array& array) {
        const ConstTensor tensor = host_view(array);
        py::gil_scoped_release release;
        return self.first_non_finite(tensor);
      },
      "array"_a);
  register_testing_blocks(testing, backend);
  register_testing_context(backend);
  register_testing_fused(backend);
  register_testing_transfers(testing, backend);
  backend.def("to_device", &to_device, "array"_a, py::keep_alive<0, 1>())
      .def("empty_device", &empty_device, "shape"_a, "dtype"_a, py::keep_alive<0, 1>())
      .def("to_numpy", &read_device_array, "array"_a)
      .def("synchronize", [](Backend& self) {
        py::gil_scoped_release release;
        self.memory().synchronize();
      });

  testing.def(
      "make_backend",
      [](const std::string& name, int32_t num_threads, const std::string& isa, int gpu) {
        const BackendOptions options{.num_threads = num_threads, .isa = isa};
        return gpu > 0 ? make_cuda_backend_on(gpu, options) : make_backend(name, options);
      },
      "name"_a, "num_threads"_a = 1, "isa"_a = "", "gpu"_a = 0);
  testing.def("num_gpus", &num_cuda_devices);
  testing.def(
      "activations",
      [] {
        std::vector<std::pair<std::string, bool>> rows;
        for (const ActivationRow& row : kActivations) rows.emplace_back(row.name, row.is_gated);
        return rows;
      },
      "Every activation, and whether it is of a gate and what it is multiplied with.");
  testing.def("guard_operands", &guard_operands, "side"_a);
  testing.def(
      "read_operand",
      [](Backend& backend, const py::array& array, int64_t idx) {
        Staging staging(backend);
        return staging.in(array).as<float>()[idx];
      },
      "backend"_a, "array"_a, "idx"_a, "One number, wherever that is: what guard pages are for.");
  testing.def("backend_names", [] {
    std::vector<std::string> names;
    for (const BackendRow& row : backend_registry()) names.emplace_back(row.name);
    return names;
  });
  testing.def(
      "unavailable_reason", [](const std::string& name) { return unavailable_reason(name); },
      "name"_a, "Why the backend cannot run here; empty where it can.");
  testing.def(
      "cpu_isas",
      [] {
        std::vector<std::pair<std::string, bool>> isas;
        for (const CpuIsa& isa : cpu_isa_registry()) isas.emplace_back(isa.name, isa.can_run());
        return isas;
      },
      "Every instruction set of this build, best first, and whether this machine can run it.");
}

}  // namespace llmserve
