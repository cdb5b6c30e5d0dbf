// The DLPack ABI, versions 0 (unversioned) and 1: how array libraries lend each other memory. Field
// order and widths are the standard's (dmlc.github.io/dlpack, "C API"); the names are ours. The
// Python side of it is the array API's data interchange protocol: `__dlpack__` gives a capsule,
// whose consumer renames it and calls the deleter when done.
#pragma once

#include <cstdint>

namespace llmserve::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr uint32_t kMinorVersion = 0;

inline constexpr const char* kCapsule = "dltensor";
inline constexpr const char* kUsedCapsule = "used_dltensor";
inline constexpr const char* kVersionedCapsule = "dltensor_versioned";
inline constexpr const char* kUsedVersionedCapsule = "used_dltensor_versioned";

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };

struct Device {
  int32_t type = kCpu;
  int32_t id = 0;
};

enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6 };

struct DataType {
  uint8_t code = kFloat;
  uint8_t bits = 32;
  uint16_t lanes = 1;
};

struct Tensor {
  void* data = nullptr;
  Device device;
  int32_t rank = 0;
  DataType dtype;
  int64_t* shape = nullptr;    // [rank]
  int64_t* strides = nullptr;  // [rank], in elements; null: row-major and contiguous
  uint64_t byte_offset = 0;    // of the first element, from data
};

struct ManagedTensor {
  Tensor tensor;
  void* context = nullptr;
  void (*deleter)(ManagedTensor* self) = nullptr;
};

inline constexpr uint64_t kReadOnly = 1;
inline constexpr uint64_t kIsCopied = 2;

struct VersionedManagedTensor {
  struct {
    uint32_t major = kMajorVersion;
    uint32_t minor = kMinorVersion;
  } version;
  void* context = nullptr;
  void (*deleter)(VersionedManagedTensor* self) = nullptr;
  uint64_t flags = 0;
  Tensor tensor;
};

static_assert(sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64 &&
                  sizeof(VersionedManagedTensor) == 80,
              "the ABI of 64-bit machines");

}  // namespace llmserve::dlpack
