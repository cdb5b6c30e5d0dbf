#include "engine/step_wire.h"

#include <algorithm>
#include <numeric>

namespace llmserve {
namespace {

template <class T>
std::span<const T> span_of(const std::vector<T>& values) {
  return values;
}

size_t num_used(int64_t kv_len, int64_t block_size) {
  return static_cast<size_t>((kv_len + block_size - 1) / block_size);
}

void check_all(std::span<const int32_t> values, int64_t low, int64_t high, const char* what) {
  for (const int32_t value : values)
    if (value < low || value > high) WireReader::fail(what);
}

}  // namespace

void write_step(const StepBatch& batch, int64_t block_size, int64_t hidden_size,
                std::vector<std::byte>& bytes) {
  check_internal(!batch.has_awaited, "ranks of other processes await no tokens");
  const ModelInput& input = batch.input;
  WireWriter writer(bytes);
  const auto count = [&](auto size) { writer.integer(static_cast<uint32_t>(size)); };
  count(input.num_tokens());
  count(input.num_sequences());
  count(input.logit_rows.size());
  count(input.max_blocks);
  count(input.kv_groups.size());
  count(input.wanted_layers.size());
  count(batch.pooled_rows.size());
  count(batch.copies.size());
  count(input.given_embeddings.size());
  count(batch.second_half);
  for (const std::span<const int32_t> array : {input.token_ids, input.query_starts, input.kv_lens,
                                               input.adapters, input.state_slots, input.logit_rows})
    writer.array(array);
  // What comes after a sequence's last block is anything.
  const auto width = static_cast<size_t>(input.max_blocks);
  for (const KvGroupInput& group : input.kv_groups) {
    for (size_t b = 0; b < input.kv_lens.size(); ++b) {
      const auto row = group.block_tables.subspan(b * width, width);
      const size_t used = num_used(input.kv_lens[b], block_size);
      writer.array(row.first(used));
      for (size_t i = used; i < width; ++i) writer.integer(uint32_t{0});
    }
  }
  writer.array(input.wanted_layers);
  for (const PooledRows& rows : batch.pooled_rows) {
    count(rows.begin);
    count(rows.count);
    count(rows.position);
  }
  for (const auto& [from, to] : batch.copies) {
    count(from);
    count(to);
  }
  for (const GivenRows& given : input.given_embeddings) {
    count(given.begin);
    count(given.count);
  }
  for (const GivenRows& given : input.given_embeddings)
    writer.array(std::span(given.rows, static_cast<size_t>(given.count * hidden_size)));
}

const StepBatch& StepReader::read(Bytes bytes) {
  WireReader reader(bytes);
  const auto size = [&](int64_t high, const char* what) {
    return static_cast<size_t>(reader.integer<uint32_t>(0, high, what));
  };
  const size_t num_tokens = size(limits_.max_tokens, "it has too many tokens");
  const size_t num_sequences = size(limits_.max_sequences, "it has too many sequences");
  // The first tokens of several samples are drawn from one token of their prompt.
  const size_t num_rows = size(2 * limits_.max_tokens, "it has too many rows");
  const size_t max_blocks =
      size(static_cast<int64_t>(num_used(limits_.max_model_len, limits_.block_size)),
           "its tables are too wide");
  const size_t num_groups =
      size(static_cast<int64_t>(limits_.num_groups), "it has other cache groups");
  if (num_groups != limits_.num_groups) WireReader::fail("it has other cache groups");
  const size_t num_layers = size(limits_.max_wanted_layers, "it wants too many layers");
  const size_t num_pooled = size(limits_.max_sequences, "it has too many pooled prompts");
  const size_t num_copies = size(limits_.num_blocks, "it has too many copies");
  const size_t num_given = size(limits_.max_sequences, "it has too many given prompts");
  const int64_t last_token = std::max<int64_t>(static_cast<int64_t>(num_tokens) - 1, 0);
  batch_.second_half = static_cast<int64_t>(size(last_token, "its second half has no tokens"));
  if (batch_.second_half > 0 && (!limits_.has_halves || num_layers + num_given > 0))
    WireReader::fail("it runs in halves");
  reader.array(num_tokens, token_ids_);
  check_all(token_ids_, 0, limits_.vocab_size - 1, "a token that there is not");
  reader.array(num_sequences + 1, query_starts_);
  reader.array(num_sequences, kv_lens_);
  reader.array(num_sequences, adapters_);
  reader.array(num_sequences, state_slots_);
  read_sequences(reader, num_rows);
  read_blocks(reader, num_groups, max_blocks);
  reader.array(num_layers, wanted_layers_);
  check_all(wanted_layers_, 0, limits_.num_layers + 1, "a layer that there is not");
  batch_.pooled_rows.clear();
  for (size_t i = 0; i < num_pooled; ++i) {
    PooledRows rows;
    rows.begin = reader.integer<uint32_t>(0, static_cast<int64_t>(num_tokens), "a pooled token");
    rows.count = reader.integer<uint32_t>(0, static_cast<int64_t>(num_tokens) - rows.begin,
                                          "a pooled prompt");
    rows.position = reader.integer<uint32_t>(0, limits_.max_model_len, "a pooled position");
    batch_.pooled_rows.push_back(rows);
  }
  batch_.copies.clear();
  for (size_t i = 0; i < num_copies; ++i) {
    const auto from = reader.integer<uint32_t>(0, limits_.num_blocks - 1, "a block");
    const auto to = reader.integer<uint32_t>(0, limits_.num_blocks - 1, "a block");
    batch_.copies.emplace_back(static_cast<int32_t>(from), static_cast<int32_t>(to));
  }
  read_given(reader, num_given);
  reader.end();
  wanted_tokens_.resize(num_layers > 0 ? num_tokens : 0);
  std::iota(wanted_tokens_.begin(), wanted_tokens_.end(), 0);
  batch_.input = {.token_ids = span_of(token_ids_),
                  .given_embeddings = given_,
                  .positions = span_of(positions_),
                  .query_starts = span_of(query_starts_),
                  .kv_lens = span_of(kv_lens_),
                  .max_blocks = static_cast<int64_t>(max_blocks),
                  .kv_groups = groups_,
                  .adapters = span_of(adapters_),
                  .state_slots = span_of(state_slots_),
                  .logit_rows = span_of(logit_rows_),
                  .wanted_layers = span_of(wanted_layers_),
                  .wanted_tokens = span_of(wanted_tokens_)};
  return batch_;
}

void StepReader::read_sequences(WireReader& reader, size_t num_rows) {
  const auto num_tokens = static_cast<int64_t>(token_ids_.size());
  positions_.resize(token_ids_.size());
  if (query_starts_.front() != 0 || query_starts_.back() != num_tokens)
    WireReader::fail("its sequences are not its tokens");
  for (size_t b = 0; b < kv_lens_.size(); ++b) {
    const int64_t begin = query_starts_[b];
    const int64_t end = query_starts_[b + 1];
    if (begin >= end || end > num_tokens) WireReader::fail("its sequences are not its tokens");
    if (kv_lens_[b] < end - begin || kv_lens_[b] > limits_.max_model_len)
      WireReader::fail("a sequence's length");
    for (int64_t i = begin; i < end; ++i)
      positions_[static_cast<size_t>(i)] = static_cast<int32_t>(kv_lens_[b] - (end - i));
  }
  check_all(adapters_, -1, -1, "an adapter that there is not");
  check_all(state_slots_, -1, limits_.num_state_slots - 1, "a state that there is not");
  reader.array(num_rows, logit_rows_);
  check_all(logit_rows_, 0, num_tokens - 1, "a row that there is not");
}

void StepReader::read_blocks(WireReader& reader, size_t num_groups, size_t max_blocks) {
  const int64_t block_size = limits_.block_size;
  tables_.resize(num_groups);
  slots_.resize(num_groups);
  groups_.resize(num_groups);
  for (size_t g = 0; g < num_groups; ++g) {
    reader.array(kv_lens_.size() * max_blocks, tables_[g]);
    check_all(tables_[g], 0, limits_.num_blocks - 1, "a block that there is not");
    slots_[g].resize(token_ids_.size());
    for (size_t b = 0; b < kv_lens_.size(); ++b) {
      const size_t used = num_used(kv_lens_[b], block_size);
      if (used > max_blocks) WireReader::fail("its tables are narrow");
      const auto row = std::span(tables_[g]).subspan(b * max_blocks, max_blocks);
      check_all(row.subspan(used), 0, 0, "a block of no token");
      for (int32_t i = query_starts_[b]; i < query_starts_[b + 1]; ++i) {
        const int64_t position = positions_[static_cast<size_t>(i)];
        const int64_t block =
            tables_[g][b * max_blocks + static_cast<size_t>(position / block_size)];
        slots_[g][static_cast<size_t>(i)] = block * block_size + position % block_size;
      }
    }
    groups_[g] = {.slots = slots_[g], .block_tables = tables_[g]};
  }
}

void StepReader::read_given(WireReader& reader, size_t count) {
  const auto num_tokens = static_cast<int64_t>(token_ids_.size());
  given_.resize(count);
  given_rows_.resize(count);
  for (GivenRows& given : given_) {
    given.begin = reader.integer<uint32_t>(0, num_tokens, "a given token");
    given.count = reader.integer<uint32_t>(0, num_tokens - given.begin, "a given prompt");
  }
  for (size_t i = 0; i < count; ++i) {
    reader.array(static_cast<size_t>(given_[i].count * limits_.hidden_size), given_rows_[i]);
    given_[i].rows = given_rows_[i].data();
  }
}

}  // namespace llmserve
