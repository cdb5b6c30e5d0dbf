#include "engine/layer_runner.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "models/config_reader.h"
#include "models/decoder_parts.h"
#include "models/model_loader.h"

namespace llmserve {
namespace {

constexpr int64_t kBlockSize = 16;

ModelConfig read_config(const Checkpoint& checkpoint, int64_t max_model_len) {
  ModelConfig config = read_model_config(checkpoint.config(), max_model_len);
  const auto has_state = [](const CacheGroupSpec& group) { return group.is_state(); };
  if (std::ranges::any_of(config.cache_groups, has_state))
    throw NotSupported(concat(checkpoint.path(), ": layers of ", config.architecture,
                              " keep states of fixed size, which calibration does not run; use "
                              "method='rtn'"));
  return config;
}

// Of the keys and values in these slots.
void grow(KvRange& range, const PagedKvCache& cache, std::span<const int64_t> slots) {
  const auto* keys = cache.keys.as<float>();
  const auto* values = cache.values.as<float>();
  for (const int64_t slot : slots) {
    const int64_t block = slot / kBlockSize;
    const int64_t offset = slot % kBlockSize;
    for (int64_t head = 0; head < cache.keys.shape[1]; ++head) {
      for (int64_t d = 0; d < cache.keys.shape[3]; ++d)
        range.keys = std::max(range.keys, std::fabs(keys[cache.key_index(block, head, offset, d)]));
      const float* row = values + block * cache.values.strides[0] + head * cache.values.strides[1] +
                         offset * cache.values.strides[2];
      for (int64_t d = 0; d < cache.values.shape[3]; ++d)
        range.values = std::max(range.values, std::fabs(row[d]));
    }
  }
}

}  // namespace

class LayerRunner::Batch {
 public:
  std::vector<int32_t> tokens;
  std::vector<int32_t> positions;
  std::vector<int32_t> starts{0};
  std::vector<int32_t> lengths;
  std::vector<std::vector<int64_t>> slots;   // [groups][T]
  std::vector<std::vector<int32_t>> tables;  // [groups][B * M]
  std::vector<KvGroupInput> groups;
  int64_t max_blocks = 0;
  ModelInput input;
};

LayerRunner::LayerRunner(Options options)
    : options_(std::move(options)),
      checkpoint_(open_checkpoint(options_.model_path, options_.config_text)),
      config_(read_config(checkpoint_, options_.max_model_len)),
      backend_(make_backend("cpu", {.num_threads = options_.num_threads})),
      format_{.dtype = resolve_dtype(options_.dtype, checkpoint_)},
      rotaries_(make_rotaries(config_)) {
  if (options_.max_tokens < 1 || options_.max_sequences < 1)
    throw InvalidArgument(concat("max_tokens and max_sequences: expected at least 1, got ",
                                 options_.max_tokens, " and ", options_.max_sequences));
  WeightLoader weights(checkpoint_, *backend_, format_, {.load = true});
  embedding_.emplace(weights, config_.names.embedding, config_.vocab_size, config_.hidden_size,
                     config_.embedding_scale);
  positions_ = position_embedding(weights, config_);
  // A sequence's last block may be all but empty.
  num_blocks_ = options_.max_tokens / kBlockSize + options_.max_sequences + 1;
  const int64_t num_groups = std::ssize(row_groups(config_.cache_groups));
  storage_ = std::make_unique<KvStorage>(
      config_.cache_groups, config_.kv_places,
      KvStorage::Shape{.num_blocks = num_groups * num_blocks_, .block_size = kBlockSize},
      *backend_);
}

int64_t LayerRunner::fixed_bytes() const {
  return storage_->num_bytes() + (arena_ ? arena_->capacity_bytes() : 0);
}

void LayerRunner::lay_out(std::span<const int32_t> lengths, Batch& batch) const {
  const size_t num_groups = row_groups(config_.cache_groups).size();
  batch.slots.resize(num_groups);
  batch.tables.resize(num_groups);
  int64_t num_tokens = 0;
  int64_t longest = 0;
  for (const int32_t length : lengths) {
    if (length < 1) throw InvalidArgument(concat("lengths: expected at least 1, got ", length));
    num_tokens += length;
    longest = std::max<int64_t>(longest, length);
  }
  if (num_tokens > options_.max_tokens || std::ssize(lengths) > options_.max_sequences ||
      longest > config_.max_model_len)
    throw InvalidArgument(concat("lengths: expected at most ", options_.max_tokens, " tokens in ",
                                 options_.max_sequences, " sequences of ", config_.max_model_len,
                                 ", got ", num_tokens, " in ", lengths.size(), " of ", longest));
  batch.max_blocks = (longest + kBlockSize - 1) / kBlockSize;
  batch.lengths.assign(lengths.begin(), lengths.end());
  int64_t first = 0;  // block of the sequence
  for (const int32_t length : lengths) {
    batch.starts.push_back(batch.starts.back() + length);
    for (int32_t i = 0; i < length; ++i) batch.positions.push_back(i);
    for (size_t g = 0; g < num_groups; ++g) {
      const int64_t begin = static_cast<int64_t>(g) * num_blocks_ + first;
      for (int64_t i = 0; i < length; ++i) batch.slots[g].push_back(begin * kBlockSize + i);
      // Blocks behind the sequence's last are not read.
      for (int64_t i = 0; i < batch.max_blocks; ++i)
        batch.tables[g].push_back(
            static_cast<int32_t>(begin + std::min<int64_t>(i, (length - 1) / kBlockSize)));
    }
    first += (length + kBlockSize - 1) / kBlockSize;
  }
  for (size_t g = 0; g < num_groups; ++g)
    batch.groups.push_back({.slots = batch.slots[g], .block_tables = batch.tables[g]});
  if (batch.tokens.empty()) batch.tokens.resize(static_cast<size_t>(num_tokens));
  batch.input = {.token_ids = batch.tokens,
                 .positions = batch.positions,
                 .query_starts = batch.starts,
                 .kv_lens = batch.lengths,
                 .max_blocks = batch.max_blocks,
                 .kv_groups = batch.groups};
}

ForwardContext LayerRunner::context(const Batch& batch, LinearObserver* observer) {
  return {.backend = *backend_,
          .arena = *arena_,
          .input = batch.input,
          .kv_caches = storage_->layers(),
          .groups = groups_,
          .layer_states = {},
          .observer = observer};
}

void LayerRunner::embed(std::span<const int32_t> token_ids, std::span<const int32_t> lengths,
                        const Tensor& hidden) {
  Batch batch;
  batch.tokens.assign(token_ids.begin(), token_ids.end());
  lay_out(lengths, batch);
  const int64_t num_tokens = batch.starts.back();
  if (std::ssize(batch.tokens) != num_tokens || hidden.shape[0] != num_tokens)
    throw InvalidArgument(concat("token_ids and hidden: expected the ", num_tokens,
                                 " tokens of lengths, got ", token_ids.size(), " and ",
                                 hidden.shape[0]));
  const auto is_outside = [&](int32_t id) { return id < 0 || id >= config_.vocab_size; };
  if (std::ranges::any_of(token_ids, is_outside))
    throw InvalidArgument(concat("token_ids: expected ids in [0, V=", config_.vocab_size, ")"));
  Arena arena(positions_ ? positions_->workspace_bytes(num_tokens, config_.hidden_size) : 0);
  const ForwardContext context{.backend = *backend_,
                               .arena = arena,
                               .input = batch.input,
                               .kv_caches = storage_->layers(),
                               .groups = groups_,
                               .layer_states = {}};
  embedding_->forward(context, hidden);
  if (positions_) positions_->add_to(context, hidden);
}

void LayerRunner::load(int64_t layer_idx, const std::string& from) {
  if (layer_idx < 0 || layer_idx >= config_.num_layers)
    throw InvalidArgument(
        concat("layer_idx: expected 0 to ", config_.num_layers - 1, ", got ", layer_idx));
  unload();
  std::optional<Checkpoint> other;
  if (!from.empty()) other.emplace(open_checkpoint(from));
  const Checkpoint& checkpoint = other ? *other : checkpoint_;
  WeightLoader weights(checkpoint, *backend_, format_, {.load = true});
  layer_.emplace(weights, config_, layer_idx);
  for (const auto& file : checkpoint.files()) file->read_state()->check();
  layer_idx_ = layer_idx;
  int64_t bytes = layer_->workspace_bytes(options_.max_tokens);
  for (const Rotary& rotary : rotaries_) bytes += rotary.workspace_bytes(options_.max_tokens);
  if (!arena_ || arena_->capacity_bytes() < bytes) arena_ = std::make_unique<Arena>(bytes);
}

void LayerRunner::unload() {
  layer_.reset();
  layer_idx_ = -1;
}

void LayerRunner::forward(std::span<const int32_t> lengths, const Tensor& hidden,
                          LinearObserver* observer, KvRange* range) {
  if (!layer_) throw InvalidArgument("forward: no layer is loaded; call load() first");
  Batch batch;
  lay_out(lengths, batch);
  if (hidden.shape[0] != batch.starts.back())
    throw InvalidArgument(concat("hidden: expected the ", batch.starts.back(),
                                 " tokens of lengths, got ", hidden.shape[0]));
  const ForwardContext context = this->context(batch, observer);
  const Arena::Scope scope(*arena_);
  const RotaryTableSet tables = make_tables(rotaries_, context);
  const auto idx = static_cast<size_t>(layer_idx_);
  layer_->forward(context, layer_tables(tables, config_, idx), storage_->layers()[idx], hidden);
  const int32_t group = config_.kv_places[idx].group;
  if (range && group >= 0)
    grow(*range, storage_->layers()[idx], batch.slots[static_cast<size_t>(group)]);
}

}  // namespace llmserve
