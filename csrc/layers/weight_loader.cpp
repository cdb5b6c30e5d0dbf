#include "layers/weight_loader.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "layers/stored_tensor.h"

namespace llmserve {
namespace {

// What a quantized weight runs as: `kept` as the file has it, or, where that is null, expanded and
// perhaps rounded anew to `format`.
std::string how_it_runs(const LinearFormat* kept, const LinearFormat* format, DType dtype) {
  if (!kept)
    return format ? concat("rounded anew to ", format->name) : concat("expanded to ", name(dtype));
  if (kept->has_float_products())
    return concat("as ", kept->name, ", with activations that are not rounded to 8 bits");
  return concat("as ", kept->name, ", with activations rounded to 8 bits a token",
                kept->group_size > 0 ? " and group" : "",
                kept->outlier_threshold > 0 ? ", but for outliers" : "");
}

}  // namespace

std::string_view name(WeightGroup group) {
  static constexpr std::array<std::string_view, kNumWeightGroups> kNames{
      "embedding", "attention", "mlp", "experts", "norm", "lm_head"};
  return kNames[static_cast<size_t>(group)];
}

int64_t WeightReport::total_bytes() const {
  return std::accumulate(group_bytes.begin(), group_bytes.end(), int64_t{0});
}

WeightLoader::WeightLoader(const Checkpoint& checkpoint, Backend& backend,
                           const WeightFormat& format, const WeightSinkOptions& options,
                           const TensorRank& rank)
    : rank_(rank),
      source_(checkpoint, backend, format),
      sink_(make_weight_sink(options, source_, report_)) {
  check_internal(!options.load || checkpoint.has_tensors(), "weights are loaded from files");
  if (format.integers && !backend.can_run(*format.integers))
    throw NotSupported(concat("quantization '", format.integers->name,
                              "' is not supported on device '", backend.name(),
                              "'; use device='cpu', or no quantization"));
}

void WeightLoader::count(WeightGroup group, int64_t num_bytes) {
  report_.group_bytes[static_cast<size_t>(group)] += num_bytes;
}

LinearWeight WeightLoader::plan_linear(WeightGroup group, const StackedRows& rows) {
  LinearWeight weight;
  weight.out_features = rows.num_rows();
  weight.in_features = rows.columns.size;
  weight.dtype = source_.format().dtype;
  report_.max_in_features = std::max(report_.max_in_features, weight.in_features);
  weight.format = rows.format ? rows.format : source_.format().integers;
  if (!weight.format) {
    count(group, backend().packed_bytes(weight.out_features, weight.in_features, weight.dtype));
    return weight;
  }
  check_fits(*weight.format, rows.parts[0].name, weight.in_features);
  count(group, backend().packed_bytes(weight.out_features, weight.in_features, *weight.format));
  if (std::ranges::find(report_.integers, weight.format) == report_.integers.end())
    report_.integers.push_back(weight.format);
  report_.activation_bytes = std::max(
      report_.activation_bytes, quantized_activation_bytes(*weight.format, weight.in_features));
  return weight;
}

void WeightLoader::note_quantized(const StackedRows& rows, const LinearFormat* format) {
  for (const auto& quantized : rows.quantized) {
    if (!quantized) continue;
    const QuantizedUse use{.stored = quantized->description(),
                           .runs = how_it_runs(rows.format, format, source_.format().dtype)};
    const auto known = std::ranges::find_if(report_.quantized, [&](const QuantizedUse& other) {
      return other.stored == use.stored && other.runs == use.runs;
    });
    if (known != report_.quantized.end())
      ++known->num_weights;
    else
      report_.quantized.push_back({use.stored, use.runs, 1});
  }
}

std::vector<LinearWeight> WeightLoader::linear(WeightGroup group,
                                               const std::vector<WeightPart>& parts,
                                               int64_t in_features, bool is_transposed,
                                               const Shard& shard) {
  std::vector<LinearWeight> weights;
  for (const StackedRows& rows : source_.stack(parts, in_features, is_transposed, shard)) {
    LinearWeight planned = plan_linear(group, rows);
    note_quantized(rows, planned.format);
    LinearWeight& weight = weights.emplace_back(sink_->linear(std::move(planned), rows));
    if (!rows.input_order) continue;
    weight.input_order = rows.input_order;
    count(group, std::ssize(*rows.input_order) * size_bytes(DType::kI32));
  }
  return weights;
}

LinearWeight WeightLoader::float_linear(WeightGroup group, const std::string& name,
                                        int64_t out_features, int64_t in_features, bool is_vector) {
  const WeightPart part{.name = name, .size = out_features, .is_vector = is_vector};
  const StackedRows rows = source_.stack({&part, 1}, in_features, /*is_transposed=*/false, {},
                                         /*keeps_blocks=*/false)[0];
  LinearWeight weight{.out_features = out_features, .in_features = in_features};
  report_.max_in_features = std::max(report_.max_in_features, in_features);
  count(group, backend().packed_bytes(out_features, in_features, weight.dtype));
  return sink_->linear(std::move(weight), rows);
}

void WeightLoader::note_grouped(const GroupedShape& shape) {
  GroupedShape& most = report_.grouped;
  most.max_tokens = std::max(most.max_tokens, shape.max_tokens);
  most.rows_per_token = std::max(most.rows_per_token, shape.rows_per_token);
  most.num_weights = std::max(most.num_weights, shape.num_weights);
  most.in_features = std::max(most.in_features, shape.in_features);
  most.activation_bytes = std::max(most.activation_bytes, shape.activation_bytes);
  most.out_features = std::max(most.out_features, shape.out_features);
}

void WeightLoader::note_experts(int64_t num_experts, int64_t experts_per_token) {
  report_.num_experts = std::max(report_.num_experts, num_experts);
  report_.experts_per_token = std::max(report_.experts_per_token, experts_per_token);
}

VectorWeight WeightLoader::vector(WeightGroup group, const std::vector<WeightPart>& parts,
                                  const Shard& shard) {
  const StackedRows rows = source_.stack_vectors(parts, shard);
  for (const WeightPart& part : rows.parts)
    count(group, part.size * std::max<int64_t>(1, part.width) * size_bytes(DType::kF32));
  return sink_->vector(rows);
}

VectorWeight WeightLoader::constant(WeightGroup group, int64_t size, float value) {
  count(group, size * size_bytes(DType::kF32));
  return sink_->constant(size, value);
}

TableWeight WeightLoader::table(WeightGroup group, const std::string& name, int64_t rows,
                                int64_t columns) {
  const Checkpoint& checkpoint = source_.checkpoint();
  const TensorEntry& entry = source_.find(name, {rows, columns});
  const bool is_on_host = source_.backend().memory().is_host();
  TableWeight table;
  if (is_on_host) table.blocks = checkpoint.storage(entry).blocks;
  const bool is_mapped =
      is_on_host && (table.blocks || !checkpoint.has_tensors() || is_in_place(checkpoint, entry));
  // Ranks of one process read the same mapping, which the first one counts.
  if (!is_mapped || rank_.rank == 0)
    count(group,
          table.blocks ? entry.num_bytes : value_bytes(checkpoint, entry, source_.format().dtype));
  if (is_mapped && rank_.rank == 0) report_.mapped_bytes += entry.num_bytes;
  sink_->table(entry, table);
  return table;
}

WeightReport WeightLoader::report() const {
  WeightReport report = report_;
  report.unused_tensors = source_.unused();
  report.notes = source_.notes();
  return report;
}

}  // namespace llmserve
