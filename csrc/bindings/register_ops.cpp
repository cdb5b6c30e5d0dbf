// The kernels themselves on arrays: what `llmserve.ops` is made of. Shapes and dtypes are those of
// kernels/ops.h and checked there; what crosses from Python, and indices that kernels trust, here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "bindings/field_repr.h"
#include "bindings/op_arguments.h"
#include "bindings/op_call.h"
#include "bindings/register.h"
#include "core/error.h"
#include "core/shape_check.h"
#include "core/system.h"
#include "kernels/backend.h"
#include "kernels/host_ops.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

// A backend that one thread at a time may use, from any thread.
class Ops {
 public:
  Ops(const std::string& backend, int32_t num_threads)
      : backend_(make_backend(
            backend, {.num_threads = num_threads > 0 ? num_threads : default_num_threads()})) {}

  std::string_view name() const { return backend_->name(); }
  std::string description() const { return backend_->description(); }

  // Where the arrays of a call are to be.
  ArrayPlace place() const { return backend_->memory().is_host() ? ArrayPlace{} : cuda_place(); }

  void run(const ArrayPlace& place, const std::function<void(Backend&)>& work) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    backend_->run_on_stream(place.stream, [&] { work(*backend_); });
  }
  // Memory of the backend for what runs now; only within run().
  std::byte* workspace(int64_t num_bytes) {
    if (workspace_.num_bytes() < num_bytes) workspace_ = Buffer(num_bytes, backend_->memory());
    return workspace_.data();
  }

 private:
  const std::unique_ptr<Backend> backend_;
  Buffer workspace_;  // grows, since freeing a device's memory waits for it
  std::mutex mutex_;
};

// A weight and whose layout it is in.
struct PackedWeight {
  LinearWeight weight;
  std::string backend;
};

void check_finite(const char* field, float value, float minimum) {
  if (!std::isfinite(value) || value < minimum)
    throw InvalidArgument(
        concat(field, ": expected a finite number of at least ", minimum, ", got ", value));
}

// The arrays of one call of an op that has fields (op_fields.h).
class CallOperands {
 public:
  CallOperands(const Ops& ops, std::string op) : place_(ops.place()), op_(std::move(op)) {}

  const ArrayPlace& place() const { return place_; }

  ConstTensor in(const char* name, const py::object& given) {
    if (given.is_none()) return {};
    if (!like_) like_ = given;
    return inputs_.emplace_back(imported_.emplace_back(path(name), given, place_).view());
  }
  Tensor updated(const char* name, const py::object& given) {
    return updated_
        .emplace_back(path(name), given, DType::kF32, std::initializer_list<int64_t>{}, place_)
        .tensor();
  }
  Tensor cache(const char* name, const py::object& given) {
    return cache_part_of(updated(name, given));
  }
  Tensor result(const char* name, const py::object& given, const std::vector<int64_t>& shape,
                bool can_be_first) {
    can_be_first_ = can_be_first;
    return result_.emplace(path(name), given, DType::kF32, shape, place_, like_).tensor();
  }
  template <class T>
  std::span<const T> list(const char* name, const py::object& given) {
    if constexpr (std::is_same_v<T, int32_t>)
      return indices_.emplace_back(import_int32s(path(name), given));
    else
      return pairs_.emplace_back(op_call::cast<std::vector<T>>(name, given));
  }

  // Of what is written, nothing is read, but that a result may be the first input where it can.
  void check_apart() const {
    std::vector<ConstTensor> others = inputs_;
    if (result_) {
      result_->check_apart(others, can_be_first_);
      others.push_back(result_->tensor());
    }
    for (const OutputArray& array : updated_) {
      array.check_apart(others);
      others.push_back(array.tensor());
    }
  }
  py::object returned() const { return result_ ? result_->result(like_) : py::none(); }

 private:
  std::string path(const char* name) const { return op_ + "." + name; }

  const ArrayPlace place_;
  const std::string op_;
  py::object like_;  // the first array that is read
  std::list<ImportedArray> imported_;
  std::vector<ConstTensor> inputs_;
  std::list<OutputArray> updated_;
  std::optional<OutputArray> result_;
  bool can_be_first_ = false;
  std::list<std::vector<int32_t>> indices_;
  std::list<std::vector<std::pair<int32_t, int32_t>>> pairs_;
};

template <class Args, class Class>
void def_array_op(Class& bound, const char* name, void (Backend::*op)(const Args&)) {
  op_call::def<Args>(bound, name, [name, op](Ops& ops, const auto& given) {
    CallOperands operands(ops, name);
    const Args args = op_call::make<Args>(operands, given);
    operands.check_apart();
    ops.run(operands.place(), [&](Backend& backend) { (backend.*op)(args); });
    return operands.returned();
  });
}

// theta^(-2i/d), rounded where PyTorch rounds: base, exponent and power are f32.
std::vector<float> inverse_frequencies(double theta, int64_t rotary_dim) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i + 1 < rotary_dim; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(rotary_dim);
    const auto power = static_cast<float>(std::pow(static_cast<float>(theta), exponent));
    frequencies.push_back(1.0f / power);
  }
  return frequencies;
}

std::vector<float> import_frequencies(const py::object& inv_freq) {
  if (is_on_cuda(inv_freq))
    return import_row_values<float>("rotary_embedding.inv_freq", inv_freq, -1);
  const ImportedArray array("rotary_embedding.inv_freq", inv_freq);
  check_tensor("rotary_embedding.inv_freq", array.view(), {{"d/2"}}, {DType::kF32});
  const auto* values = array.view().as<float>();
  return {values, values + array.view().shape[0]};
}

// Both [T, H, D], checked: a head at a time, as rows [T, D].
void copy_heads(Backend& backend, const ConstTensor& from, const Tensor& to) {
  const auto head_rows = [&](auto view, int64_t head) {
    view.data = view.template as<float>() + head * view.strides[1];
    view.rank = 2;
    view.shape = {from.shape[0], from.shape[2]};
    view.strides = {view.strides[0], 1};
    return view;
  };
  std::vector<int32_t> rows(static_cast<size_t>(from.shape[0]));
  std::iota(rows.begin(), rows.end(), 0);
  for (int64_t h = 0; h < from.shape[1]; ++h)
    backend.gather_rows({head_rows(from, h), rows, head_rows(to, h)});
}

py::object rotary_embedding(Ops& ops, const py::object& heads, const py::object& positions,
                            const py::object& inv_freq, double theta, bool interleaved, float scale,
                            const py::object& out) {
  const ArrayPlace place = ops.place();
  const ImportedArray in("rotary_embedding.heads", heads, place);
  check_tensor("rotary_embedding.heads", in.view(), {{"T"}, {"H"}, {"D"}}, {DType::kF32});
  const auto& shape = in.view().shape;
  const OutputArray result("rotary_embedding.out", out, DType::kF32, {shape[0], shape[1], shape[2]},
                           place, heads);
  check_tensor("rotary_embedding.out", result.tensor(),
               {{"T", shape[0]}, {"H", shape[1]}, {"D", shape[2]}}, {DType::kF32});
  result.check_apart({in.view()}, /*can_be_first=*/true);
  const std::vector<int32_t> places = import_int32s("rotary_embedding.positions", positions);
  if (static_cast<int64_t>(places.size()) != shape[0]) {
    throw InvalidArgument(concat("rotary_embedding.positions: expected T=", shape[0],
                                 " entries, got ", places.size()));
  }
  const std::vector<float> frequencies =
      inv_freq.is_none() ? inverse_frequencies(theta, shape[2]) : import_frequencies(inv_freq);
  const int64_t width = 2 * static_cast<int64_t>(frequencies.size());
  ops.run(place, [&](Backend& backend) {
    const Tensor table(ops.workspace(shape[0] * width * size_bytes(DType::kF32)), DType::kF32,
                       {shape[0], width});
    backend.rotary_table(
        {.positions = places, .inv_freq = frequencies, .scale = scale, .cos_sin = table});
    if (in.view().data != result.tensor().data) copy_heads(backend, in.view(), result.tensor());
    backend.rotary({result.tensor(), table, interleaved});
  });
  return result.result(heads);
}

// Row-major [N, K] of f32, bf16 or f16; throws unless K fits the format.
void check_rows(const char* field, const ConstTensor& rows, const LinearFormat& format) {
  check_tensor(field, rows, {{"N"}, {"K"}}, {DType::kF32, DType::kBF16, DType::kF16});
  if (!rows.is_contiguous()) throw InvalidArgument(concat(field, ": expected contiguous rows"));
  check_fits(format, field, rows.shape[1]);
}

void read_quantized(const LinearFormat& format, const ConstTensor& rows, int64_t n,
                    const QuantizedRow& row) {
  const int64_t k = rows.shape[1];
  std::vector<float> values(static_cast<size_t>(k));
  convert_to_f32(rows, n * k, k, values.data());
  quantize_row(format, values.data(), k, row);
}

PackedWeight pack_quantized(Ops& ops, const py::object& weight, const std::string& quantization) {
  const ImportedArray rows("pack_linear.weight", weight);
  const LinearFormat& format = find_linear_format(quantization);
  check_rows("pack_linear.weight", rows.view(), format);
  const ConstTensor& view = rows.view();
  PackedWeight packed{{}, std::string(ops.name())};
  ops.run(ops.place(), [&](Backend& backend) {
    packed.weight = backend.pack_quantized(
        format, view.shape[0], view.shape[1],
        [&](int64_t n, const QuantizedRow& row) { read_quantized(format, view, n, row); });
  });
  return packed;
}

// (values [N, K] int8 less their zero point, scales [N, groups], minima likewise or None).
py::tuple quantize(const py::object& weight, const std::string& quantization) {
  const ImportedArray rows("quantize.weight", weight);
  const LinearFormat& format = find_linear_format(quantization);
  check_rows("quantize.weight", rows.view(), format);
  const int64_t n = rows.view().shape[0];
  const int64_t k = rows.view().shape[1];
  const int64_t groups = format.num_groups(k);
  const OutputArray values("quantize", py::none(), DType::kI8, {n, k});
  const OutputArray scales("quantize", py::none(), DType::kF32, {n, groups});
  const OutputArray mins("quantize", py::none(), DType::kF32, {n, groups});
  {
    const py::gil_scoped_release release;
    for (int64_t i = 0; i < n; ++i) {
      int8_t* q = values.tensor().as<int8_t>() + i * k;
      read_quantized(
          format, rows.view(), i,
          {q, scales.tensor().as<float>() + i * groups, mins.tensor().as<float>() + i * groups});
      for (int64_t j = 0; j < k; ++j) q[j] = static_cast<int8_t>(format.integer(q[j]));
    }
  }
  return py::make_tuple(values.result(weight), scales.result(weight),
                        format.has_min ? mins.result(weight) : py::none());
}

// A copy of a device's tensor, which the view is of from now on.
Array fetch(Memory& memory, ConstTensor& view) {
  if (!view.is_contiguous()) throw InvalidArgument("pack_linear.weight: expected contiguous rows");
  Array copy = Array::empty_like(view, view.dtype);
  memory.copy_to_host(copy.tensor().data, view.data, view.num_bytes());
  view.data = copy.tensor().data;
  return copy;
}

PackedWeight pack_linear(Ops& ops, const py::object& weight, std::optional<std::string> dtype,
                         std::optional<std::string> quantization) {
  if (quantization) return pack_quantized(ops, weight, *quantization);
  const bool is_list = py::isinstance<py::list>(weight) || py::isinstance<py::tuple>(weight);
  const py::list parts = is_list ? py::list(weight) : py::list(py::make_tuple(weight));
  const ArrayPlace place = ops.place();
  std::vector<ImportedArray> arrays;
  std::vector<ConstTensor> views;
  std::vector<bool> is_away;   // on the device: brought to the host, where weights are packed from
  std::vector<Array> on_host;  // their copies
  for (const py::handle part : parts) {
    is_away.push_back(place.is_cuda && is_on_cuda(part));
    arrays.emplace_back("pack_linear.weight", part, is_away.back() ? place : ArrayPlace{});
    views.push_back(arrays.back().view());
  }
  DType packed = !views.empty() && views[0].dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
  if (dtype) {
    if (*dtype != name(DType::kF32) && *dtype != name(DType::kBF16))
      throw InvalidArgument(
          concat("pack_linear.dtype: expected float32 or bfloat16, got '", *dtype, "'"));
    packed = *dtype == name(DType::kBF16) ? DType::kBF16 : DType::kF32;
  }
  PackedWeight result{{}, std::string(ops.name())};
  ops.run(place, [&](Backend& backend) {
    for (size_t i = 0; i < views.size(); ++i) {
      if (is_away[i]) on_host.push_back(fetch(backend.memory(), views[i]));
    }
    result.weight = backend.pack_linear(views, packed);
  });
  return result;
}

py::object linear(Ops& ops, const py::object& x, const PackedWeight& packed, const py::object& bias,
                  const py::object& out, bool accumulate) {
  if (packed.backend != ops.name()) {
    throw InvalidArgument(concat("linear.weight: expected a weight packed for backend '",
                                 ops.name(), "', got one for '", packed.backend,
                                 "'; pass the same backend to pack_linear"));
  }
  if (accumulate && out.is_none())
    throw InvalidArgument("linear.accumulate: expected out, the array that is added to, got none");
  const ArrayPlace place = ops.place();
  const ImportedArray in("linear.x", x, place);
  std::optional<ImportedArray> offset;
  if (!bias.is_none()) offset.emplace("linear.bias", bias, place);
  const ConstTensor offsets = offset ? offset->view() : ConstTensor{};
  const OutputArray result("linear.out", out, DType::kF32,
                           {in.view().shape[0], packed.weight.out_features}, place, x);
  result.check_apart({in.view(), offsets});
  ops.run(place, [&](Backend& backend) {
    backend.linear({in.view(), &packed.weight, offsets, result.tensor(), accumulate});
  });
  return result.result(x);
}

void check_distinct(std::vector<int64_t> slots) {
  std::sort(slots.begin(), slots.end());
  for (size_t i = 1; i < slots.size(); ++i) {
    if (slots[i] >= 0 && slots[i] == slots[i - 1])
      throw InvalidArgument(
          concat("store_kv.slots: expected different slots, got ", slots[i], " twice"));
  }
}

void store_kv(Ops& ops, const py::object& keys, const py::object& values,
              const py::object& key_cache, const py::object& value_cache, const py::object& slots) {
  const ArrayPlace place = ops.place();
  const ImportedArray new_keys("store_kv.keys", keys, place);
  const ImportedArray new_values("store_kv.values", values, place);
  const OutputArray to_keys("store_kv.key_cache", key_cache, DType::kF32, {}, place);
  const OutputArray to_values("store_kv.value_cache", value_cache, DType::kF32, {}, place);
  to_keys.check_apart({new_keys.view(), new_values.view(), to_values.tensor()});
  to_values.check_apart({new_keys.view(), new_values.view()});
  const std::vector<int64_t> places = import_int64s("store_kv.slots", slots);
  check_distinct(places);
  ops.run(place, [&](Backend& backend) {
    backend.store_kv({new_keys.view(),
                      new_values.view(),
                      places,
                      {cache_part_of(to_keys.tensor()), cache_part_of(to_values.tensor())}});
  });
}

// Attention only reads its cache; the ops share one struct for those that write.
Tensor as_cache(const ConstTensor& view) {
  Tensor tensor(const_cast<void*>(view.data), view.dtype, {});
  tensor.rank = view.rank;
  tensor.shape = view.shape;
  tensor.strides = view.strides;
  return cache_part_of(tensor);
}

// Kernels trust block tables. Checked as far as kv_lens reaches, the rest is never read.
void check_block_tables(const PagedAttentionArgs& args) {
  const int64_t num_blocks = args.cache.keys.shape[0];
  const int64_t block_size = args.cache.keys.shape[2];
  for (size_t b = 0; b < args.kv_lens.size(); ++b) {
    for (int64_t i = 0; i * block_size < args.kv_lens[b]; ++i) {
      const int32_t block = args.block_tables[b * static_cast<size_t>(args.max_blocks) + i];
      if (block < 0 || block >= num_blocks) {
        throw InvalidArgument(concat("paged_attention.block_tables: expected blocks in [0, N=",
                                     num_blocks, "), got ", block, " at [", b, ", ", i, "]"));
      }
    }
  }
}

struct AttentionOptions {
  std::optional<float> scale;
  int32_t window = 0;
  float soft_cap = 0;
  py::object sinks;
};

py::object paged_attention(Ops& ops, const py::object& q, const py::object& key_cache,
                           const py::object& value_cache, const py::object& block_tables,
                           const py::object& kv_lens, const py::object& query_starts,
                           const AttentionOptions& options, const py::object& out) {
  const ArrayPlace place = ops.place();
  const ImportedArray queries("paged_attention.q", q, place);
  const ImportedArray keys("paged_attention.key_cache", key_cache, place);
  const ImportedArray values("paged_attention.value_cache", value_cache, place);
  const BlockTables tables = import_block_tables("paged_attention.block_tables", block_tables);
  const std::vector<int32_t> lengths = import_int32s("paged_attention.kv_lens", kv_lens);
  std::vector<int32_t> starts;
  if (!query_starts.is_none()) {
    starts = import_int32s("paged_attention.query_starts", query_starts);
  } else {
    for (size_t b = 0; b <= lengths.size(); ++b) starts.push_back(static_cast<int32_t>(b));
  }
  const auto& shape = queries.view().shape;
  const float scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(shape[2])));
  const PagedKvCache cache{as_cache(keys.view()), as_cache(values.view())};
  const OutputArray result("paged_attention.out", out, DType::kF32,
                           {shape[0], shape[1], cache.values.shape[3]}, place, q);
  result.check_apart({queries.view(), keys.view(), values.view()});
  std::optional<ImportedArray> sinks;
  if (!options.sinks.is_none()) sinks.emplace("paged_attention.sinks", options.sinks, place);
  check_finite("paged_attention.scale", scale, 0);
  check_finite("paged_attention.soft_cap", options.soft_cap, 0);
  check_finite("paged_attention.window", static_cast<float>(options.window), 0);
  if (starts.empty()) throw InvalidArgument("paged_attention.query_starts: expected B + 1 entries");
  const PagedAttentionArgs args{.q = queries.view(),
                                .cache = cache,
                                .query_starts = starts,
                                .kv_lens = lengths,
                                .block_tables = tables.blocks,
                                .max_blocks = tables.max_blocks,
                                .scale = scale,
                                .window = options.window,
                                .soft_cap = options.soft_cap,
                                .sinks = sinks ? sinks->view() : ConstTensor(),
                                .out = result.tensor()};
  validate(args);
  check_block_tables(args);
  ops.run(place, [&](Backend& backend) { backend.paged_attention(args); });
  return result.result(q);
}

void check_row(const DrawSettings& draw) {
  if (!(draw.top_p > 0 && draw.top_p <= 1))
    throw InvalidArgument(concat("sample.top_p: expected a number in (0, 1], got ", draw.top_p));
  if (!(draw.min_p >= 0 && draw.min_p <= 1))
    throw InvalidArgument(concat("sample.min_p: expected a number in [0, 1], got ", draw.min_p));
}

struct SampleOptions {
  py::dict draw;  // fields of DrawSettings by name; as the others, one value or one a row
  py::object seed, position;
};

std::vector<SampleRow> make_rows(const SampleOptions& options, int64_t count) {
  std::vector<SampleRow> rows(static_cast<size_t>(count));
  for_each_draw_field([&]<class Value>(const DrawField<Value>& field) {
    if (!options.draw.contains(field.name)) return;
    const py::object given = options.draw[field.name];
    const auto values = import_row_values<Value>(concat("sample.", field.name), given, count);
    for (size_t s = 0; s < rows.size(); ++s) rows[s].draw.*field.member = values[s];
  });
  const auto seed = import_row_values<uint64_t>("sample.seed", options.seed, count);
  const auto position = import_row_values<int64_t>("sample.position", options.position, count);
  for (size_t s = 0; s < rows.size(); ++s) {
    rows[s].seed = seed[s];
    rows[s].position = position[s];
    check_row(rows[s].draw);
  }
  return rows;
}

py::object sample(Ops& ops, const py::object& logits, const SampleOptions& options) {
  const ArrayPlace place = ops.place();
  const ImportedArray in("sample.logits", logits, place);
  check_tensor("sample.logits", in.view(), {{"S"}, {"V"}}, {DType::kF32});
  const int64_t count = in.view().shape[0];
  const std::vector<SampleRow> rows = make_rows(options, count);
  std::vector<SampledRow> sampled(rows.size());
  ops.run(place, [&](Backend& backend) {
    backend.sample({.logits = in.view(), .rows = rows, .out = sampled});
  });
  const OutputArray result("sample", py::none(), DType::kI64, {count});
  for (size_t s = 0; s < sampled.size(); ++s) {
    if (!sampled[s].is_valid) {
      throw InvalidArgument(
          concat("sample.logits: expected finite numbers or -inf, and not only "
                 "-inf, in every row, got something else in row ",
                 s));
    }
    result.tensor().as<int64_t>()[s] = sampled[s].token_id;
  }
  const py::object ids = result.result(logits);
  return place.is_cuda && py::hasattr(ids, "to") ? ids.attr("to")(logits.attr("device")) : ids;
}

}  // namespace

void register_ops(py::module_& module) {
  module.def("quantize", &quantize, "weight"_a, "quantization"_a,
             "Integers, scales and minima of a weight: llmserve.ops.quantize.");
  py::class_<PackedWeight>(module, "LinearWeight",
                           "A linear layer's weight in the layout that its backend reads fastest.")
      .def("__repr__", &field_repr)
      .def_property_readonly("out_features",
                             [](const PackedWeight& self) { return self.weight.out_features; })
      .def_property_readonly("in_features",
                             [](const PackedWeight& self) { return self.weight.in_features; })
      .def_property_readonly("dtype",
                             [](const PackedWeight& self) { return name(self.weight.dtype); })
      .def_property_readonly("quantization",
                             [](const PackedWeight& self) -> py::object {
                               const LinearFormat* format = self.weight.format;
                               if (!format) return py::none();
                               return py::str(std::string(format->name));
                             })
      .def_property_readonly("num_bytes",
                             [](const PackedWeight& self) { return self.weight.num_bytes(); })
      .def_readonly("backend", &PackedWeight::backend);

  // Never deleted: that joins threads, which a forked child does not have.
  py::class_<Ops, std::unique_ptr<Ops, py::nodelete>> ops(module, "Ops");
  def_array_op(ops, "embedding", &Backend::embedding);
  def_array_op(ops, "rms_norm", &Backend::rms_norm);
  def_array_op(ops, "add_rms_norm", &Backend::add_rms_norm);
  def_array_op(ops, "layer_norm", &Backend::layer_norm);
  def_array_op(ops, "gated_activation", &Backend::gated_activation);
  def_array_op(ops, "gather_rows", &Backend::gather_rows);
  def_array_op(ops, "copy_blocks", &Backend::copy_blocks);
  ops.def(py::init<const std::string&, int32_t>(), "backend"_a, "num_threads"_a = 0)
      .def_property_readonly("description", &Ops::description)
      .def("rotary_embedding", &rotary_embedding, "heads"_a, "positions"_a, "inv_freq"_a, "theta"_a,
           "interleaved"_a, "scale"_a, "out"_a)
      .def("pack_linear", &pack_linear, "weight"_a, "dtype"_a, "quantization"_a)
      .def("linear", &linear, "x"_a, "weight"_a, "bias"_a, "out"_a, "accumulate"_a)
      .def("store_kv", &store_kv, "keys"_a, "values"_a, "key_cache"_a, "value_cache"_a, "slots"_a)
      .def(
          "paged_attention",
          [](Ops& self, const py::object& q, const py::object& key_cache,
             const py::object& value_cache, const py::object& block_tables,
             const py::object& kv_lens, const py::object& query_starts, std::optional<float> scale,
             int32_t window, float soft_cap, const py::object& sinks, const py::object& out) {
            return paged_attention(self, q, key_cache, value_cache, block_tables, kv_lens,
                                   query_starts, {scale, window, soft_cap, sinks}, out);
          },
          "q"_a, "key_cache"_a, "value_cache"_a, "block_tables"_a, "kv_lens"_a, "query_starts"_a,
          "scale"_a, "window"_a, "soft_cap"_a, "sinks"_a, "out"_a)
      .def(
          "sample",
          [](Ops& self, const py::object& logits, const py::dict& draw, const py::object& seed,
             const py::object& position) { return sample(self, logits, {draw, seed, position}); },
          "logits"_a, "draw"_a, "seed"_a, "position"_a);
}

}  // namespace llmserve
