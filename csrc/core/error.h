// The one error hierarchy. Each class maps to a subclass of a natural Python built-in
// (bindings/register_errors.cpp). A message says what was expected, what came, and what to do about
// it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace llmserve {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's mistake: a bad parameter or prompt (Python: ValueError; HTTP 400).
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A model, format or device that this build does not handle (Python: NotImplementedError is a
// RuntimeError).
class NotSupported : public Error {
 public:
  using Error::Error;
};

// A queue or memory that is full (Python: MemoryError's cousin, a RuntimeError; HTTP 429 or 503).
class ResourceExhausted : public Error {
 public:
  using Error::Error;
};

// Bytes on disk that are not what their format promises (Python: OSError and ValueError).
class CorruptFile : public Error {
 public:
  using Error::Error;
};

// A device call that failed: call, code, name (Python: RuntimeError).
class DeviceError : public Error {
 public:
  using Error::Error;
};

// Our bug (Python: RuntimeError). The message asks for a report.
class InternalError : public Error {
 public:
  using Error::Error;
};

// Joins its arguments into one message: `concat("head_dim ", d, " is not supported")`.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Throws InternalError unless an invariant of ours holds. Never used on user input.
inline void check_internal(bool holds, const char* invariant) {
  if (!holds)
    throw InternalError(concat("internal invariant broken: ", invariant, "; please report this"));
}

}  // namespace llmserve
