#include <array>
#include <sstream>

#include "core/error.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/ref/ref_backend.h"

namespace llmserve {
namespace {

constexpr std::array kRegistry{
    BackendRow{"cpu", "vectorised and multithreaded; AVX-512, AVX2 or portable, picked at run time",
               &make_cpu_backend},
    BackendRow{"ref", "scalar loops in float32 on one thread: the specification of every op",
               &make_ref_backend},
};

}  // namespace

std::span<const BackendRow> backend_registry() { return kRegistry; }

std::unique_ptr<Backend> make_backend(std::string_view name, const BackendOptions& options) {
  std::ostringstream names;
  for (const BackendRow& row : kRegistry) {
    if (row.name == name) return row.make(options);
    names << (names.tellp() > 0 ? ", " : "") << row.name;
  }
  throw NotSupported(concat("device '", name, "' is not supported; use one of: ", names.str()));
}

}  // namespace llmserve
