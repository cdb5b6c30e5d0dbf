#include <array>
#include <sstream>

#include "core/error.h"
#include "kernels/backend.h"
#include "kernels/backend_choice.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda_loader.h"
#include "kernels/ref/ref_backend.h"

namespace llmserve {
namespace {

// In the order in which "auto" tries them.
constexpr std::array kRegistry{
    BackendRow{"cuda",
               "NVIDIA GPUs from sm_80, where built with LLMSERVE_CUDA=ON; run on sm_90, compiles "
               "for sm_80",
               &make_cuda_backend},
    BackendRow{
        "cpu",
        "vectorised and multithreaded; AMX (run on an emulator only), AVX-512 with bf16, with "
        "VNNI or without, AVX2 with VNNI (run on an emulator only) or without, or portable, picked "
        "at run time",
        &make_cpu_backend},
    BackendRow{"ref", "scalar loops in float32 on one thread: the specification of every op",
               &make_ref_backend},
};

const BackendRow& find(std::string_view name) {
  std::ostringstream names;
  for (const BackendRow& row : kRegistry) {
    if (row.name == name) return row;
    names << (names.tellp() > 0 ? ", " : "") << row.name;
  }
  throw NotSupported(concat("device '", name, "' is not supported; use one of: ", names.str()));
}

}  // namespace

std::span<const BackendRow> backend_registry() { return kRegistry; }

std::unique_ptr<Backend> make_backend(std::string_view name, const BackendOptions& options) {
  return find(name).make(options);
}

// The other backends run wherever this was built for.
std::string unavailable_reason(std::string_view name) {
  return find(name).name == "cuda" ? cuda_unavailable_reason() : std::string();
}

std::string resolve_backend(std::string_view name) {
  if (name != "auto") return std::string(name);
  for (const BackendRow& row : kRegistry)
    if (unavailable_reason(row.name).empty()) return std::string(row.name);
  throw InternalError("no backend can run; please report this");
}

}  // namespace llmserve
