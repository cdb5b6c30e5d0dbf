// One decoder layer at a time over the hidden states of many sequences: how a model is calibrated
// without all of its weights in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/single_communicator.h"
#include "core/arena.h"
#include "engine/kv_storage.h"
#include "models/decoder.h"

namespace llmserve {

// The largest magnitudes of keys and values.
struct KvRange {
  float keys = 0.0f;
  float values = 0.0f;
};

// The runner owns a backend, the embedding, the weights of at most one layer, and a cache for one
// batch of sequences, each of which it sees whole. One thread calls it.
class LayerRunner {
 public:
  struct Options {
    std::string model_path;
    std::string config_text;      // in the place of config.json; empty: the model's own
    std::string dtype = "auto";   // of the weights, which are run dequantized
    int64_t max_model_len = 0;    // 0: the model's maximum
    int64_t max_tokens = 2048;    // of a batch
    int64_t max_sequences = 128;  // of a batch
    int32_t num_threads = 1;
  };

  // Throws what open_checkpoint and read_model_config throw, and NotSupported for a model whose
  // layers keep states of fixed size.
  explicit LayerRunner(Options options);

  const ModelConfig& config() const { return config_; }
  // What the backend, embedding, cache and activations take, without a layer's weights.
  int64_t fixed_bytes() const;

  // hidden [T, E] = what the first layer reads, of sequences of `lengths` tokens one after another.
  void embed(std::span<const int32_t> token_ids, std::span<const int32_t> lengths,
             const Tensor& hidden);
  // Takes the weights of a layer, in the place of the last one's, from the model or from a folder
  // that has tensors of the same names. Throws CorruptFile, NotSupported.
  void load(int64_t layer_idx, const std::string& from = {});
  // hidden [T, E] = what the loaded layer makes of it. `observer` sees the inputs of its linear
  // layers, and `range` grows to hold what the layer stores; null: nobody asks.
  void forward(std::span<const int32_t> lengths, const Tensor& hidden, LinearObserver* observer,
               KvRange* range = nullptr);
  void unload();

 private:
  // A batch as the layers take it.
  class Batch;
  ForwardContext context(const Batch& batch, LinearObserver* observer);
  void lay_out(std::span<const int32_t> lengths, Batch& batch) const;

  const Options options_;
  const Checkpoint checkpoint_;
  const ModelConfig config_;
  const std::unique_ptr<Backend> backend_;
  const WeightFormat format_;
  std::optional<Embedding> embedding_;
  std::optional<PositionEmbedding> positions_;
  std::vector<Rotary> rotaries_;
  std::optional<DecoderLayer> layer_;
  int64_t layer_idx_ = -1;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<KvStorage> storage_;
  int64_t num_blocks_ = 0;  // of a cache group
  SingleCommunicator alone_;
  const ParallelGroups groups_{.tp = alone_, .pp = alone_, .ep = alone_, .cp = alone_};
};

}  // namespace llmserve
