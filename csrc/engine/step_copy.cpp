#include "engine/step_copy.h"

#include <algorithm>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr int64_t kAlignment = 64;

template <class T>
int64_t padded_bytes(std::span<const T> array) {
  const auto num_bytes = static_cast<int64_t>(array.size_bytes());
  return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// What ops are given of a step; layers that are wanted are the host's.
template <class Input, class Groups, class Visit>
void for_each_array(Input& input, Groups& groups, const Visit& visit) {
  visit(input.token_ids);
  visit(input.positions);
  visit(input.query_starts);
  visit(input.kv_lens);
  visit(input.adapters);
  visit(input.state_slots);
  visit(input.logit_rows);
  visit(input.wanted_tokens);
  for (auto& group : groups) {
    visit(group.slots);
    visit(group.block_tables);
  }
}

}  // namespace

int64_t StepCopy::num_bytes(const StepBatch& batch) {
  int64_t sum = 0;
  for_each_array(batch.input, batch.input.kv_groups,
                 [&](const auto& array) { sum += padded_bytes(array); });
  return sum;
}

const StepBatch& StepCopy::lay_out(const StepBatch& batch, std::span<std::byte> block) {
  check_internal(std::ssize(block) >= num_bytes(batch), "a step's integers have room");
  batch_ = batch;
  groups_.assign(batch.input.kv_groups.begin(), batch.input.kv_groups.end());
  batch_.input.kv_groups = groups_;
  std::byte* next = block.data();
  for_each_array(batch_.input, groups_, [&]<class T>(std::span<const T>& array) {
    auto* const place = reinterpret_cast<T*>(next);
    std::ranges::copy(array, place);
    next += padded_bytes(array);
    array = {place, array.size()};
  });
  return batch_;
}

}  // namespace llmserve
