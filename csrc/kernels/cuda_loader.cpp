#include "kernels/cuda_loader.h"

#include <dlfcn.h>

#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/trace_range.h"
#include "kernels/cuda/cuda_plugin.h"

namespace llmserve {
namespace {

constexpr const char* kInstall =
    "install with `pip install . -C cmake.define.LLMSERVE_CUDA=ON` where nvcc is, or use "
    "device='cpu'";

struct Loaded {
  const CudaPlugin* plugin = nullptr;
  std::string problem;  // why there is no plugin
};

// The folder of the binary that this function is in.
std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&cuda_unavailable_reason), &info) == 0) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

Loaded load() {
  const std::filesystem::path path = own_folder() / "lib/libllmserve_cuda.so";
  std::error_code error;
  if (!std::filesystem::exists(path, error))
    return {nullptr, concat("this build of llmserve has no CUDA backend; ", kInstall)};
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {nullptr, concat("the CUDA backend does not load: ", dlerror())};
  const auto open = reinterpret_cast<CudaPluginFunction>(dlsym(library, kCudaPluginSymbol));
  const CudaPlugin* plugin = open != nullptr ? open() : nullptr;
  if (plugin == nullptr || plugin->abi != kCudaPluginAbi ||
      std::strcmp(plugin->build_id, LLMSERVE_BUILD_ID) != 0) {
    return {nullptr, concat(path.string(), " is of another build than this module (",
                            plugin != nullptr && plugin->abi == kCudaPluginAbi ? plugin->build_id
                                                                               : "unknown",
                            ", not ", LLMSERVE_BUILD_ID, "); ", kInstall)};
  }
  return {plugin, {}};
}

const Loaded& loaded() {
  static const Loaded result = load();
  return result;
}

const CudaPlugin& usable() {
  const std::string reason = cuda_unavailable_reason();
  if (!reason.empty()) throw NotSupported(concat("device 'cuda' cannot be used: ", reason));
  return *loaded().plugin;
}

}  // namespace

std::string cuda_unavailable_reason() {
  return loaded().plugin ? loaded().plugin->unavailable_reason() : loaded().problem;
}

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options) {
  return make_cuda_backend_on(0, options);
}

std::unique_ptr<Backend> make_cuda_backend_on(int device, const BackendOptions& options) {
  const CudaPlugin& plugin = usable();
  set_range_sink(&plugin.range_sink());
  return plugin.make(options, device);
}

int num_cuda_devices() { return usable().num_devices(); }

int64_t free_cuda_bytes(int device) { return usable().free_bytes(device); }

DeviceQueue cuda_queue(Backend& backend) {
  check_internal(backend.name() == "cuda", "only a CUDA device has a queue");
  return loaded().plugin->queue(backend);
}

std::unique_ptr<DeviceCopies> make_cuda_copies(Backend& backend, int64_t max_bytes) {
  check_internal(backend.name() == "cuda", "only a CUDA device has copies of its memory");
  return loaded().plugin->make_copies(backend, max_bytes);
}

}  // namespace llmserve
