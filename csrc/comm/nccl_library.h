// NCCL, found at run time: nothing of it is needed to build or to load this module.
#pragma once

#include <span>
#include <string>

#include "comm/nccl_api.h"

namespace llmserve {

struct NcclLibrary {
  nccl::Functions call{};
  std::string path;  // where it was found
  int version = 0;   // as NCCL counts: 22703 is 2.27.3

  std::string description() const;  // "NCCL 2.27.3"
};

// libnccl.so.2: one that is loaded already (torch's), one in `folders`, the nvidia-nccl wheel
// beside this package, the loader's places, in this order. It stays for the life of the process.
// Throws NotSupported that says what to install, or which function a library lacks.
NcclLibrary open_nccl(std::span<const std::string> folders = {});

}  // namespace llmserve
