// Every op of every backend on NumPy arrays, for tests and benchmarks: `llmserve._core.testing`.
// bf16 arrays are uint16 arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "bindings/register.h"
#include "core/error.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/machine_probe.h"

namespace py = pybind11;

namespace llmserve {
namespace {

DType dtype_of(const py::array& array) {
  if (py::isinstance<py::array_t<float>>(array)) return DType::kF32;
  if (py::isinstance<py::array_t<uint16_t>>(array)) return DType::kBF16;
  if (array.dtype().kind() == 'f' && array.itemsize() == 2) return DType::kF16;
  throw InvalidArgument(concat("expected a float32, float16 or uint16 (bfloat16) array, got ",
                               std::string(py::str(array.dtype()))));
}

template <class View>
View view_of(const py::array& array, decltype(View::data) data) {
  if (array.ndim() > kMaxRank)
    throw InvalidArgument(concat("expected at most 4 dimensions, got ", array.ndim()));
  View view;
  view.data = data;
  view.dtype = dtype_of(array);
  view.rank = static_cast<int>(array.ndim());
  for (int d = 0; d < view.rank; ++d) {
    view.shape[d] = array.shape(d);
    view.strides[d] = array.strides(d) / array.itemsize();
  }
  return view;
}

ConstTensor in(const py::array& array) { return view_of<ConstTensor>(array, array.data()); }
Tensor out(py::array& array) { return view_of<Tensor>(array, array.mutable_data()); }

ConstTensor in(const std::optional<py::array>& array) { return array ? in(*array) : ConstTensor{}; }

// What the caller gave to write to, or a new array.
py::array_t<float> make_out(const std::optional<py::array>& given, std::vector<py::ssize_t> shape) {
  if (given) return py::reinterpret_borrow<py::array_t<float>>(*given);
  return py::array_t<float>(std::move(shape));
}

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

DType parse_dtype(const std::string& text) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    if (name(dtype) == text) return dtype;
  throw InvalidArgument(concat("expected float32, bfloat16 or float16, got ", text));
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
    row.temperature = get(param, "temperature", row.temperature);
    row.top_k = get(param, "top_k", row.top_k);
    row.top_p = get(param, "top_p", row.top_p);
    row.min_p = get(param, "min_p", row.min_p);
    row.seed = get(param, "seed", row.seed);
    row.position = get(param, "position", row.position);
    if (draw_logits) row.draw_logits = in(*draw_logits);
    row.biases = biases;
    row.allowed = allowed;
    row.banned_token_ids = banned_token_ids;
    row.counts = counts;
    row.repetition_penalty = get(param, "repetition_penalty", row.repetition_penalty);
    row.frequency_penalty = get(param, "frequency_penalty", row.frequency_penalty);
    row.presence_penalty = get(param, "presence_penalty", row.presence_penalty);
    row.forced_token_id = get(param, "forced_token_id", row.forced_token_id);
    row.num_top = get(param, "num_top", row.num_top);
    row.reported_token_ids = reported_token_ids;
    return row;
  }
};

py::list top_list(const std::vector<TopToken>& tokens) {
  py::list result;
  for (const TopToken& token : tokens)
    result.append(py::make_tuple(token.token_id, token.logprob, token.rank));
  return result;
}

py::list sample(Backend& backend, const py::array& logits, const std::vector<py::dict>& params) {
  std::vector<OwnedSampleRow> owned;
  owned.reserve(params.size());
  std::vector<SampleRow> rows;
  for (const py::dict& param : params) rows.push_back(owned.emplace_back(param).row(param));
  std::vector<SampledRow> sampled(rows.size());
  const ConstTensor x = in(logits);
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

py::array paged_attention(Backend& backend, const py::array& q, py::array keys, py::array values,
                          const Array<int32_t>& query_starts, const Array<int32_t>& kv_lens,
                          const Array<int32_t>& block_tables, float scale, int32_t window,
                          float soft_cap, const std::optional<py::array>& given) {
  py::array_t<float> result = make_out(given, {q.shape(0), q.shape(1), values.shape(3)});
  const PagedAttentionArgs args{.q = in(q),
                                .cache = {out(keys), out(values)},
                                .query_starts = span_of(query_starts),
                                .kv_lens = span_of(kv_lens),
                                .block_tables = span_of(block_tables),
                                .max_blocks = block_tables.ndim() == 2 ? block_tables.shape(1) : 0,
                                .scale = scale,
                                .window = window,
                                .soft_cap = soft_cap,
                                .out = out(result)};
  py::gil_scoped_release release;
  backend.paged_attention(args);
  return result;
}

py::array linear(Backend& backend, const py::array& x, const LinearWeight& weight,
                 const std::optional<py::array>& bias, const std::optional<py::array>& given,
                 bool accumulate) {
  py::array_t<float> result = make_out(given, {x.shape(0), weight.out_features});
  const LinearArgs args{.x = in(x),
                        .weight = &weight,
                        .bias = in(bias),
                        .out = out(result),
                        .accumulate = accumulate};
  py::gil_scoped_release release;
  backend.linear(args);
  return result;
}

LinearWeight pack_linear(Backend& backend, const std::vector<py::array>& parts,
                         const std::string& dtype) {
  std::vector<ConstTensor> views;
  for (const py::array& part : parts) views.push_back(in(part));
  py::gil_scoped_release release;
  return backend.pack_linear(views, parse_dtype(dtype));
}

void register_simple_ops(py::class_<Backend>& backend) {
  using namespace py::literals;
  backend.def(
      "embedding",
      [](Backend& self, const py::array& table, const Array<int32_t>& token_ids, float scale) {
        py::array_t<float> result({token_ids.size(), table.shape(1)});
        self.embedding({in(table), span_of(token_ids), out(result), scale});
        return result;
      },
      "table"_a, "token_ids"_a, "scale"_a = 1.0f);
  backend.def(
      "rms_norm",
      [](Backend& self, const py::array& x, const py::array& weight, float eps, float weight_offset,
         const std::optional<py::array>& given) {
        py::array_t<float> result = make_out(given, {x.shape(0), x.shape(1)});
        const RmsNormArgs args{in(x), in(weight), out(result), eps, weight_offset};
        py::gil_scoped_release release;
        self.rms_norm(args);
        return result;
      },
      "x"_a, "weight"_a, "eps"_a = 1e-6f, "weight_offset"_a = 0.0f, "out"_a = py::none());
  backend.def(
      "add_rms_norm",
      [](Backend& self, py::array residual, const py::array& x, const py::array& weight, float eps,
         float weight_offset, const std::optional<py::array>& given) {
        py::array_t<float> result = make_out(given, {x.shape(0), x.shape(1)});
        self.add_rms_norm({out(residual), in(x), in(weight), out(result), eps, weight_offset});
        return result;
      },
      "residual"_a, "x"_a, "weight"_a, "eps"_a = 1e-6f, "weight_offset"_a = 0.0f,
      "out"_a = py::none());
  backend.def(
      "rotary_table",
      [](Backend& self, const Array<int32_t>& positions, const Array<float>& inv_freq,
         float scale) {
        py::array_t<float> result({positions.size(), 2 * inv_freq.size()});
        self.rotary_table({span_of(positions), span_of(inv_freq), scale, out(result)});
        return result;
      },
      "positions"_a, "inv_freq"_a, "scale"_a = 1.0f);
  backend.def(
      "rotary",
      [](Backend& self, py::array heads, const py::array& cos_sin, bool interleaved) {
        self.rotary({out(heads), in(cos_sin), interleaved});
      },
      "heads"_a, "cos_sin"_a, "interleaved"_a = false);
  backend.def(
      "store_kv",
      [](Backend& self, const py::array& keys, const py::array& values, const Array<int64_t>& slots,
         py::array key_cache, py::array value_cache) {
        self.store_kv({in(keys), in(values), span_of(slots), {out(key_cache), out(value_cache)}});
      },
      "keys"_a, "values"_a, "slots"_a, "key_cache"_a, "value_cache"_a);
  backend.def(
      "copy_blocks",
      [](Backend& self, const std::vector<std::pair<int32_t, int32_t>>& pairs, py::array key_cache,
         py::array value_cache) { self.copy_blocks({pairs, {out(key_cache), out(value_cache)}}); },
      "pairs"_a, "key_cache"_a, "value_cache"_a);
  backend.def(
      "gated_activation",
      [](Backend& self, const py::array& gate_up, const std::string& activation,
         const std::optional<py::array>& given) {
        py::array_t<float> result = make_out(given, {gate_up.shape(0), gate_up.shape(1) / 2});
        const GatedActivationArgs args{
            in(gate_up), out(result),
            activation == "silu" ? Activation::kSilu : Activation::kGeluTanh};
        py::gil_scoped_release release;
        self.gated_activation(args);
        return result;
      },
      "gate_up"_a, "activation"_a = "silu", "out"_a = py::none());
  backend.def(
      "gather_rows",
      [](Backend& self, const py::array& x, const Array<int32_t>& rows) {
        py::array_t<float> result({rows.size(), x.shape(1)});
        self.gather_rows({in(x), span_of(rows), out(result)});
        return result;
      },
      "x"_a, "rows"_a);
  backend.def(
      "first_non_finite",
      [](Backend& self, const py::array& array) {
        const ConstTensor tensor = in(array);
        py::gil_scoped_release release;
        return self.first_non_finite(tensor);
      },
      "array"_a);
}

}  // namespace

void register_testing_ops(py::module_& testing) {
  using namespace py::literals;
  py::class_<LinearWeight>(testing, "LinearWeight", "A weight in its backend's own layout.")
      .def_readonly("out_features", &LinearWeight::out_features)
      .def_readonly("in_features", &LinearWeight::in_features)
      .def_property_readonly("num_bytes",
                             [](const LinearWeight& self) { return self.data.num_bytes(); });

  py::class_<Backend> backend(testing, "Backend", "The ops of one backend on NumPy arrays.");
  backend.def_property_readonly("name", &Backend::name)
      .def_property_readonly("description", &Backend::description)
      .def("pack_linear", &pack_linear, "parts"_a, "dtype"_a)
      .def(
          "packed_bytes",
          [](const Backend& self, int64_t n, int64_t k, const std::string& dtype) {
            return self.packed_bytes(n, k, parse_dtype(dtype));
          },
          "out_features"_a, "in_features"_a, "dtype"_a)
      .def("linear", &linear, "x"_a, "weight"_a, "bias"_a = py::none(), "out"_a = py::none(),
           "accumulate"_a = false)
      .def("paged_attention", &paged_attention, "q"_a, "key_cache"_a, "value_cache"_a,
           "query_starts"_a, "kv_lens"_a, "block_tables"_a, "scale"_a, "window"_a = 0,
           "soft_cap"_a = 0.0f, "out"_a = py::none())
      .def("sample", &sample, "logits"_a, "rows"_a);
  register_simple_ops(backend);

  testing.def(
      "make_backend",
      [](const std::string& name, int32_t num_threads, const std::string& isa) {
        return make_backend(name, {.num_threads = num_threads, .isa = isa});
      },
      "name"_a, "num_threads"_a = 1, "isa"_a = "");
  testing.def("backend_names", [] {
    std::vector<std::string> names;
    for (const BackendRow& row : backend_registry()) names.emplace_back(row.name);
    return names;
  });
  testing.def(
      "cpu_isas",
      [] {
        std::vector<std::pair<std::string, bool>> isas;
        for (const CpuIsa& isa : cpu_isa_registry()) isas.emplace_back(isa.name, isa.can_run());
        return isas;
      },
      "Every instruction set of this build, best first, and whether this machine can run it.");
  py::class_<MachineProbe>(testing, "MachineProbe", "Measures the machine's limits.")
      .def(py::init([](int num_threads, const std::string& isa, int64_t num_bytes) {
             return std::make_unique<MachineProbe>(select_cpu_isa(isa), num_threads, num_bytes);
           }),
           "num_threads"_a = 1, "isa"_a = "", "num_bytes"_a = int64_t{256} << 20)
      .def(
          "measure",
          [](MachineProbe& self) {
            py::gil_scoped_release release;
            const MachineRates rates = self.measure();
            return std::pair(rates.read_gb_per_s, rates.fma_gflop_per_s);
          },
          "(read GB/s, float32 GFLOP/s), measured once.");
}

}  // namespace llmserve
