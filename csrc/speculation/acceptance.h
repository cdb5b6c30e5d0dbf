// How often guesses were right, by their place behind the newest token.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "api/speculation_config.h"

namespace llmserve {

class Acceptance {
 public:
  // Of num_drafted guesses the first num_accepted were right; the next was not, unless it was not
  // looked at. step: a count of steps, by which old tries lose weight.
  void add(int32_t num_drafted, int32_t num_accepted, bool is_cut, int64_t step);
  // The share of tries at place i (0 is the first), those before it being right, that was right.
  // Where little is known here or long ago, what `prior` says, and where that is null a default.
  double rate(int32_t place, const Acceptance* prior, int64_t step) const;
  // That the guesses at the first survival.size() places are all right up to each.
  void fill_survival(const Acceptance* prior, int64_t step, std::span<double> survival) const;
  int64_t num_tries() const { return num_tries_; }

 private:
  struct Place {
    double rate = 0;
    double weight = 0;  // tries, as far as they count
  };
  std::array<Place, kMaxDraftTokens> places_{};
  int64_t num_tries_ = 0;
  int64_t last_step_ = 0;
};

}  // namespace llmserve
