// A hand-over that failed, and why.
#pragma once

#include <string>

#include "core/error.h"
#include "core/hand_over_cause.h"

namespace llmserve {

class HandOverError : public Error {
 public:
  HandOverError(HandOverCause cause, const std::string& message) : Error(message), cause_(cause) {}
  HandOverCause cause() const { return cause_; }

 private:
  HandOverCause cause_;
};

}  // namespace llmserve
