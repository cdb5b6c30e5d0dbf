#include "engine/metrics_recorder.h"

#include <algorithm>

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
  live.num_samples = request.params.n;
  live.num_prompt_tokens = static_cast<int64_t>(request.prompt_token_ids.size());
}

MetricsRecorder::LiveRequest MetricsRecorder::take(RequestId id) {
  const std::lock_guard lock(mutex_);
  const auto taken = live_.extract(id);
  return taken.empty() ? LiveRequest() : taken.mapped();
}

void MetricsRecorder::enter(RequestId id, const LiveRequest& request) {
  const std::lock_guard lock(mutex_);
  live_[id] = request;
}

void MetricsRecorder::record(const StepRecord& step) {
  const std::lock_guard lock(mutex_);
  observe(Distribution::kIterationTokens, step.num_tokens);
  observe(Distribution::kIterationSequences, step.num_sequences);
  observe(Distribution::kStepTime, seconds(0, step.schedule_us + step.execute_us + step.commit_us));
}

// Most tokens are neither the first nor the last of their sequence: of those the request, which is
// somewhere in memory, is not looked at.
void MetricsRecorder::update(const StepResult& result, int64_t now_us) {
  const std::lock_guard lock(mutex_);
  for (const TokenProgress& progress : result.progress) {
    if (progress.previous_us == 0) {
      begin_tokens(progress);
      continue;
    }
    const double waited_s = seconds(progress.previous_us, progress.times.last_token_us);
    observe(Distribution::kInterToken, waited_s / progress.num_tokens, progress.num_tokens);
  }
  for (const TokenEvent& event : result.events) {
    if (event.finish_reason == FinishReason::kNone) continue;
    const auto found = live_.find(event.request_id);
    if (found == live_.end()) continue;
    end_sequence(found->second, event);
    if (!event.is_request_finished) continue;
    finish(found->second, event, now_us);
    live_.erase(found);
  }
}

void MetricsRecorder::begin_tokens(const TokenProgress& progress) {
  const auto found = live_.find(progress.request_id);
  if (found == live_.end() || found->second.first_token_us != 0) return;
  LiveRequest& request = found->second;
  request.first_token_us = progress.times.first_token_us;
  observe(Distribution::kTimeToFirstToken, seconds(request.arrival_us, request.first_token_us));
}

void MetricsRecorder::end_sequence(LiveRequest& request, const TokenEvent& event) {
  if (request.scheduled_us == 0) request.scheduled_us = event.times.scheduled_us;
  request.num_cached_tokens = std::max(request.num_cached_tokens, event.num_cached_tokens);
  request.last_token_us = std::max(request.last_token_us, event.times.last_token_us);
  if (event.sample_index >= request.num_samples) return;  // of beams the best counts
  request.num_generated += event.num_generated;
  if (event.num_generated < 2) return;
  observe(Distribution::kTimePerOutputToken,
          seconds(event.times.first_token_us, event.times.last_token_us) /
              static_cast<double>(event.num_generated - 1));
}

void MetricsRecorder::finish(const LiveRequest& request, const TokenEvent& event, int64_t now_us) {
  ++all_.num_finished[static_cast<size_t>(event.finish_reason)];
  all_.num_cached_prompt_tokens += request.num_cached_tokens;
  observe(Distribution::kEndToEnd, seconds(request.arrival_us, now_us));
  observe(Distribution::kPromptTokens, static_cast<double>(request.num_prompt_tokens));
  observe(Distribution::kGenerationTokens, static_cast<double>(request.num_generated));
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
