#include "engine/head_wire.h"

#include <algorithm>

namespace llmserve {
namespace {

void check_all(std::span<const int32_t> values, int64_t low, int64_t high, const char* what) {
  for (const int32_t value : values)
    if (value < low || value > high) WireReader::fail(what);
}

int64_t num_used(const HeadSequence& sequence, int64_t block_size) {
  return (sequence.first_row + sequence.num_rows + block_size - 1) / block_size;
}

}  // namespace

// Blocks that nobody reads any more have no number; those of a window's past are such.
void write_head_step(const HeadStep& step, int64_t block_size, std::vector<std::byte>& bytes) {
  WireWriter writer(bytes);
  const auto count = [&](auto size) { writer.integer(static_cast<uint32_t>(size)); };
  count(step.place);
  count(step.token_ids.size());
  count(step.sequences.size());
  count(step.logit_rows.size());
  count(step.copies.size());
  for (const auto* array : {&step.token_ids, &step.positions, &step.sources, &step.logit_rows})
    writer.array(std::span<const int32_t>(*array));
  for (const HeadSequence& sequence : step.sequences) {
    count(sequence.num_rows);
    count(sequence.first_row);
    const int64_t num_blocks = sequence.block_tables.empty() ? 0 : num_used(sequence, block_size);
    count(num_blocks);
    for (int64_t i = 0; i < num_blocks; ++i)
      count(std::max(sequence.block_tables[0][static_cast<size_t>(i)], 0));
  }
  for (const BlockCopy& copy : step.copies) {
    count(copy.source);
    count(copy.destination);
  }
}

void write_kept_places(std::span<const int32_t> kept, std::vector<std::byte>& bytes) {
  WireWriter writer(bytes);
  writer.integer(static_cast<uint32_t>(kept.size()));
  writer.array(kept);
}

const HeadStep& HeadStepReader::read(Bytes bytes) {
  WireReader reader(bytes);
  const auto size = [&](int64_t high, const char* what) {
    return static_cast<int64_t>(reader.integer<uint32_t>(0, high, what));
  };
  step_.clear();
  step_.place = static_cast<int32_t>(size(limits_.max_place, "a guess's place"));
  const int64_t num_rows = size(limits_.max_rows, "it has too many rows");
  const int64_t num_sequences = size(num_rows, "it has too many sequences");
  const int64_t num_logit_rows = size(num_rows, "it has too many logit rows");
  const int64_t num_copies = size(limits_.num_blocks, "it has too many copies");
  const int64_t num_sources = step_.place == 0 ? limits_.num_kept : limits_.num_outputs;
  reader.array(static_cast<size_t>(num_rows), step_.token_ids);
  reader.array(static_cast<size_t>(num_rows), step_.positions);
  reader.array(static_cast<size_t>(num_rows), step_.sources);
  reader.array(static_cast<size_t>(num_logit_rows), step_.logit_rows);
  check_all(step_.token_ids, 0, limits_.vocab_size - 1, "a token that there is not");
  check_all(step_.positions, 0, limits_.max_model_len - 1, "a position that there is not");
  check_all(step_.sources, 0, num_sources - 1, "a state that there is not");
  check_all(step_.logit_rows, 0, num_rows - 1, "a row that there is not");
  tables_.resize(static_cast<size_t>(num_sequences));
  int64_t num_left = num_rows;
  for (std::vector<int32_t>& table : tables_) {
    HeadSequence& sequence = step_.sequences.emplace_back();
    sequence.num_rows = static_cast<int32_t>(size(num_left, "its sequences are not its rows"));
    if (sequence.num_rows < 1) WireReader::fail("its sequences are not its rows");
    num_left -= sequence.num_rows;
    sequence.first_row = size(limits_.max_model_len - sequence.num_rows, "a sequence's length");
    const int64_t num_blocks = size(limits_.num_blocks, "its tables are too long");
    const bool has_cache = limits_.num_blocks > 0;
    if (num_blocks != (has_cache ? num_used(sequence, limits_.block_size) : 0))
      WireReader::fail("a table of another length");
    reader.array(static_cast<size_t>(num_blocks), table);
    check_all(table, 0, limits_.num_blocks - 1, "a block that there is not");
    if (has_cache) sequence.block_tables = std::span(&table, 1);
  }
  if (num_left != 0) WireReader::fail("its sequences are not its rows");
  for (int64_t i = 0; i < num_copies; ++i) {
    const auto from = static_cast<int32_t>(size(limits_.num_blocks - 1, "a block"));
    const auto to = static_cast<int32_t>(size(limits_.num_blocks - 1, "a block"));
    step_.copies.push_back({.source = from, .destination = to});
  }
  reader.end();
  return step_;
}

std::span<const int32_t> HeadStepReader::read_kept_places(Bytes bytes, int64_t num_tokens) {
  WireReader reader(bytes);
  const int64_t count = reader.integer<uint32_t>(0, limits_.max_rows, "it keeps too many states");
  if (count != num_tokens) WireReader::fail("it keeps states of another step");
  reader.array(static_cast<size_t>(count), kept_);
  check_all(kept_, -1, limits_.num_kept - 1, "a place that there is not");
  reader.end();
  return kept_;
}

}  // namespace llmserve
