// Hands the weights of a model to its layers: found and checked by a source, cut to a rank's share,
// given to a sink.
//
// A plan and a load differ in the sink alone, so that one piece of code builds a model and says
// what it will take.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "kernels/backend.h"
#include "layers/rank_cut.h"
#include "layers/weight_parts.h"
#include "layers/weight_report.h"
#include "layers/weight_sink.h"
#include "layers/weight_source.h"

namespace llmserve {

// Every method finds its tensors, counts the bytes of the weight under `group`, and fills the
// weight as far as the sink does. Errors are CorruptFile: see WeightSource.
class WeightLoader {
 public:
  // Layers ask rank() for their share of a weight. Throws NotSupported if the backend cannot run
  // the format.
  WeightLoader(const Checkpoint& checkpoint, Backend& backend, const WeightFormat& format,
               const WeightSinkOptions& options, const TensorRank& rank = {});

  // Whose weights are loaded.
  const TensorRank& rank() const { return rank_; }

  // The [N_i, K] matrices, stacked along N, in one weight unless they are kept as blocks of several
  // kinds. `is_transposed`: the file has them as [K, N_i].
  std::vector<LinearWeight> linear(WeightGroup group, const std::vector<WeightPart>& parts,
                                   int64_t in_features, bool is_transposed = false,
                                   const Shard& shard = {});
  // A matrix that other ranks have: its tensors are there and of the right shape.
  void skip(const std::vector<WeightPart>& parts, int64_t in_features, bool is_transposed) {
    source_.stack(parts, in_features, is_transposed, {});
  }
  // A vector that other ranks have, likewise.
  void skip_vector(const std::vector<WeightPart>& parts) { source_.stack_vectors(parts, {}); }
  // At multiples of how many elements ranks may cut K of a linear weight; 0: they may not.
  int64_t input_unit(const WeightPart& part, int64_t in_features, bool is_transposed) {
    return source_.input_unit(part, in_features, is_transposed);
  }
  // The matrix [N, K] in f32, whatever other linear weights are in: a router's. `is_vector`: the
  // file has its one row as [K].
  LinearWeight float_linear(WeightGroup group, const std::string& name, int64_t out_features,
                            int64_t in_features, bool is_vector = false);
  // Vectors laid end to end, as f32. An input shard does not cut them.
  VectorWeight vector(WeightGroup group, const std::vector<WeightPart>& parts,
                      const Shard& shard = {});
  VectorWeight vector(WeightGroup group, const std::string& name, int64_t size) {
    return vector(group, {WeightPart{name, size}});
  }
  // A vector that no file has: `value` everywhere.
  VectorWeight constant(WeightGroup group, int64_t size, float value);
  // [rows, columns] as the file has it, row-major; on a device, blocks are expanded.
  TableWeight table(WeightGroup group, const std::string& name, int64_t rows, int64_t columns);

  // Where the weights are, and what they will run on.
  const Backend& backend() const { return source_.backend(); }

  // Whether the checkpoint has the matrix quantized, in several tensors.
  bool is_quantized(const std::string& name, int64_t rows, int64_t columns) {
    return source_.is_quantized(name, rows, columns);
  }

  // Products of rows with weights of their own that a layer asks for.
  void note_grouped(const GroupedShape& shape);
  // How many experts a layer has, and how many of them a token is given.
  void note_experts(int64_t num_experts, int64_t experts_per_token);

  // A tensor that may be in the file and is not needed.
  void ignore(const std::string& name) { source_.ignore(name); }

  // What was taken so far, and what was not.
  WeightReport report() const;

 private:
  void count(WeightGroup group, int64_t num_bytes);
  // What becomes of the parts that are quantized.
  void note_quantized(const StackedRows& rows, const LinearFormat* format);
  // The weight's sizes and format, counted, without its data.
  LinearWeight plan_linear(WeightGroup group, const StackedRows& rows);

  const TensorRank rank_;
  WeightSource source_;
  WeightReport report_;
  const std::unique_ptr<WeightSink> sink_;
};

}  // namespace llmserve
