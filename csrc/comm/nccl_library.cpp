#include "comm/nccl_library.h"

#include <dlfcn.h>

#include <filesystem>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr const char* kSoname = "libnccl.so.2";
constexpr const char* kInstall =
    "install it with `pip install 'llmserve[cuda]'`, which brings the nvidia-nccl-cu13 wheel";

// Where the wheel puts the library, if it is installed beside this package.
std::filesystem::path wheel_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&open_nccl), &info) == 0) return {};
  // <packages>/llmserve/_core.so
  return std::filesystem::path(info.dli_fname).parent_path().parent_path() / "nvidia/nccl/lib";
}

void* open_library(std::span<const std::string> folders) {
  if (folders.empty())
    if (void* library = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return library;
  std::vector<std::filesystem::path> places(folders.begin(), folders.end());
  places.push_back(wheel_folder());
  for (const std::filesystem::path& place : places)
    if (void* library = dlopen((place / kSoname).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  if (void* library = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL)) return library;
  const char* reason = dlerror();
  throw NotSupported(concat("NCCL, by which GPUs exchange tensors, was not found (",
                            reason != nullptr ? reason : kSoname, "); ", kInstall));
}

// Finds functions by their names, or says which is not there.
struct Symbols {
  void* library;
  std::string path;

  template <class Function>
  void find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr)
      throw NotSupported(
          concat(path, " has no ", name, ", which NCCL 2.18 and later have; ", kInstall));
  }
};

std::string path_of(void* library) {
  Dl_info info{};
  void* symbol = dlsym(library, "ncclGetVersion");
  if (symbol == nullptr || dladdr(symbol, &info) == 0) return kSoname;
  return info.dli_fname;
}

}  // namespace

std::string NcclLibrary::description() const {
  return concat("NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100);
}

NcclLibrary open_nccl(std::span<const std::string> folders) {
  void* opened = open_library(folders);
  NcclLibrary library{.path = path_of(opened)};
  const Symbols symbols{opened, library.path};
  nccl::Functions& call = library.call;
  symbols.find("ncclGetVersion", call.GetVersion);
  if (call.GetVersion(&library.version) != nccl::kSuccess || library.version < nccl::kMinVersion)
    throw NotSupported(concat(library.path, " is NCCL version code ", library.version, ", and ",
                              nccl::kMinVersion, " (2.18) or later is needed; ", kInstall));
  symbols.find("ncclGetUniqueId", call.GetUniqueId);
  symbols.find("ncclCommInitRankConfig", call.CommInitRankConfig);
  symbols.find("ncclCommFinalize", call.CommFinalize);
  symbols.find("ncclCommDestroy", call.CommDestroy);
  symbols.find("ncclCommAbort", call.CommAbort);
  symbols.find("ncclCommGetAsyncError", call.CommGetAsyncError);
  symbols.find("ncclGetErrorString", call.GetErrorString);
  symbols.find("ncclGetLastError", call.GetLastError);
  symbols.find("ncclAllReduce", call.AllReduce);
  symbols.find("ncclAllGather", call.AllGather);
  symbols.find("ncclReduceScatter", call.ReduceScatter);
  symbols.find("ncclBroadcast", call.Broadcast);
  symbols.find("ncclReduce", call.Reduce);
  symbols.find("ncclSend", call.Send);
  symbols.find("ncclRecv", call.Recv);
  symbols.find("ncclGroupStart", call.GroupStart);
  symbols.find("ncclGroupEnd", call.GroupEnd);
  return library;
}

}  // namespace llmserve
