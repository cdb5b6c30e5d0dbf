// Reads the input as a GGUF file: header, every value of the metadata, and the config that it
// makes.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>

#include "core/error.h"
#include "io/gguf.h"
#include "io/gguf_architecture.h"

namespace {

using namespace llmserve;

// The input at the end of a mapping, with a page after it that must not be touched.
class GuardedCopy {
 public:
  GuardedCopy(const uint8_t* data, size_t size)
      : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    num_bytes_ = (size + page_ - 1) / page_ * page_ + page_;
    base_ = static_cast<std::byte*>(
        mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + num_bytes_ - page_, page_, PROT_NONE);
    begin_ = base_ + num_bytes_ - page_ - size;
    if (size > 0) std::memcpy(begin_, data, size);
  }
  ~GuardedCopy() { munmap(base_, num_bytes_); }
  const std::byte* begin() const { return begin_; }

 private:
  size_t page_;
  size_t num_bytes_;
  std::byte* base_;
  std::byte* begin_;
};

void read_value(const GgufFile& file, const GgufValue& value) {
  if (value.type == GgufType::kArray) return;
  if (value.type != GgufType::kString) {
    for (int64_t i = 0; i < value.count; ++i) file.number(value, i);
  } else if (value.is_array) {
    file.for_each_string(value, [](std::string_view) {});
  } else {
    file.string(value);
  }
}

void read(const uint8_t* data, size_t size) {
  const GuardedCopy copy(data, size);
  const auto mapped =
      std::make_shared<const MappedFile>("model.gguf", copy.begin(), static_cast<int64_t>(size));
  const GgufFile file(mapped);
  for (const GgufValue& value : file.metadata()) {
    try {
      read_value(file, value);
    } catch (const Error&) {
    }
  }
  const GgufArchitecture& architecture = find_gguf_architecture(file);
  make_config(file, architecture);
  for (const GgufTensor& tensor : file.tensors()) {
    model_tensor_name(architecture, tensor.name);
    if (!tensor.format || tensor.num_bytes > 1 << 16) continue;
    std::vector<float> values(static_cast<size_t>(tensor.num_bytes / tensor.format->block_bytes *
                                                  tensor.format->block_elements));
    tensor.format->dequantize(file.file()->bytes().data() + tensor.offset,
                              tensor.num_bytes / tensor.format->block_bytes, values.data());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    read(data, size);
  } catch (const CorruptFile&) {
  } catch (const NotSupported&) {
  }
  return 0;
}
