#include "layers/weight_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>

#include "core/error.h"
#include "core/float_types.h"
#include "layers/stored_tensor.h"

namespace llmserve {
namespace {

float element(const ConstTensor& tensor, int64_t i) {
  if (tensor.dtype == DType::kF32) return tensor.as<float>()[i];
  const uint16_t bits = tensor.as<uint16_t>()[i];
  return tensor.dtype == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

// Every `step`th column of a matrix, row-major the other way round, in memory of their own.
ConstTensor transpose_into(Buffer& buffer, const ConstTensor& matrix, const IndexRange& taken,
                           int64_t step) {
  const int64_t rows = matrix.shape[0];
  buffer = Buffer(rows * taken.size * size_bytes(matrix.dtype));
  const auto transpose = [&](const auto* from, auto* to) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < taken.size; ++c)
        to[c * rows + r] = from[r * matrix.shape[1] + taken.begin + c * step];
  };
  if (size_bytes(matrix.dtype) == 4)
    transpose(matrix.as<uint32_t>(), reinterpret_cast<uint32_t*>(buffer.data()));
  else
    transpose(matrix.as<uint16_t>(), reinterpret_cast<uint16_t*>(buffer.data()));
  return ConstTensor(buffer.data(), matrix.dtype, {taken.size, rows});
}

// Columns of every `step`th row of a matrix, in memory of their own.
ConstTensor columns_into(Buffer& buffer, const ConstTensor& matrix, const IndexRange& taken,
                         int64_t step) {
  const int64_t element_bytes = size_bytes(matrix.dtype);
  const int64_t row_bytes = taken.size * element_bytes;
  const int64_t rows = (matrix.shape[0] + step - 1) / step;
  buffer = Buffer(rows * row_bytes);
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(buffer.data() + r * row_bytes,
                matrix.as<std::byte>() + (r * step * matrix.shape[1] + taken.begin) * element_bytes,
                static_cast<size_t>(row_bytes));
  return ConstTensor(buffer.data(), matrix.dtype, {rows, taken.size});
}

// A matrix in f32 that `buffer` holds, times a number, as `dtype` there.
ConstTensor multiply(Buffer& buffer, const ConstTensor& matrix, float factor, DType dtype) {
  auto* values = reinterpret_cast<float*>(buffer.data());
  for (int64_t i = 0; i < matrix.num_elements(); ++i) values[i] *= factor;
  if (dtype == DType::kF32) return matrix;
  Buffer rounded(matrix.num_elements() * size_bytes(dtype));
  for (int64_t i = 0; i < matrix.num_elements(); ++i)
    reinterpret_cast<uint16_t*>(rounded.data())[i] = f32_to_bf16(values[i]);
  buffer = std::move(rounded);
  return {buffer.data(), dtype, {matrix.shape[0], matrix.shape[1]}};
}

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::ostringstream out;
  out << "[";
  bool first = true;
  for (const int64_t dim : shape) {
    out << (first ? "" : ", ") << dim;
    first = false;
  }
  out << "]";
  return out.str();
}

// Some rows of a linear layer's own weight that are read as [K, N]: where it is quantized, that is
// along N. Other tensors of [K, N] are quantized along K, as their layers compute.
bool is_own_turned(const WeightPart& part, bool is_transposed) {
  return is_transposed && part.in_of > 0;
}

bool is_same_order(const std::shared_ptr<const std::vector<int32_t>>& a,
                   const std::shared_ptr<const std::vector<int32_t>>& b) {
  return a && b ? *a == *b : a == b;
}

// What a configuration says of the KV cache: compressed-tensors' kv_cache_scheme, ModelOpt's
// kv_cache_quant_algo. Empty: nothing.
std::string asked_cache(const JsonDocument& document) {
  const JsonNode config(document);
  const JsonNode scheme = config["kv_cache_scheme"];
  if (scheme.is_object())
    return concat(scheme["num_bits"].as_int_or(8, 1, 32), " bits, as kv_cache_scheme has it");
  const JsonNode nested = config["quantization"];  // in a file of its own
  const JsonNode algorithm = (nested.is_object() ? nested : config)["kv_cache_quant_algo"];
  return algorithm.is_null() ? ""
                             : concat(algorithm.as_string(), ", as kv_cache_quant_algo has it");
}

// A rank's share of K that is kept in blocks has whole ones.
void check_columns(const WeightPart& part, const QuantFormat& blocks, const IndexRange& columns) {
  if (columns.begin % blocks.block_elements == 0 && columns.size % blocks.block_elements == 0)
    return;
  throw NotSupported(concat("tensor \"", part.name, "\": elements ", columns.begin, " to ",
                            columns.begin + columns.size, " of a row, which is a rank's share, ",
                            "are no whole blocks of ", blocks.name, ", of ", blocks.block_elements,
                            " elements; use another number of ranks, or quantization='none'"));
}

}  // namespace

int64_t StackedRows::num_rows() const {
  int64_t sum = 0;
  for (const WeightPart& part : parts) sum += part.size;
  return sum;
}

std::string StackedRows::name() const {
  std::ostringstream out;
  for (const WeightPart& part : parts) {
    out << (&part == parts.data() ? "" : " + ") << part.name;
    if (part.num_matrices > 0) out << "[" << part.matrix << "]";
    out << "[" << part.begin << ":" << part.begin + part.size * part.step;
    if (part.step > 1) out << ":" << part.step;
    out << "]";
  }
  if (columns.size != in_features)
    out << " columns " << columns.begin << ":" << columns.begin + columns.size;
  if (is_transposed) out << " transposed";
  return out.str();
}

const TensorEntry* WeightSource::look_up(const std::string& name) const {
  const TensorEntry* entry = checkpoint_.find(name);
  return entry ? entry : checkpoint_.find(name.substr(name.find('.') + 1));
}

const TensorEntry& WeightSource::find(const std::string& name,
                                      std::initializer_list<int64_t> shape) {
  if (!checkpoint_.has_tensors()) return imagine(shape);
  const TensorEntry* entry = look_up(name);
  if (!entry)
    throw CorruptFile(concat(
        checkpoint_.path(), ": the tensor \"", name, "\" ", shape_text(shape),
        " is absent from the checkpoint, which has ", checkpoint_.tensors().size(), " tensors; ",
        checkpoint_.format() == "gguf" ? "the file may be of an architecture that is not supported"
                                       : "config.json and weights may belong to different models"));
  if (!has_float_values(checkpoint_, *entry) ||
      !std::equal(shape.begin(), shape.end(), entry->shape.begin(), entry->shape.end()))
    throw CorruptFile(concat(checkpoint_.file(*entry)->path().string(), ": tensor \"", name,
                             "\": expected floats ", shape_text(shape), ", as ",
                             checkpoint_.format() == "gguf" ? "the file's metadata" : "config.json",
                             " has it, got ", checkpoint_.describe(*entry)));
  refuse_scaled_f8(*entry);
  used_.insert(entry->name);
  return *entry;
}

// 8-bit floats are read as the numbers that they are; with scales beside them they are something
// else, which nobody here multiplies in.
void WeightSource::refuse_scaled_f8(const TensorEntry& entry) const {
  if (entry.dtype != DType::kF8E4M3 && entry.dtype != DType::kF8E5M2) return;
  for (const std::string_view suffix : {"_scale", "_scale_inv", "_scale_2"}) {
    const TensorEntry* scale = checkpoint_.find(concat(entry.name, suffix));
    if (scale)
      throw NotSupported(concat(checkpoint_.file(entry)->path().string(), ": tensor \"", entry.name,
                                "\" is ", checkpoint_.describe(entry), " scaled by \"", scale->name,
                                "\"; FP8 checkpoints with scales are not supported: use the "
                                "original in bfloat16"));
  }
}

// What a checkpoint of the dtype that is asked for would have.
const TensorEntry& WeightSource::imagine(std::initializer_list<int64_t> shape) {
  TensorEntry& entry = imagined_.emplace_back(
      TensorEntry{.shape = shape, .dtype = format_.dtype, .num_bytes = size_bytes(format_.dtype)});
  for (const int64_t dim : shape) entry.num_bytes *= dim;
  return entry;
}

const LinearFormat* WeightSource::kept_blocks(const TensorEntry& entry, bool is_transposed,
                                              float factor) const {
  const TensorStorage& storage = checkpoint_.storage(entry);
  const bool is_kept = format_.keeps_blocks && !format_.integers && storage.blocks &&
                       storage.blocks->integers && storage.added == 0 && !is_transposed &&
                       (factor == 1.0f || storage.blocks->integers->has_row_scale) &&
                       backend_.can_run(*storage.blocks->integers);
  return is_kept ? storage.blocks->integers : nullptr;
}

float WeightSource::find_factor(const WeightPart& part, const TensorEntry& entry) {
  constexpr std::string_view kSuffix = ".weight";
  if (checkpoint_.format() != "gguf" || !checkpoint_.storage(entry).blocks ||
      !part.name.ends_with(kSuffix))
    return 1.0f;
  const std::string module = part.name.substr(0, part.name.size() - kSuffix.size());
  used_.insert(module + ".input_scale");
  const TensorEntry* scale = checkpoint_.find(module + ".scale");
  if (!scale) return 1.0f;
  used_.insert(scale->name);
  const int64_t count = std::max<int64_t>(1, part.num_matrices);
  if (scale->dtype != DType::kF32 || scale->num_bytes != count * size_bytes(DType::kF32))
    throw CorruptFile(concat(checkpoint_.file(*scale)->path().string(), ": tensor \"", scale->name,
                             "\": expected ", count, " of float32, got ",
                             checkpoint_.describe(*scale)));
  float factor = 0;
  std::memcpy(&factor, checkpoint_.file(*scale)->bytes().data() + scale->offset + 4 * part.matrix,
              sizeof(factor));
  if (!std::isfinite(factor))
    throw CorruptFile(concat(checkpoint_.file(*scale)->path().string(), ": tensor \"", scale->name,
                             "\": element ", part.matrix, " is ",
                             std::isnan(factor) ? "NaN" : "infinite", "; scales must be finite"));
  return factor;
}

std::shared_ptr<const QuantizedWeight> WeightSource::find_quantized(const ModuleRequest& request) {
  if (!quantization_) return nullptr;
  ModuleTensors tensors(checkpoint_, request, used_);
  return quantization_->find(tensors);
}

const LinearFormat* WeightSource::kept_format(const QuantizedWeight& weight,
                                              const IndexRange& columns,
                                              int64_t in_features) const {
  const LinearFormat* format = weight.format();
  // Host backends take a last group that is shorter, and columns in another order.
  const bool is_plain =
      format && !weight.input_order() && in_features % format->group_elements(in_features) == 0;
  const int64_t unit = format && !weight.input_order() ? input_unit(format) : 0;
  const bool is_whole = columns.size == in_features ||
                        (unit > 0 && columns.begin % unit == 0 && columns.size % unit == 0);
  const bool is_kept = format_.keeps_blocks && !format_.integers && format &&
                       backend_.can_run(*format) && is_whole &&
                       (is_plain || backend_.memory().is_host());
  return is_kept ? format : nullptr;
}

int64_t WeightSource::input_unit(const LinearFormat* format) {
  if (!format) return 1;
  // Outliers are added to what the output holds, and no longer to the product.
  if (format->outlier_threshold > 0) return 0;
  return format->group_size == 0 ? 1 : format->group_size << format->scale_shift;
}

int64_t WeightSource::input_unit(const WeightPart& part, int64_t in_features, bool is_transposed) {
  int64_t unit = 1;
  for (const StackedRows& rows : stack({&part, 1}, in_features, is_transposed, {})) {
    const int64_t own =
        rows.input_order ? 0 : input_unit(rows.format ? rows.format : format_.integers);
    unit = std::lcm(unit, own);  // 0 stays
    if (rows.format && !rows.quantized[0])
      unit = std::lcm(unit, checkpoint_.storage(*rows.entries[0]).blocks->block_elements);
  }
  return unit;
}

const TensorEntry& WeightSource::find(const WeightPart& part, int64_t in_features,
                                      bool is_transposed) {
  const int64_t rows = is_transposed ? in_features : part.num_rows();
  const int64_t columns = is_transposed ? part.num_rows() : in_features;
  if (part.is_vector) return find(part.name, {in_features});
  return part.num_matrices == 0 ? find(part.name, {rows, columns})
                                : find(part.name, {part.num_matrices, rows, columns});
}

std::vector<StackedRows> WeightSource::stack(std::span<const WeightPart> parts, int64_t in_features,
                                             bool is_transposed, const Shard& shard,
                                             bool keeps_blocks) {
  const IndexRange columns =
      shard.axis == ShardAxis::kInput ? shard.of(in_features) : IndexRange{0, in_features};
  std::vector<StackedRows> stacks;
  for (WeightPart& part : rows_of(parts, shard)) {
    const int64_t width = part.in_of == 0 ? in_features : part.in_of;
    const IndexRange taken{part.in_begin + columns.begin, columns.size};
    std::shared_ptr<const QuantizedWeight> quantized;
    const bool is_turned = is_own_turned(part, is_transposed);
    if (!part.is_vector)
      quantized = find_quantized({.name = part.name,
                                  .rows = is_turned ? width : part.num_rows(),
                                  .columns = is_turned ? part.num_rows() : width,
                                  .num_matrices = part.num_matrices,
                                  .is_transposed = is_transposed && !is_turned});
    const TensorEntry* entry = nullptr;
    const LinearFormat* format = nullptr;
    float factor = 1.0f;
    if (quantized) {
      entry =
          checkpoint_.has_tensors() ? quantized->entries()[0] : &imagine({part.num_rows(), width});
      if (keeps_blocks && !is_turned) format = kept_format(*quantized, taken, width);
    } else {
      entry = &find(part, width, is_transposed);
      factor = find_factor(part, *entry);
      if (keeps_blocks) format = kept_blocks(*entry, is_transposed, factor);
      if (format) check_columns(part, *checkpoint_.storage(*entry).blocks, taken);
    }
    const auto order = format && quantized ? quantized->input_order() : nullptr;
    if (stacks.empty() || stacks.back().format != format ||
        !is_same_order(stacks.back().input_order, order))
      stacks.push_back({.in_features = width,
                        .columns = taken,
                        .is_transposed = is_transposed,
                        .format = format,
                        .input_order = order});
    check_internal(stacks.back().columns.begin == taken.begin, "a weight's parts have one K");
    stacks.back().parts.push_back(std::move(part));
    stacks.back().entries.push_back(entry);
    stacks.back().quantized.push_back(std::move(quantized));
    stacks.back().factors.push_back(factor);
  }
  return stacks;
}

StackedRows WeightSource::stack_vectors(std::span<const WeightPart> parts, const Shard& shard) {
  StackedRows rows;
  for (WeightPart& part : rows_of(parts, shard)) {
    const TensorEntry* entry;
    if (part.num_matrices > 0)
      entry = &find(part.name, {part.num_matrices, part.num_rows()});
    else if (part.width > 0)
      entry = &find(part.name, {part.num_rows(), part.width});
    else
      entry = &find(part.name, {part.num_rows()});
    rows.entries.push_back(entry);
    rows.parts.push_back(std::move(part));
    rows.quantized.push_back(nullptr);
    rows.factors.push_back(1.0f);
  }
  return rows;
}

std::vector<std::string> WeightSource::notes() const {
  std::vector<std::string> notes;
  if (!quantization_ && checkpoint_.format() != "gguf") return notes;
  int64_t num_activation_scales = 0;
  int64_t num_cache_scales = 0;
  for (const TensorEntry& entry : checkpoint_.tensors()) {
    num_activation_scales += entry.name.ends_with(".input_scale") ||
                             entry.name.ends_with(".input_global_scale") ||
                             entry.name.ends_with(".activation_scale");
    num_cache_scales += QuantizationMethod::is_cache_scale(entry.name);
  }
  if (num_activation_scales > 0)
    notes.push_back(concat(num_activation_scales,
                           " scales of activations in the file are not used: a token's "
                           "activations are rounded by their own, where they are rounded"));
  if (num_cache_scales > 0)
    notes.push_back(concat(num_cache_scales,
                           " scales of keys and values in the file are not used: an fp8 KV cache "
                           "has scales of each token"));
  const std::string cache = quantization_ ? asked_cache(*checkpoint_.quantization()) : "";
  if (!cache.empty())
    notes.push_back(concat("the file was made for a KV cache in ", cache,
                           ": pass kv_cache_dtype='fp8' for such a one"));
  return notes;
}

std::vector<std::string> WeightSource::unused() const {
  std::vector<std::string> names;
  for (const TensorEntry& entry : checkpoint_.tensors())
    if (!used_.contains(entry.name) && !(quantization_ && quantization_->is_spare(entry.name)))
      names.push_back(entry.name);
  return names;
}

void WeightSource::check_finite(const TensorEntry& entry, const ConstTensor& tensor,
                                int64_t first) const {
  const int64_t i = backend_.first_non_finite(tensor);
  if (i < 0) return;
  throw CorruptFile(concat(checkpoint_.file(entry)->path().string(), ": tensor \"", entry.name,
                           "\": element ", first + i, " of ", checkpoint_.describe(entry), " is ",
                           std::isnan(element(tensor, i)) ? "NaN" : "infinite",
                           "; weights must be finite"));
}

ConstTensor WeightSource::values(const StackedRows& rows, size_t i, DType dtype,
                                 Buffer& buffer) const {
  if (rows.quantized[i]) return expand(rows, i, dtype, buffer);
  const TensorEntry& entry = *rows.entries[i];
  const WeightPart& part = rows.parts[i];
  RowRange stored{part.row(0), (part.size - 1) * part.step + 1};
  if (part.is_vector) stored = {};
  if (rows.is_transposed)
    stored = {part.matrix * entry.shape[entry.shape.size() - 2] + rows.columns.begin,
              rows.columns.size};
  const float factor = rows.factors[i];
  ConstTensor view = host_values(checkpoint_, entry, factor == 1.0f ? dtype : DType::kF32, backend_,
                                 buffer, stored);
  if (factor != 1.0f) view = multiply(buffer, view, factor, dtype);
  check_finite(entry, view, stored.begin * *(entry.shape.end() - 1));
  if (part.is_vector) return {view.data, view.dtype, {1, view.shape[0]}};
  if (!rows.is_transposed && part.step == 1 && rows.columns.size == view.shape[1]) return view;
  Buffer taken;
  view = rows.is_transposed ? transpose_into(taken, view, {part.begin, part.size}, part.step)
                            : columns_into(taken, view, rows.columns, part.step);
  buffer = std::move(taken);
  return view;
}

ConstTensor WeightSource::expand(const StackedRows& rows, size_t i, DType dtype,
                                 Buffer& buffer) const {
  constexpr int64_t kRowsAtOnce = 64;  // whole strips of every layout
  const WeightPart& part = rows.parts[i];
  const QuantizedWeight& weight = *rows.quantized[i];
  const int64_t k = rows.columns.size;
  buffer = Buffer(part.size * k * size_bytes(dtype));
  std::vector<float> turned;  // [K, N] of what is stored as [K, N]
  if (is_own_turned(part, rows.is_transposed)) {
    turned.resize(static_cast<size_t>(k * part.size));
    for (int64_t j = 0; j < k; ++j)
      weight.values(rows.columns.begin + j, {part.begin, part.size}, turned.data() + j * part.size);
  }
  backend_.run_on_host_threads(part.size, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    std::vector<float> floats(dtype == DType::kF32 ? 0 : static_cast<size_t>(k));
    for (int64_t n = begin; n < end; ++n) {
      std::byte* to = buffer.data() + n * k * size_bytes(dtype);
      float* values = dtype == DType::kF32 ? reinterpret_cast<float*>(to) : floats.data();
      if (turned.empty())
        weight.values(part.row(n), rows.columns, values);
      else
        for (int64_t j = 0; j < k; ++j) values[j] = turned[static_cast<size_t>(j * part.size + n)];
      if (dtype == DType::kF32) continue;
      auto* rounded = reinterpret_cast<uint16_t*>(to);
      for (int64_t j = 0; j < k; ++j) rounded[j] = f32_to_bf16(floats[static_cast<size_t>(j)]);
    }
  });
  const ConstTensor view(buffer.data(), dtype, {part.size, k});
  const int64_t bad = backend_.first_non_finite(view);
  if (bad >= 0)
    throw CorruptFile(
        concat(checkpoint_.path(), ": tensor \"", rows.entries[i]->name, "\": the scale of row ",
               part.row(bad / k), ", column ", rows.columns.begin + bad % k, " makes the weight ",
               std::isnan(element(view, bad)) ? "NaN" : "infinite", "; weights must be finite"));
  return view;
}

bool WeightSource::unpack(const StackedRows& rows, size_t i, int64_t n,
                          const QuantizedRow& to) const {
  if (rows.quantized[i]) return rows.quantized[i]->unpack(rows.parts[i].row(n), rows.columns, to);
  const bool is_good =
      unpack_row(checkpoint_, *rows.entries[i], rows.parts[i].row(n), rows.columns, to);
  if (rows.factors[i] != 1.0f) *to.row_scale *= rows.factors[i];
  return is_good;
}

ConstTensor WeightSource::values(const TensorEntry& entry, DType dtype, Buffer& buffer,
                                 int64_t row) const {
  const ConstTensor view = row < 0
                               ? host_values(checkpoint_, entry, dtype, backend_, buffer)
                               : host_values(checkpoint_, entry, dtype, backend_, buffer, {row, 1});
  check_finite(entry, view, std::max<int64_t>(0, row) * *(entry.shape.end() - 1));
  return view;
}

ConstTensor WeightSource::blocks(const TensorEntry& entry) const {
  const int64_t row = first_non_finite_row(checkpoint_, entry, backend_);
  if (row >= 0) {
    Buffer buffer;
    check_finite(entry, host_values(checkpoint_, entry, DType::kF32, backend_, buffer, {row, 1}),
                 row * entry.shape[1]);
  }
  return block_rows(checkpoint_, entry);
}

void WeightSource::release(const StackedRows& rows) const {
  for (size_t i = 0; i < rows.parts.size(); ++i) {
    const WeightPart& part = rows.parts[i];
    // Of several matrices, the one's share of each tensor.
    const auto release_entry = [&](const TensorEntry& entry) {
      const int64_t num_bytes = entry.num_bytes / std::max<int64_t>(1, part.num_matrices);
      checkpoint_.file(entry)->release(entry.offset + part.matrix * num_bytes, num_bytes);
    };
    if (!rows.quantized[i]) {
      release_entry(*rows.entries[i]);
      continue;
    }
    for (const TensorEntry* entry : rows.quantized[i]->entries()) release_entry(*entry);
  }
}

}  // namespace llmserve
