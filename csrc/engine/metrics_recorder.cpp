#include "engine/metrics_recorder.h"

#include <algorithm>
#include <utility>

#include "core/prefetch.h"

namespace llmserve {
namespace {

// Steps of about two, so that a quantile is known within a factor of two anywhere from a fast token
// to a slow request.
constexpr std::array kSeconds = {0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15,  0.3,   0.6,
                                 1.0,   2.0,    4.0,   8.0,  15.0, 30.0, 60.0, 120.0, 300.0, 600.0};
constexpr std::array kTokens = {1.0,    2.0,    4.0,     8.0,     16.0,   32.0,
                                64.0,   128.0,  256.0,   512.0,   1024.0, 2048.0,
                                4096.0, 8192.0, 16384.0, 32768.0, 65536.0};

constexpr std::array<std::string_view, kNumDistributions> kNames = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "iteration_sequences",
    "step_time_seconds",
};

double seconds(int64_t from_us, int64_t to_us) {
  return static_cast<double>(std::max<int64_t>(to_us - from_us, 0)) / 1e6;
}

}  // namespace

std::string_view name(Distribution distribution) {
  return kNames[static_cast<size_t>(distribution)];
}

void Histogram::observe(double value, int64_t times) {
  const auto place = std::ranges::lower_bound(bounds, value) - bounds.begin();
  counts[static_cast<size_t>(place)] += times;
  sum += value * static_cast<double>(times);
}

MetricsRecorder::MetricsRecorder() {
  for (size_t i = 0; i < kNumDistributions; ++i) {
    Histogram& histogram = all_.histograms[i];
    const bool is_time = kNames[i].ends_with("_seconds");
    histogram.bounds = is_time ? std::span<const double>(kSeconds) : kTokens;
    histogram.counts.assign(histogram.bounds.size() + 1, 0);
  }
}

void MetricsRecorder::observe(Distribution distribution, double value, int64_t times) {
  all_.histograms[static_cast<size_t>(distribution)].observe(value, times);
}

void MetricsRecorder::begin(const Request& request) {
  const std::lock_guard lock(mutex_);
  LiveRequest& live = live_[request.id];
  live.arrival_us = request.arrival_us;
  live.num_prompt_tokens = static_cast<int64_t>(request.prompt_token_ids.size());
  live.sequences.resize(static_cast<size_t>(request.params.n));
}

void MetricsRecorder::record(const StepRecord& step) {
  const std::lock_guard lock(mutex_);
  observe(Distribution::kIterationTokens, step.num_tokens);
  observe(Distribution::kIterationSequences, step.num_sequences);
  observe(Distribution::kStepTime, seconds(0, step.schedule_us + step.execute_us + step.commit_us));
}

void MetricsRecorder::update(std::span<const TokenEvent> events, int64_t now_us) {
  if (events.empty()) return;
  const std::lock_guard lock(mutex_);
  found_.clear();
  for (const TokenEvent& event : events) {
    const auto found = live_.find(event.request_id);
    found_.push_back(found == live_.end() ? nullptr : &found->second);
  }
  for (const LiveRequest* request : found_)
    if (request != nullptr) prefetch(request->sequences.data(), sizeof(LiveSequence));
  for (size_t i = 0; i < events.size(); ++i) {
    const TokenEvent& event = events[i];
    if (found_[i] == nullptr) continue;
    LiveRequest& request = *found_[i];
    if (request.scheduled_us == 0) request.scheduled_us = event.times.scheduled_us;
    request.num_cached_tokens = std::max(request.num_cached_tokens, event.num_cached_tokens);
    if (!event.token_ids.empty()) take_tokens(request, event);
    if (!event.is_request_finished) continue;
    finish(request, event, now_us);
    live_.erase(event.request_id);
  }
}

void MetricsRecorder::take_tokens(LiveRequest& request, const TokenEvent& event) {
  const int64_t at_us = event.times.last_token_us;
  if (request.first_token_us == 0) {
    request.first_token_us = event.times.first_token_us;
    observe(Distribution::kTimeToFirstToken, seconds(request.arrival_us, request.first_token_us));
  }
  request.last_token_us = std::max(request.last_token_us, at_us);
  if (static_cast<size_t>(event.sample_index) >= request.sequences.size()) return;  // of beams
  LiveSequence& sequence = request.sequences[static_cast<size_t>(event.sample_index)];
  const auto count = static_cast<int64_t>(event.token_ids.size());
  if (sequence.num_tokens > 0) {
    const double each_s = seconds(sequence.last_token_us, at_us) / static_cast<double>(count);
    observe(Distribution::kInterToken, each_s, count);
  } else {
    sequence.first_token_us = at_us;
  }
  sequence.num_tokens += count;
  sequence.last_token_us = at_us;
}

void MetricsRecorder::finish(const LiveRequest& request, const TokenEvent& event, int64_t now_us) {
  ++all_.num_finished[static_cast<size_t>(event.finish_reason)];
  all_.num_cached_prompt_tokens += request.num_cached_tokens;
  observe(Distribution::kEndToEnd, seconds(request.arrival_us, now_us));
  observe(Distribution::kPromptTokens, static_cast<double>(request.num_prompt_tokens));
  int64_t num_tokens = 0;
  for (const LiveSequence& sequence : request.sequences) {
    num_tokens += sequence.num_tokens;
    if (sequence.num_tokens < 2) continue;
    observe(Distribution::kTimePerOutputToken,
            seconds(sequence.first_token_us, sequence.last_token_us) /
                static_cast<double>(sequence.num_tokens - 1));
  }
  observe(Distribution::kGenerationTokens, static_cast<double>(num_tokens));
  if (request.scheduled_us == 0) return;  // never ran
  observe(Distribution::kQueueTime, seconds(request.arrival_us, request.scheduled_us));
  if (request.first_token_us == 0) return;
  observe(Distribution::kPrefillTime, seconds(request.scheduled_us, request.first_token_us));
  observe(Distribution::kDecodeTime, seconds(request.first_token_us, request.last_token_us));
}

EngineHistograms MetricsRecorder::snapshot() const {
  const std::lock_guard lock(mutex_);
  return all_;
}

}  // namespace llmserve
