#include "speculation/suffix_drafter.h"

#include <algorithm>

namespace llmserve {
namespace {

// A single token is found everywhere, and says little of the next one.
constexpr int32_t kMinMatch = 2;
constexpr size_t kMaxSalts = 64;

int32_t max_match(const SpeculationConfig& config) {
  return std::max(kMinMatch, config.suffix_max_tree_depth);
}

}  // namespace

SuffixDrafter::SuffixDrafter(const SpeculationConfig& config) : config_(config) {}

void SuffixDrafter::draft(std::span<const DraftTask> tasks,
                          std::span<std::vector<int32_t>> drafts) {
  for (size_t i = 0; i < tasks.size(); ++i) {
    const DraftTask& task = tasks[i];
    NgramIndex& index =
        indices_.try_emplace({task.request_id, task.sample_index}, kMinMatch, max_match(config_))
            .first->second;
    index.extend(task.token_ids);
    find_places(task);
    if (places_.empty()) continue;
    const double most = config_.suffix_max_spec_factor * match_size_;
    walk(static_cast<int32_t>(std::clamp<double>(most, 1, task.max_tokens)), drafts[i]);
  }
}

// Those of the longest suffix that is found anywhere.
void SuffixDrafter::find_places(const DraftTask& task) {
  places_.clear();
  match_size_ = 0;
  const auto add = [&](std::span<const int32_t> text, const NgramIndex& index) {
    matches_.clear();
    index.find(text, task.token_ids, matches_);
    for (const NgramIndex::Match& match : matches_) {
      if (match.size < match_size_) continue;
      if (match.size > match_size_) places_.clear();
      match_size_ = match.size;
      places_.push_back({.text = text, .next = match.end});
    }
  };
  add(task.token_ids, indices_.at({task.request_id, task.sample_index}));
  const auto corpus =
      std::ranges::find(corpora_, task.cache_salt, &decltype(corpora_)::value_type::first);
  if (corpus == corpora_.end()) return;
  corpora_.splice(corpora_.begin(), corpora_, corpus);
  corpora_.front().second.for_each(
      [&](const IndexedText& part) { add(part.token_ids, part.index); });
}

// Along the tokens that most of the places go on with, while that is likely enough.
void SuffixDrafter::walk(int32_t max_tokens, std::vector<int32_t>& draft) {
  double probability = 1;
  while (std::ssize(draft) < max_tokens) {
    const auto num_places = static_cast<double>(places_.size());
    std::erase_if(places_, [](const Place& place) {
      return place.next >= std::ssize(place.text) ||
             place.text[static_cast<size_t>(place.next)] < 0;
    });
    if (places_.empty()) return;
    const auto next = [](const Place& place) {
      return place.text[static_cast<size_t>(place.next)];
    };
    int32_t best = -1;
    int64_t best_count = 0;
    for (const Place& place : places_) {  // at most a few dozen
      const int64_t count = std::ranges::count(places_, next(place), next);
      if (count <= best_count) continue;
      best_count = count;
      best = next(place);
    }
    probability *= static_cast<double>(best_count) / num_places;
    if (probability < config_.suffix_min_token_prob) return;
    draft.push_back(best);
    std::erase_if(places_, [&](const Place& place) { return next(place) != best; });
    for (Place& place : places_) ++place.next;
  }
}

void SuffixDrafter::begin(const Request& request) {
  if (!request.has_drafter || config_.suffix_max_cached_requests == 0) return;
  outputs_[request.id] = {
      .cache_salt = request.cache_salt,
      .by_sample = std::vector<std::vector<int32_t>>(static_cast<size_t>(request.params.n))};
}

void SuffixDrafter::take_output(RequestId request_id, int32_t sample_index,
                                std::span<const int32_t> token_ids, int64_t num_generated) {
  const auto found = outputs_.find(request_id);
  if (found == outputs_.end()) return;
  std::vector<int32_t>& output = found->second.by_sample[static_cast<size_t>(sample_index)];
  // Where something was missed, what came before it is of no use here.
  if (std::ssize(output) + std::ssize(token_ids) > num_generated) output.clear();
  output.insert(output.end(), token_ids.begin(), token_ids.end());
}

void SuffixDrafter::forget(RequestId request_id, int32_t sample_index, bool is_last) {
  indices_.erase({request_id, sample_index});
  const auto found = outputs_.find(request_id);
  if (found == outputs_.end()) return;
  std::vector<int32_t>& output = found->second.by_sample[static_cast<size_t>(sample_index)];
  corpus_of(found->second.cache_salt).add(output);
  output.clear();
  if (is_last) outputs_.erase(found);
}

OutputCorpus& SuffixDrafter::corpus_of(const std::string& salt) {
  const auto found = std::ranges::find(corpora_, salt, &decltype(corpora_)::value_type::first);
  if (found != corpora_.end()) return found->second;
  if (corpora_.size() >= kMaxSalts) corpora_.pop_back();
  corpora_.emplace_front(
      std::piecewise_construct, std::forward_as_tuple(salt),
      std::forward_as_tuple(config_.suffix_max_cached_requests, kMinMatch, max_match(config_)));
  return corpora_.front().second;
}

}  // namespace llmserve
