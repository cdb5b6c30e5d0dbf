// Which backends this machine and this build can run.
#pragma once

#include <string>
#include <string_view>

namespace llmserve {

// Empty where the backend can run; otherwise why not, and what to do. Throws NotSupported for a
// name that is not in the registry.
std::string unavailable_reason(std::string_view name);

// "auto" is the registry's first row that can run; other names are returned as they are.
std::string resolve_backend(std::string_view name);

}  // namespace llmserve
