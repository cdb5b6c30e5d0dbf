#include "layers/weight_loader.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <sstream>

#include "core/clock.h"
#include "core/error.h"
#include "core/float_types.h"
#include "kernels/host_ops.h"
#include "layers/stored_tensor.h"

namespace llmserve {
namespace {

// The same tensor, which is in host memory, in aligned memory of its own.
ConstTensor copy_into(Buffer& buffer, const ConstTensor& tensor, Memory& memory) {
  buffer = Buffer(tensor.num_bytes(), memory);
  memory.copy_from_host(buffer.data(), tensor.data, tensor.num_bytes());
  ConstTensor copy = tensor;
  copy.data = buffer.data();
  return copy;
}

float element(const ConstTensor& tensor, int64_t i) {
  if (tensor.dtype == DType::kF32) return tensor.as<float>()[i];
  const uint16_t bits = tensor.as<uint16_t>()[i];
  return tensor.dtype == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

void quantize_row(const LinearFormat& format, const ConstTensor& values, const QuantizedRow& row) {
  const int64_t k = values.num_elements();
  if (values.dtype == DType::kF32) return quantize_row(format, values.as<float>(), k, row);
  thread_local std::vector<float> floats;
  floats.resize(static_cast<size_t>(k));
  convert_to_f32(values, 0, k, floats.data());
  quantize_row(format, floats.data(), k, row);
}

// Which of some stacked matrices a row is in, and where there.
class RowStarts {
 public:
  template <class Matrices, class NumRows>
  RowStarts(const Matrices& matrices, NumRows num_rows) {
    for (const auto& matrix : matrices) starts_.push_back(starts_.back() + num_rows(matrix));
  }
  std::pair<size_t, int64_t> find(int64_t row) const {
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), row);
    const size_t matrix = static_cast<size_t>(after - starts_.begin()) - 1;
    return {matrix, row - starts_[matrix]};
  }

 private:
  std::vector<int64_t> starts_{0};
};

// The same matrix row-major the other way round, in memory of its own.
ConstTensor transpose_into(Buffer& buffer, const ConstTensor& matrix) {
  buffer = Buffer(matrix.num_bytes());
  const int64_t rows = matrix.shape[0];
  const int64_t columns = matrix.shape[1];
  const auto turn = [&](const auto* from, auto* to) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
  };
  if (size_bytes(matrix.dtype) == 4)
    turn(matrix.as<uint32_t>(), reinterpret_cast<uint32_t*>(buffer.data()));
  else
    turn(matrix.as<uint16_t>(), reinterpret_cast<uint16_t*>(buffer.data()));
  return ConstTensor(buffer.data(), matrix.dtype, {columns, rows});
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

// Tells the weight from all others that a checkpoint can be made into.
std::string stacked_name(std::span<const WeightLoader::Part> parts, bool is_transposed) {
  std::ostringstream out;
  for (const WeightLoader::Part& part : parts)
    out << (&part == parts.data() ? "" : " + ") << part.name << "[" << part.begin << ":"
        << part.begin + part.size << "]";
  if (is_transposed) out << " transposed";
  return out.str();
}

// Older exports carry rotary frequencies and causal masks.
bool follows_from_config(std::string_view name) {
  static constexpr std::string_view kEndings[] = {"rotary_emb.inv_freq", ".attn.bias",
                                                  ".attn.masked_bias", ".attention.bias",
                                                  ".attention.masked_bias"};
  return std::any_of(std::begin(kEndings), std::end(kEndings),
                     [&](std::string_view ending) { return name.ends_with(ending); });
}

}  // namespace

std::string_view name(WeightGroup group) {
  static constexpr std::array<std::string_view, kNumWeightGroups> kNames{"embedding", "attention",
                                                                         "mlp", "norm", "lm_head"};
  return kNames[static_cast<size_t>(group)];
}

WeightLoader::WeightLoader(const Checkpoint& checkpoint, Backend& backend,
                           const WeightFormat& format, bool load, PackedWeights* packed,
                           std::vector<DeferredWeight>* deferred)
    : checkpoint_(checkpoint),
      backend_(backend),
      format_(format),
      load_(load),
      packed_(packed),
      deferred_(deferred) {
  if (format.integers && !backend.can_run(*format.integers))
    throw NotSupported(concat("quantization '", format.integers->name,
                              "' is not supported on device '", backend.name(),
                              "'; use device='cpu', or no quantization"));
}

int64_t WeightReport::total_bytes() const {
  return std::accumulate(group_bytes.begin(), group_bytes.end(), int64_t{0});
}

const TensorEntry* WeightLoader::look_up(const std::string& name) const {
  const TensorEntry* entry = checkpoint_.find(name);
  return entry ? entry : checkpoint_.find(name.substr(name.find('.') + 1));
}

const TensorEntry& WeightLoader::find(const std::string& name,
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
                             "\": expected floats ", shape_text(shape),
                             ", as config.json has it, got ", checkpoint_.describe(*entry)));
  refuse_scaled_f8(*entry);
  used_.insert(entry->name);
  return *entry;
}

// 8-bit floats are read as the numbers that they are; with scales beside them they are something
// else, which nobody here multiplies in.
void WeightLoader::refuse_scaled_f8(const TensorEntry& entry) const {
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
const TensorEntry& WeightLoader::imagine(std::initializer_list<int64_t> shape) {
  check_internal(!load_, "weights are loaded from files");
  imagined_ = {.shape = shape, .dtype = format_.dtype, .num_bytes = size_bytes(format_.dtype)};
  for (const int64_t dim : shape) imagined_.num_bytes *= dim;
  return imagined_;
}

void WeightLoader::check_finite(const TensorEntry& entry, const ConstTensor& tensor,
                                int64_t first) {
  const int64_t i = backend_.first_non_finite(tensor);
  if (i < 0) return;
  throw CorruptFile(concat(checkpoint_.file(entry)->path().string(), ": tensor \"", entry.name,
                           "\": element ", first + i, " of ", checkpoint_.describe(entry), " is ",
                           std::isnan(element(tensor, i)) ? "NaN" : "infinite",
                           "; weights must be finite"));
}

void WeightLoader::check_finite_blocks(const TensorEntry& entry) {
  const int64_t row = first_non_finite_row(checkpoint_, entry, backend_);
  if (row < 0) return;
  Buffer values;
  check_finite(entry, host_values(checkpoint_, entry, DType::kF32, backend_, values, {row, 1}),
               row * entry.shape[1]);
}

void WeightLoader::count(WeightGroup group, int64_t num_bytes) {
  group_bytes_[static_cast<size_t>(group)] += num_bytes;
}

const QuantFormat* WeightLoader::kept_blocks(const TensorEntry& entry, bool is_transposed) const {
  const TensorStorage& storage = checkpoint_.storage(entry);
  const bool is_kept = format_.keeps_blocks && !format_.integers && storage.blocks &&
                       storage.blocks->integers && storage.added == 0 && !is_transposed &&
                       backend_.can_run(*storage.blocks->integers);
  return is_kept ? storage.blocks : nullptr;
}

LinearWeight WeightLoader::plan_linear(WeightGroup group, Parts parts, int64_t in_features,
                                       const LinearFormat* integers) {
  LinearWeight weight;
  for (const Part& part : parts) weight.out_features += part.size;
  weight.in_features = in_features;
  weight.dtype = format_.dtype;
  weight.format = integers;
  if (!integers) {
    count(group, backend_.packed_bytes(weight.out_features, in_features, weight.dtype));
    return weight;
  }
  check_fits(*integers, parts[0].name, in_features);
  count(group, backend_.packed_bytes(weight.out_features, in_features, *integers));
  if (std::find(integers_.begin(), integers_.end(), integers) == integers_.end())
    integers_.push_back(integers);
  activation_bytes_ =
      std::max(activation_bytes_, quantized_activation_bytes(*integers, in_features));
  return weight;
}

bool WeightLoader::take_packed(const std::string& name, LinearWeight& planned) {
  if (!packed_) return false;
  const int64_t n = planned.out_features;
  const int64_t k = planned.in_features;
  const int64_t num_bytes = planned.format ? backend_.packed_bytes(n, k, *planned.format)
                                           : backend_.packed_bytes(n, k, planned.dtype);
  if (packed_->file) planned.mapped = packed_->file->find(name, num_bytes);
  if (planned.mapped.empty()) {
    packed_->is_from_file = false;
    return false;
  }
  planned.file = packed_->file->file();
  mapped_bytes_ += num_bytes;
  return true;
}

LinearWeight WeightLoader::pack_rows(const LinearWeight& planned,
                                     std::span<const ConstTensor> views) {
  const Stopwatch packing(pack_us_);
  if (!planned.format) return backend_.pack_linear(views, planned.dtype);
  const RowStarts starts(views, [](const ConstTensor& view) { return view.shape[0]; });
  return backend_.pack_quantized(*planned.format, planned.out_features, planned.in_features,
                                 [&](int64_t n, const QuantizedRow& row) {
                                   const auto [part, within] = starts.find(n);
                                   quantize_row(*planned.format, views[part].slice(0, within, 1),
                                                row);
                                 });
}

LinearWeight WeightLoader::pack_values(const LinearWeight& planned, Parts parts, Entries entries,
                                       bool is_transposed) {
  std::vector<ConstTensor> views;
  std::vector<Buffer> copies(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const Stopwatch reading(read_us_);
    const RowRange rows = is_transposed ? RowRange{} : RowRange{parts[i].begin, parts[i].size};
    ConstTensor view =
        host_values(checkpoint_, *entries[i], format_.dtype, backend_, copies[i], rows);
    check_finite(*entries[i], view, parts[i].begin * planned.in_features);
    if (is_transposed) {
      Buffer turned;
      view = transpose_into(turned, view);
      copies[i] = std::move(turned);
    }
    views.push_back(view);
  }
  const bool is_in_file =
      std::ranges::none_of(copies, [](const Buffer& copy) { return copy.data() != nullptr; });
  return deferred_ && !planned.format && is_in_file ? defer_rows(planned, views, parts, entries)
                                                    : pack_rows(planned, views);
}

LinearWeight WeightLoader::defer_rows(const LinearWeight& planned,
                                      std::span<const ConstTensor> views, Parts parts,
                                      Entries entries) {
  LinearWeight weight = backend_.defer_linear(views, planned.dtype);
  if (!weight.rows) return weight;
  DeferredWeight& deferred = deferred_->emplace_back(weight.rows);
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t row_bytes = planned.in_features * size_bytes(entries[i]->dtype);
    deferred.add_source(checkpoint_.file(*entries[i]),
                        entries[i]->offset + parts[i].begin * row_bytes, parts[i].size * row_bytes);
  }
  return weight;
}

LinearWeight WeightLoader::pack_blocks(const LinearWeight& planned, Parts parts, Entries entries) {
  const RowStarts starts(parts, [](const Part& part) { return part.size; });
  std::atomic<bool> is_finite{true};
  const auto read = [&](int64_t n, const QuantizedRow& row) {
    const auto [part, within] = starts.find(n);
    if (!unpack_row(checkpoint_, *entries[part], parts[part].begin + within, row))
      is_finite = false;
  };
  LinearWeight weight;
  {
    const Stopwatch packing(pack_us_);
    weight =
        backend_.pack_quantized(*planned.format, planned.out_features, planned.in_features, read);
  }
  if (is_finite) return weight;
  // Some scale is not: the values say which, in the words of every other tensor.
  pack_values({.out_features = planned.out_features,
               .in_features = planned.in_features,
               .dtype = DType::kF32},
              parts, entries, /*is_transposed=*/false);
  throw CorruptFile(concat(checkpoint_.path(), ": tensor \"", parts[0].name,
                           "\" has blocks whose scale is not finite"));
}

std::vector<LinearWeight> WeightLoader::linear(WeightGroup group, const std::vector<Part>& parts,
                                               int64_t in_features, bool is_transposed) {
  std::vector<const TensorEntry*> entries;
  std::vector<const QuantFormat*> blocks;
  for (const Part& part : parts) {
    check_internal(!is_transposed || part.of == 0, "transposed tensors are taken whole");
    entries.push_back(is_transposed ? &find(part.name, {in_features, part.size})
                                    : &find(part.name, {part.num_rows(), in_features}));
    blocks.push_back(kept_blocks(*entries.back(), is_transposed));
  }
  std::vector<LinearWeight> weights;
  for (size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
    while (end < parts.size() && blocks[end] == blocks[begin]) ++end;
    const Parts some = Parts(parts).subspan(begin, end - begin);
    const Entries from = Entries(entries).subspan(begin, end - begin);
    const LinearFormat* integers = blocks[begin] ? blocks[begin]->integers : format_.integers;
    LinearWeight planned = plan_linear(group, some, in_features, integers);
    const std::string name = stacked_name(some, is_transposed);
    if (take_packed(name, planned) || !load_)
      weights.push_back(std::move(planned));
    else if (blocks[begin])
      weights.push_back(pack_blocks(planned, some, from));
    else
      weights.push_back(pack_values(planned, some, from, is_transposed));
    if (packed_)
      packed_->tensors.push_back(
          {name, {weights.back().bytes(), static_cast<size_t>(weights.back().num_bytes())}});
    if (!load_ || weights.back().rows) continue;
    for (const TensorEntry* entry : from)
      checkpoint_.file(*entry)->release(entry->offset, entry->num_bytes);
  }
  return weights;
}

VectorWeight WeightLoader::vector(WeightGroup group, const std::vector<Part>& parts) {
  std::vector<float> values;
  for (const Part& part : parts) {
    const int64_t row = part.width == 0 ? 1 : part.width;
    const TensorEntry& entry = part.width == 0 ? find(part.name, {part.num_rows()})
                                               : find(part.name, {part.num_rows(), part.width});
    count(group, part.size * row * size_bytes(DType::kF32));
    if (!load_) continue;
    const Stopwatch reading(read_us_);
    Buffer copy;
    const ConstTensor view = host_values(checkpoint_, entry, DType::kF32, backend_, copy);
    check_finite(entry, view);
    for (int64_t i = part.begin * row; i < (part.begin + part.size) * row; ++i)
      values.push_back(element(view, i));
  }
  VectorWeight weight;
  if (!load_) return weight;
  const int64_t num_bytes = std::ssize(values) * size_bytes(DType::kF32);
  weight.size = std::ssize(values);
  weight.data = Buffer(num_bytes, backend_.memory());
  backend_.memory().copy_from_host(weight.data.data(), values.data(), num_bytes);
  return weight;
}

TableWeight WeightLoader::table(WeightGroup group, const std::string& name, int64_t rows,
                                int64_t columns) {
  const TensorEntry& entry = find(name, {rows, columns});
  TableWeight table;
  if (backend_.memory().is_host()) table.blocks = checkpoint_.storage(entry).blocks;
  count(group, table.blocks ? entry.num_bytes : value_bytes(checkpoint_, entry, format_.dtype));
  const bool is_mapped =
      table.blocks || !checkpoint_.has_tensors() || is_in_place(checkpoint_, entry);
  if (is_mapped && backend_.memory().is_host()) mapped_bytes_ += entry.num_bytes;
  if (!load_) return table;
  const Stopwatch reading(read_us_);
  if (table.blocks) {
    table.view = block_rows(checkpoint_, entry);
    check_finite_blocks(entry);
  } else {
    table.view = host_values(checkpoint_, entry, format_.dtype, backend_, table.copy);
    check_finite(entry, table.view);
  }
  if (!backend_.memory().is_host()) {
    Buffer on_device;
    table.view = copy_into(on_device, table.view, backend_.memory());
    table.copy = std::move(on_device);
  } else if (!table.copy.data()) {
    table.file = checkpoint_.file(entry);
  }
  checkpoint_.file(entry)->release(entry.offset, entry.num_bytes);
  return table;
}

WeightReport WeightLoader::report() const {
  WeightReport report;
  report.group_bytes = group_bytes_;
  report.mapped_bytes = mapped_bytes_;
  report.integers = integers_;
  report.activation_bytes = activation_bytes_;
  report.read_us = read_us_;
  report.pack_us = pack_us_;
  for (const TensorEntry& entry : checkpoint_.tensors()) {
    if (!used_.contains(entry.name) && !follows_from_config(entry.name))
      report.unused_tensors.push_back(entry.name);
  }
  return report;
}

}  // namespace llmserve
