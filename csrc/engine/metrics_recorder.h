// How long requests and steps took and how large they were, as distributions since the engine's
// start. Written by the engine thread, read by any. No allocation a token.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "api/request.h"
#include "api/token_event.h"
#include "engine/step_trace.h"

namespace llmserve {

enum class Distribution : uint8_t {
  kTimeToFirstToken,    // s, from arrival; a request
  kInterToken,          // s between tokens of a sequence
  kTimePerOutputToken,  // s, the mean of a sequence after its first token
  kEndToEnd,            // s, from arrival to the end; a request
  kQueueTime,           // s, from arrival to the first step; a request
  kPrefillTime,         // s, from there to the first token; a request
  kDecodeTime,          // s, from there to the last token; a request
  kPromptTokens,        // a request
  kGenerationTokens,    // a request, over its samples
  kIterationTokens,     // a step
  kIterationSequences,  // a step
  kStepTime,            // s; a step
};
inline constexpr size_t kNumDistributions = 12;
// As Prometheus names it: "time_to_first_token_seconds".
std::string_view name(Distribution distribution);

struct Histogram {
  std::span<const double> bounds;  // [b] upper, increasing
  std::vector<int64_t> counts;     // [b + 1] of values up to a bound and above the one before
  double sum = 0;

  void observe(double value, int64_t times = 1);
};

struct EngineHistograms {
  std::array<Histogram, kNumDistributions> histograms;    // by Distribution
  std::array<int64_t, kNumFinishReasons> num_finished{};  // requests, by FinishReason
  int64_t num_cached_prompt_tokens = 0;                   // of the finished ones
};

class MetricsRecorder {
 public:
  // What the sequences of a request have told up to now, at their first tokens and their ends.
  struct LiveRequest {
    int64_t arrival_us = 0;
    int32_t num_samples = 1;
    int64_t num_prompt_tokens = 0;
    int64_t num_cached_tokens = 0;
    int64_t num_generated = 0;
    int64_t scheduled_us = 0;
    int64_t first_token_us = 0;
    int64_t last_token_us = 0;
  };

  MetricsRecorder();

  void begin(const Request& request);
  // Of a request that goes on at another replica.
  LiveRequest take(RequestId id);
  void enter(RequestId id, const LiveRequest& request);
  // Of a step that ran something.
  void record(const StepRecord& step);
  void update(const StepResult& result, int64_t now_us);

  EngineHistograms snapshot() const;

 private:
  void observe(Distribution distribution, double value, int64_t times = 1);
  void begin_tokens(const TokenProgress& progress);
  void end_sequence(LiveRequest& request, const TokenEvent& event);
  void finish(const LiveRequest& request, const TokenEvent& event, int64_t now_us);

  mutable std::mutex mutex_;
  EngineHistograms all_;
  std::unordered_map<RequestId, LiveRequest> live_;
};

}  // namespace llmserve
