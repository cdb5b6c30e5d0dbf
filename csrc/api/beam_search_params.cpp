#include "api/beam_search_params.h"

#include <cmath>

#include "core/error.h"

namespace llmserve {

void BeamSearchParams::validate() const {
  if (beam_width < 1 || beam_width > kMaxBeamWidth) {
    throw InvalidArgument(
        concat("beam_width must be between 1 and ", kMaxBeamWidth, ", got ", beam_width));
  }
  if (!std::isfinite(length_penalty))
    throw InvalidArgument(concat("length_penalty must be finite, got ", length_penalty));
}

}  // namespace llmserve
