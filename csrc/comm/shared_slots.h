// Memory that two processes share, in slots: a memfd, which goes with the last who has it open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmserve {

class SharedSlots {
 public:
  // New ones, which cannot be made smaller. Throws ResourceExhausted.
  SharedSlots(uint32_t num_slots, uint64_t slot_bytes);
  // Another process's, whose descriptor it takes. Throws HandOverError (kCorrupt) for a file that
  // is smaller, or that could become so while it is written to.
  SharedSlots(int file, uint32_t num_slots, uint64_t slot_bytes);
  ~SharedSlots();
  SharedSlots(const SharedSlots&) = delete;
  SharedSlots& operator=(const SharedSlots&) = delete;

  int file() const { return file_; }
  uint32_t num_slots() const { return num_slots_; }
  // Precondition: slot < num_slots().
  std::span<std::byte> slot(uint32_t slot) const {
    return {data_ + slot * slot_bytes_, slot_bytes_};
  }

 private:
  void map();

  int file_;
  const uint32_t num_slots_;
  const uint64_t slot_bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace llmserve
