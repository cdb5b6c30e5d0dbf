// Opens the input as the model.safetensors of a directory.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/error.h"
#include "io/checkpoint.h"

namespace {

// In memory where the system has such a place.
std::filesystem::path make_directory() {
  std::string name = std::filesystem::exists("/dev/shm") ? "/dev/shm/" : "/tmp/";
  name += "fuzz-safetensors-" + std::to_string(getpid());
  std::filesystem::create_directories(name);
  std::ofstream(name + "/config.json") << "{}";
  return name;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::filesystem::path directory = make_directory();
  std::ofstream(directory / "model.safetensors", std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    const llmserve::Checkpoint checkpoint = llmserve::open_checkpoint(directory.string());
    for (const llmserve::TensorEntry& entry : checkpoint.tensors()) checkpoint.describe(entry);
  } catch (const llmserve::CorruptFile&) {
  } catch (const llmserve::NotSupported&) {
  }
  return 0;
}
