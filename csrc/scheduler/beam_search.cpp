#include "scheduler/beam_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace llmserve {
namespace {

// Best first; equals stay in the order in which they came.
template <class Scored>
void keep_best(std::vector<Scored>& all, int32_t count) {
  std::ranges::stable_sort(all, std::ranges::greater(), &Scored::score);
  if (std::ssize(all) > count) all.erase(all.begin() + count, all.end());
}

BeamExtension extend(Sequence& parent, const TokenLogprob& token, bool is_end) {
  const double logprob = parent.beam.cumulative_logprob + static_cast<double>(token.logprob);
  const double length = static_cast<double>(parent.num_tokens() + (is_end ? 0 : 1));
  const double penalty = parent.context->request.beam_search->length_penalty;
  return {.parent = &parent,
          .token = token,
          .cumulative_logprob = logprob,
          .score = logprob / std::pow(length, penalty)};
}

void append_to(Beam& beam, const BeamExtension& extension) {
  beam.cumulative_logprob = extension.cumulative_logprob;
  beam.logprobs.push_back(extension.token);
  beam.top_logprobs.push_back(std::exchange(beam.candidates, nullptr));
}

FinishedBeam finished(const BeamExtension& extension, int32_t stop_token_id) {
  const Sequence& parent = *extension.parent;
  FinishedBeam result{
      .score = extension.score,
      .token_ids = {parent.token_ids.begin() + parent.num_prompt_tokens, parent.token_ids.end()},
      .beam = parent.beam,
      .stop_token_id = stop_token_id};
  result.token_ids.push_back(extension.token.token_id);
  append_to(result.beam, extension);
  return result;
}

// The beams that go on, best first. Those that end here are set aside, no more than can be among
// the best at the end.
std::vector<BeamExtension> rank_extensions(std::span<const std::unique_ptr<Sequence>> beams,
                                           RequestContext& context) {
  const int32_t width = context.request.beam_search->beam_width;
  std::vector<FinishedBeam>& ended = context.finished_beams;
  std::vector<BeamExtension> extensions;
  for (const auto& beam : beams) {
    for (const TokenLogprob& token : *beam->beam.candidates) {
      const bool is_end = std::ranges::binary_search(context.stop_token_ids, token.token_id);
      const BeamExtension extension = extend(*beam, token, is_end);
      if (!is_end) {
        extensions.push_back(extension);
      } else if (std::ssize(ended) < width || extension.score > ended.back().score) {
        ended.push_back(finished(extension, token.token_id));
        keep_best(ended, width);
      }
    }
  }
  keep_best(extensions, width);
  return extensions;
}

}  // namespace

// No candidates: the logits were not finite.
void BeamSearch::hold(Sequence& sequence, std::span<const TokenLogprob> candidates) {
  sequence.beam.candidates =
      std::make_shared<const std::vector<TokenLogprob>>(candidates.begin(), candidates.end());
  book_.hold(sequence);
  RequestEntry& entry = *book_.find(sequence.request_id);
  const auto has_candidates = [](const auto& other) { return other->has_candidates(); };
  if (std::ranges::all_of(entry.sequences, has_candidates)) complete_.push_back(&entry);
}

int64_t BeamSearch::advance(int64_t now_us) {
  int64_t num_tokens = 0;
  for (RequestEntry* entry : std::exchange(complete_, {})) num_tokens += advance(*entry, now_us);
  return num_tokens;
}

int64_t BeamSearch::advance(RequestEntry& entry, int64_t now_us) {
  const Sequence& best = *entry.sequences.front();
  const int64_t num_tokens = best.num_tokens() + 1;
  const auto has_none = [](const auto& beam) { return beam->beam.candidates->empty(); };
  if (std::ranges::any_of(entry.sequences, has_none)) {
    book_.finish(entry, FinishReason::kError, not_finite_error(num_tokens - 1));
    return 0;
  }
  const std::vector<BeamExtension> extensions = rank_extensions(entry.sequences, entry.context);
  const bool is_full =
      best.num_generated() + 1 >= best.params().max_tokens || num_tokens >= config_.max_model_len;
  if (extensions.empty() || is_full) {
    finish(entry, extensions, now_us);
  } else if (admission_.outgrows_pool(num_tokens)) {
    book_.finish(entry, FinishReason::kError, admission_.outgrown_error(num_tokens));
  } else {
    replace(entry, extensions, now_us);
  }
  return std::ssize(extensions);
}

// A beam goes on as the first of its extensions, is forked for the others, and dropped where there
// is none. A fork takes the index of a beam that is there no more.
void BeamSearch::replace(RequestEntry& entry, const std::vector<BeamExtension>& extensions,
                         int64_t now_us) {
  std::vector<bool> is_taken(static_cast<size_t>(entry.context.request.beam_search->beam_width));
  for (const auto& beam : entry.sequences) {
    if (std::ranges::count(extensions, beam.get(), &BeamExtension::parent) > 0) {
      is_taken[static_cast<size_t>(beam->sample_index)] = true;
    } else {
      book_.drop(*beam);
    }
  }
  std::vector<Sequence*> beams;                        // parallel to extensions
  for (const BeamExtension& extension : extensions) {  // all forks before any token
    beams.push_back(extension.parent);
    if (std::ranges::count(beams, extension.parent) == 1) continue;
    const auto index = std::ranges::find(is_taken, false);
    *index = true;
    beams.back() = &book_.fork(*extension.parent, static_cast<int32_t>(index - is_taken.begin()));
  }
  for (size_t i = 0; i < beams.size(); ++i) {
    beams[i]->token_ids.push_back(extensions[i].token.token_id);
    append_to(beams[i]->beam, extensions[i]);
    beams[i]->times.last_token_us = now_us;
    if (beams[i]->num_generated() == 1) beams[i]->times.first_token_us = now_us;
    book_.advance(*beams[i]);
  }
  std::ranges::stable_sort(entry.sequences, {}, [&](const auto& beam) {  // dropped ones last
    return std::ranges::find(beams, beam.get()) - beams.begin();
  });
  entry.context.num_unfinished = static_cast<int32_t>(beams.size());
}

// One event for each of the best, in their order.
void BeamSearch::finish(RequestEntry& entry, const std::vector<BeamExtension>& extensions,
                        int64_t now_us) {
  std::vector<FinishedBeam> best = std::move(entry.context.finished_beams);
  for (const BeamExtension& extension : extensions) best.push_back(finished(extension, -1));
  keep_best(best, entry.context.request.beam_search->beam_width);
  for (size_t i = 0; i < best.size(); ++i) {
    TokenEvent& event = outbox_.add_event(*entry.sequences.front());
    event.sample_index = static_cast<int32_t>(i);
    event.token_ids = std::move(best[i].token_ids);
    event.num_generated = std::ssize(event.token_ids);
    event.logprobs = std::move(best[i].beam.logprobs);
    for (const Candidates& top : best[i].beam.top_logprobs) event.top_logprobs.push_back(*top);
    event.stop_token_id = best[i].stop_token_id;
    event.finish_reason = event.stop_token_id >= 0 ? FinishReason::kStop : FinishReason::kLength;
    event.times.last_token_us = now_us;
    event.is_request_finished = i + 1 == best.size();
    outbox_.add_progress({.request_id = event.request_id,
                          .sample_index = event.sample_index,
                          .num_tokens = static_cast<int32_t>(event.num_generated),
                          .num_preemptions = event.num_preemptions,
                          .num_cached_tokens = event.num_cached_tokens,
                          .times = event.times});
  }
  for (const auto& beam : entry.sequences) book_.drop(*beam);
  book_.count_finished(entry.context.request);
}

}  // namespace llmserve
