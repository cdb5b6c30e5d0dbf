#include "comm/shared_slots.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "comm/hand_over_error.h"
#include "core/human_bytes.h"

namespace llmserve {

SharedSlots::SharedSlots(uint32_t num_slots, uint64_t slot_bytes)
    : file_(memfd_create("llmserve-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING)),
      num_slots_(num_slots),
      slot_bytes_(slot_bytes) {
  const auto num_bytes = static_cast<off_t>(num_slots_ * slot_bytes_);
  if (file_ < 0 || ftruncate(file_, num_bytes) != 0 ||
      fcntl(file_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    if (file_ >= 0) close(file_);
    throw ResourceExhausted(
        concat("no ", human_bytes(num_bytes), " of shared memory: ", std::strerror(error)));
  }
  map();
}

SharedSlots::SharedSlots(int file, uint32_t num_slots, uint64_t slot_bytes)
    : file_(file), num_slots_(num_slots), slot_bytes_(slot_bytes) {
  struct stat status{};
  const int seals = fcntl(file_, F_GET_SEALS);
  const bool is_sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  if (!is_sealed || fstat(file_, &status) != 0 ||
      static_cast<uint64_t>(status.st_size) / slot_bytes_ < num_slots_) {
    close(file_);
    throw HandOverError(HandOverCause::kCorrupt,
                        "the receiver's shared memory is smaller than it says, or not sealed");
  }
  map();
}

void SharedSlots::map() {
  void* const mapped =
      mmap(nullptr, num_slots_ * slot_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapped == MAP_FAILED) {
    close(file_);
    throw ResourceExhausted(concat("shared memory cannot be mapped: ", std::strerror(errno)));
  }
  data_ = static_cast<std::byte*>(mapped);
}

SharedSlots::~SharedSlots() {
  munmap(data_, num_slots_ * slot_bytes_);
  close(file_);
}

}  // namespace llmserve
